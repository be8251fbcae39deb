"""Codec: pack a payload into a record, verify a record, and seal it with a domain's key."""
