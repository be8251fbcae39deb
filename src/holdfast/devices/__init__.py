"""Devices copy blocks between the node's arena and an engine's pages, in host or GPU memory."""
