"""Measure copies between an arena and a GPU, and what they cost an engine: phases with limits."""
