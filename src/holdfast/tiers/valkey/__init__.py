"""Redis or Valkey as the far side of a shared tier, one server or a cluster."""
