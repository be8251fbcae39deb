"""Devices: where an engine keeps its pages, and how blocks move between them and the arena."""
