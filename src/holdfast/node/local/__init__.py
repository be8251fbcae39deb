"""The node's side of engines on this machine: sessions over a Unix socket."""
