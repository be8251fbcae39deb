"""Fault campaigns: damage, crash, forge and fuzz a store, and count wrong bytes served."""
