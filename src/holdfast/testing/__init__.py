"""Contracts, faults and payloads for tests: shipped, so that vendors can prove their own tiers."""
