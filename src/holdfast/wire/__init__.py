"""Frames between processes: messages, framing, the client and the server side of a socket."""
