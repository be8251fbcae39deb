"""Model arithmetic: KV bytes per token and per sequence, and prefill FLOP, from a config.json."""
