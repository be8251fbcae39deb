"""The protocol between engines and their node: keys, slots and leases over a Unix socket."""
