"""Engines: the interface of each inference engine, as a thin map onto a node."""
