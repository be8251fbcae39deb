"""Storage tiers: they keep records without reading their payloads."""
