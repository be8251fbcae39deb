"""Benchmarks, demos and fault campaigns for Holdfast."""
