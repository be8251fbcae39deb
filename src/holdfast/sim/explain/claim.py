"""A claim and its working: lines with the figures substituted, and a verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

HOLDS = "holds"
HOLDS_IF = "holds under its assumption only"
FAILS = "does not reproduce"


class Explained(NamedTuple):
    """A claim worked out: its working, its figures by name, the verdict and the reason for it."""

    lines: tuple[str, ...]
    figures: dict[str, float]
    verdict: str
    because: str


class Claim(NamedTuple):
    """A claim in circulation, under a short name."""

    name: str
    says: str
    work_out: Callable[[], Explained]
