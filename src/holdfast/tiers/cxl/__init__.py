"""The CXL tier: a second tier of memory below the host tier."""
