"""The node's side of other nodes: records over TCP, as a target of a pool."""
