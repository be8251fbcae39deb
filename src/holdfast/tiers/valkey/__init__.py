"""The Valkey tier: a Redis or Valkey server, or a cluster of them, as a shared tier."""
