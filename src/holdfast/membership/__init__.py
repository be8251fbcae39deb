"""Membership of a pool: sources of the member list, views of it, and placement of segments."""
