"""Places that keep envelopes they cannot read."""
