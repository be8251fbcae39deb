"""A block's name, shape and header."""
