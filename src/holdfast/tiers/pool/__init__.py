"""Several nodes as one tier: who is in, where a segment lives, whom to trust."""
