"""Denials of access, counted: each is reported at once, its repeats with their number at intervals.

The interval doubles from a minute to an hour while a denial repeats. The number of denials is
bounded. A party that is denied for many reasons, or under many names, never suppresses denials of
another kind, and those of its own kind for at most a minute.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

DENIALS_APART_S = 60.0
"""First interval in which equal denials are counted after one was reported."""

DENIALS_APART_MAX_S = 3_600.0

DENIED_MAX = 256
"""Users, hosts and peers (each) whose denials are counted separately within the interval."""

REASONS_MAX = 8
"""Reasons that are counted separately for each of them."""

DENIAL_CHARS_MAX = 256

_SECONDS = re.compile(r"\d+ s\b")
"""Durations in a reason, as of an expired token: they differ each time."""


class Denial(NamedTuple):
    """A denial, when it was last reported, the equal ones since, and the interval to the next."""

    at_s: float
    who: str
    why: str
    repeats: int = 0
    apart_s: float = DENIALS_APART_S


class DenialCounts:
    """Counts equal denials. Not thread-safe: its owner locks. Times in seconds of one clock."""

    def __init__(self) -> None:
        self._denied: dict[str, dict[str, dict[str, Denial]]] = {}
        """By kind, name and reason; bounded by `DENIED_MAX` and `REASONS_MAX`."""

    def __bool__(self) -> bool:
        return bool(self._denied)

    def note(self, who: str, why: str, now_s: float) -> Denial | None:
        """Return a new denial, to be reported; None if it repeats one and was counted.

        `who` is a kind and a name: "user 1000".
        """
        # Both may contain text from an unauthenticated peer, so limit their length.
        who, why = who[:DENIAL_CHARS_MAX], why[:DENIAL_CHARS_MAX]
        kind = self._denied.setdefault(who.partition(" ")[0] if " " in who else "", {})
        reasons = kind.setdefault(who if who in kind or len(kind) < DENIED_MAX else "", {})
        reason = _SECONDS.sub("s", why)
        reason = reason if reason in reasons or len(reasons) < REASONS_MAX else ""
        known = reasons.get(reason)
        if known is None:
            reasons[reason] = Denial(now_s, who, why)
            return reasons[reason]
        reasons[reason] = known._replace(repeats=known.repeats + 1)
        return None

    def due(self, now_s: float = math.inf) -> list[Denial]:
        """Return the repeated denials whose interval is over, to be reported; by default all.

        Forgets those that did not repeat. If a kind is full, it forgets those that did, too.
        """
        late: list[Denial] = []
        for kind in self._denied.values():
            is_full = len(kind) >= DENIED_MAX or now_s == math.inf
            for who, reasons in list(kind.items()):
                for reason, one in list(reasons.items()):
                    apart_s = DENIALS_APART_S if is_full else one.apart_s
                    if now_s - one.at_s < apart_s:
                        continue
                    late += [one] if one.repeats else []
                    if is_full or not one.repeats:
                        del reasons[reason]
                    else:
                        again_s = min(2 * one.apart_s, DENIALS_APART_MAX_S)
                        reasons[reason] = one._replace(at_s=now_s, repeats=0, apart_s=again_s)
                if not reasons:
                    del kind[who]
        return late
