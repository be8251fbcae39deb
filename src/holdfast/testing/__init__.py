"""Contracts, faults and payloads for tests; shipped, so that vendors can test their own tiers."""
