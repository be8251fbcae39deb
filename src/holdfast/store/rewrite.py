"""Written again: what a shared tier lost, or has where nobody will look for it much longer.

A block counts as saved while the index has a place for it below the host. So the place is taken
out of the index, and the block lined up for the tier like any new one; until it is written there,
its copy in memory is not given up.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from holdfast.store.states import HOST, States
from holdfast.tiers.base import NOWHERE, Moving, Place, is_away

_ROWS_AT_ONCE = 4_096


def rewrite_strays(states: States, number: int, keys: Sequence[bytes], nbytes: int) -> bool:
    """Line up those of these blocks, just landed in memory, that tier `number` calls strays."""
    tier = states.lower[number - 1]
    strayed = tier.strayed(keys, nbytes) if isinstance(tier, Moving) else set()
    if strayed:
        with states.lock:
            for key in strayed:
                _unsave(states, states.index.find(key), number)
    return bool(strayed)


def rewrite_lost(states: States) -> bool:
    """Line up what shared tiers lost, where it is still in memory; forget about the rest."""
    found = False
    for number, tier in enumerate(states.lower, start=1):
        lost = tier.lost() if isinstance(tier, Moving) else None
        if lost is not None:
            found = True
            _forget_lost(states, number, lost)
    return found


def put_off(states: States, number: int) -> None:
    """Take all of a tier's line that is still in memory for later: nobody is there to write to."""
    with states.lock:
        keys = list(states.waiting[number - 1])
        states.waiting[number - 1].clear()
        for row in map(states.index.find, keys):
            if row >= 0 and states.index.places[HOST][row] >= 0:
                put_off_row(states, number, row)


def put_off_row(states: States, number: int, row: int) -> None:
    """Write a block that is in memory to a tier later; call under the lock."""
    key = states.index.keys[row] or b""
    states.put_off[number - 1].add(key)
    if not any(key in line for line in states.waiting):
        states.unwanted.add(row)


def resume(states: States) -> bool:
    """Line up what was put off for tiers where somebody is again; return whether any was."""
    found = False
    for number, tier in enumerate(states.lower, start=1):
        late = states.put_off[number - 1]
        if late and not is_away(tier):
            found = True
            with states.lock:
                for key in late:
                    states.unwanted.discard(states.index.find(key))
                    states.waiting[number - 1][key] = None
                late.clear()
    return found


def _forget_lost(states: States, number: int, lost: Callable[[Place], bool]) -> None:
    """Take the places out of the index, some at a time: the lock is held for moments only."""
    with states.lock:
        rows = iter(list(states.index.rows()))
    while some := list(itertools.islice(rows, _ROWS_AT_ONCE)):
        with states.lock:
            for row in some:
                place = Place(states.index.places[number][row])
                if place != NOWHERE and lost(place):
                    _unsave(states, row, number)


def _unsave(states: States, row: int, number: int) -> None:
    if row < 0:
        return
    key, in_memory = states.index.keys[row], states.index.places[HOST][row] >= 0
    states.vacate(row, number)
    if key is not None and in_memory:
        states.waiting[number - 1][key] = None
