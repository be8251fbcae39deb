"""Bytes to bytes: how a payload is encoded, packed into a record and verified."""
