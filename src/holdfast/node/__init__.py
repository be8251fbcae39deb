"""The daemon: a store behind the wire."""
