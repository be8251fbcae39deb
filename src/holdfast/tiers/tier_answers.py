"""Check the types and bounds of what a tier of another package returns; pure.

Every function returns the answer, typed, or raises TierFaultError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from holdfast.blocks.envelope import Header
from holdfast.blocks.namespace import Namespace
from holdfast.errors import Outcome
from holdfast.tiers.base import (
    NOWHERE,
    DroppedBlock,
    HeldAnswer,
    Place,
    ReservedPlaces,
    SurvivingRecord,
)

T = TypeVar("T")

_PLACE_MAX = (1 << 63) - 1


class TierFaultError(Exception):
    """An answer that breaks the promises of a tier; the message names the method and the answer."""


def typed(answer: object, wanted: type[T]) -> T:
    """Check that an answer is of a type; a number is no truth value."""
    if not isinstance(answer, wanted) or (wanted is bool and type(answer) is not bool):
        raise TierFaultError(f"returned {shown(answer)}, not {wanted.__name__}")
    return answer


def listed(answer: object, batch: Sequence[Any], wanted: type[T]) -> list[T]:
    """Check that an answer is a list with one entry of a type for each record."""
    if not isinstance(answer, list | tuple) or len(answer) != len(batch):
        raise TierFaultError(f"returned {shown(answer)} for {len(batch)} records, not one each")
    if not set(map(type, answer)) <= {wanted}:
        kinds = sorted({type(each).__name__ for each in answer} - {wanted.__name__})
        raise TierFaultError(f"returned {', '.join(kinds)}, not {wanted.__name__}")
    return list(answer)


def flags(answer: object, keys: Sequence[bytes]) -> bytes:
    """Check that an answer has one byte for each key."""
    if not isinstance(answer, bytes) or len(answer) != len(keys):
        raise TierFaultError(f"returned {shown(answer)}, not one byte for each of {len(keys)} keys")
    return answer


def outcomes_of(answer: object, batch: Sequence[Any], allowed: frozenset[Outcome]) -> list[Outcome]:
    """Check that an answer is a list with one allowed outcome for each record."""
    outcomes = listed(answer, batch, Outcome)
    if not allowed.issuperset(outcomes):
        raise TierFaultError(f"returned {min(set(outcomes) - allowed)!r}, which it may not")
    return outcomes


def number_up_to(answer: object, most: int) -> int:
    """Check that an answer is a whole number from 0 to `most`."""
    if type(answer) is not int or not 0 <= answer <= most:
        raise TierFaultError(f"returned {shown(answer)}, not a number from 0 to {most}")
    return answer


def held_answer(answer: object, most: int) -> HeldAnswer:
    """Check that an answer is a HeldAnswer of at most `most` blocks."""
    if not isinstance(answer, tuple) or len(answer) != len(HeldAnswer._fields):
        raise TierFaultError(f"returned {shown(answer)}, not a HeldAnswer")
    blocks, outcome = answer
    if type(outcome) is not Outcome:
        raise TierFaultError(f"returned a HeldAnswer with {shown(outcome)}, not an Outcome")
    return HeldAnswer(number_up_to(blocks, most), outcome)


def reserved_places(answer: object, sizes: Sequence[int]) -> ReservedPlaces:
    """Check that an answer has a place for each size, none of them twice."""
    if not isinstance(answer, tuple) or len(answer) != len(ReservedPlaces._fields):
        raise TierFaultError(f"returned {shown(answer)}, not ReservedPlaces")
    places = listed(answer[0], sizes, int)
    if not all(NOWHERE <= place <= _PLACE_MAX for place in places):
        raise TierFaultError(f"returned a place that is not from {NOWHERE} to {_PLACE_MAX}")
    taken = [place for place in places if place != NOWHERE]
    if len(set(taken)) != len(taken):
        raise TierFaultError("returned one place twice")
    return ReservedPlaces([Place(place) for place in places], named_blocks(answer[1], DroppedBlock))


def named_blocks(answer: object, wanted: type[T]) -> list[T]:
    """Check that an answer is a list of `DroppedBlock` or of `Candidate`."""
    if not isinstance(answer, list | tuple):
        raise TierFaultError(f"returned {shown(answer)}, not a list of {wanted.__name__}")
    for block in answer:
        fields = block if type(block) is wanted and isinstance(block, tuple) else ()
        if tuple(map(type, fields)) != (bytes, int, Namespace):
            raise TierFaultError(f"returned {shown(block)}, not a {wanted.__name__}")
    return list(answer)


def surviving_record(answer: object) -> SurvivingRecord:
    """Check that an answer is a SurvivingRecord."""
    if isinstance(answer, tuple) and len(answer) == len(SurvivingRecord._fields):
        header, place = answer
        if type(header) is Header and type(place) is int and 0 <= place <= _PLACE_MAX:
            return SurvivingRecord(header, Place(place))
    raise TierFaultError(f"yielded {shown(answer)}, not a SurvivingRecord")


def shown(value: object) -> str:
    """Return a value as short text for an error, also if it cannot be shown."""
    try:
        return f"{type(value).__name__} {value!r:.60}"
    except Exception:  # noqa: BLE001  # code of another package
        return type(value).__name__
