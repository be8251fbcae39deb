"""Scenarios on real engines: the demos and the comparisons of time to first token."""
