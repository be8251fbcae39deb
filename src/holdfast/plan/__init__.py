"""Fetch or recompute; pure."""
