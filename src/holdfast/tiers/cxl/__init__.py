"""CXL memory as a second tier of memory below the host."""
