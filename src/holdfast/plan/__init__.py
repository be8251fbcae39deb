"""Planning: how much of a prompt to fetch and how much to recompute; pure."""
