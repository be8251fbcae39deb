"""Which block to admit and which to evict; pure."""
