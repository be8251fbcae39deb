"""Loaders of published trace formats, one module per format."""
