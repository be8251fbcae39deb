"""The types of a claim, its calculation and its verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

TOKENS_128K = 128_000
TOKENS_128K_BINARY = 131_072

HOLDS = "holds"
HOLDS_IF = "holds under its assumption only"
FAILS = "does not reproduce"


class Explained(NamedTuple):
    """The result for a claim: lines of the calculation, figures by name, verdict and its reason."""

    lines: tuple[str, ...]
    figures: dict[str, float]
    verdict: str
    because: str


class CirculatingClaim(NamedTuple):
    """A published claim, with a short name and the function that recomputes it."""

    name: str
    says: str
    work_out: Callable[[], Explained]
