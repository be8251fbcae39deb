"""The protocol between a node and a target: whole records over TCP or NIXL."""
