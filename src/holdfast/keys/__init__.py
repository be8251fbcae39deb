"""Keys of domains at rest: the key ring with its file and lock, and the audit log."""
