"""The index of a store: the blocks it holds and their tiers."""
