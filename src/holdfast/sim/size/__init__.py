"""Sizing: the tiers, capacities and bandwidths that a model, a load and a TTFT goal need."""
