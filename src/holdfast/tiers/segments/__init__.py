"""The core of the tiers that keep records in segment objects on a shared medium."""
