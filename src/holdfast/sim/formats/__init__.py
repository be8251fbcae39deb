"""Loaders of published trace formats."""
