"""Shared code of node clients: sessions, private node, hints, backoff, timing, weights digest."""
