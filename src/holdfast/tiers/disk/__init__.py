"""The disk tier: a log of regions in one file, warm after a crash."""
