"""Hearsay: blocks of which only shared tiers have a copy, as far as is known here.

Some were asked about, some were written there from here and have left memory since. Nobody says
when one goes, so what is remembered is bounded; who needs a block that was forgotten asks again.
"""

from __future__ import annotations

from holdfast.store.states import States
from holdfast.tiers.base import NOWHERE

HEARSAY_MAX = 1 << 18
"""Blocks known only by hearsay; the oldest are forgotten beyond."""

_ROWS_AT_ONCE = 4_096


def forget_oldest(states: States) -> None:
    """Forget what is too much; the lock is held for moments only."""
    while len(states.hearsay) > HEARSAY_MAX:
        with states.lock:
            for _ in range(min(_ROWS_AT_ONCE, len(states.hearsay) - HEARSAY_MAX)):
                key, _ = states.hearsay.popitem(last=False)
                _forget(states, states.index.find(key))


def _forget(states: States, row: int) -> None:
    """Drop hearsay, unless the block has come to lie here meanwhile or is being read."""
    if row < 0 or states.index.leases[row] or row in states.loading:
        return
    known = [tier for tier, column in enumerate(states.index.places) if column[row] != NOWHERE]
    if states.shared.issuperset(known):
        key = states.index.keys[row] or b""
        for tier in known:
            states.vacate(row, tier)
        states.hearsay.pop(key, None)  # as long as one of several was left it was hearsay again
