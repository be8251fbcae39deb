"""The disk tier: a log of regions in one file, recovered after a crash."""
