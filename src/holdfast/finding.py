"""Findings: the results of the checks that `holdfast doctor` makes and shows."""

from __future__ import annotations

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """The result of one check; `ok` is None for plain information.

    `warning`: it works now and needs action before long; the exit status stays 0.
    """

    what: str
    found: str
    why: str = ""
    ok: bool | None = None
    warning: bool = False


def problem(what: str, found: str, why: str) -> Finding:
    """Return a finding that needs action; `why` ends with the remedy."""
    return Finding(what, found, why, ok=False)
