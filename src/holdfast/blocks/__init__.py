"""The format of a block: its key, layout, fingerprint, namespace and envelope."""
