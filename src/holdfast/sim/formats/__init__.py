"""Traces as others publish them, one file a format, told apart by what is in them."""
