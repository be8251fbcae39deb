"""Mooncake Store as the far side of a shared tier, its client in a process of its own."""
