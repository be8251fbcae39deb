"""Frames between processes: messages, framing, and the clients of nodes and targets."""
