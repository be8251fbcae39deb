"""The store: the only floor where the state of a block changes."""
