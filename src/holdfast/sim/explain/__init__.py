"""Claims in circulation about context memory, worked out again: which hold, and under what.

Each claim is a function that returns its working line by line, figures substituted, and a verdict.
Nothing is copied from where a claim was made: all follows from published configs and formulas.
"""

from __future__ import annotations

import difflib

from holdfast.errors import ConfigError
from holdfast.sim.explain import hardware, sizes, times
from holdfast.sim.explain.claim import FAILS, HOLDS, HOLDS_IF, Claim, Explained

__all__ = ["CLAIMS", "FAILS", "HOLDS", "HOLDS_IF", "Claim", "Explained", "find_claim"]

CLAIMS = (*sizes.CLAIMS, *times.CLAIMS, *hardware.CLAIMS)


def find_claim(name: str) -> Claim:
    """Return one claim by its name. Raises ConfigError with the names that come close."""
    known = {claim.name: claim for claim in CLAIMS}
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name, known, 3, 0.4) or list(known)
    raise ConfigError(f"claim {name!r}: not known; try {', '.join(close)}")
