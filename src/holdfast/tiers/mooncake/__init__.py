"""The Mooncake tier: a Mooncake Store as a shared tier, with its client in a child process."""
