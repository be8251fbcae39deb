"""Published claims about context memory, recomputed: which hold, and under which assumptions.

Each claim has a function that returns its calculation line by line, with numbers substituted, and a
verdict. The calculations use published model configs and formulas only, not the claims' sources.
"""

from __future__ import annotations

import difflib

from holdfast.errors import ConfigError
from holdfast.sim.explain import hardware, sizes, times
from holdfast.sim.explain.claim import FAILS, HOLDS, HOLDS_IF, CirculatingClaim, Explained

__all__ = ["CLAIMS", "FAILS", "HOLDS", "HOLDS_IF", "CirculatingClaim", "Explained", "find_claim"]

CLAIMS = (*sizes.CLAIMS, *times.CLAIMS, *hardware.CLAIMS)


def find_claim(name: str) -> CirculatingClaim:
    """Return a claim by its name. Raises ConfigError with similar names."""
    known = {claim.name: claim for claim in CLAIMS}
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name, known, 3, 0.4) or list(known)
    raise ConfigError(f"claim {name!r}: not known; try {', '.join(close)}")
