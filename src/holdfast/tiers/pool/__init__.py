"""The pool tier: several targets addressed as one tier."""
