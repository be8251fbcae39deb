"""A shared, tiered memory for the KV caches of LLM inference."""

__version__ = "0.1.0"
