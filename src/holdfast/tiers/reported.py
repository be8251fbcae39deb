"""Check what a tier reports of itself, so that a tier of any package can be shown and counted.

A report is reduced to plain values (None, bool, int, float, str, lists and mappings of them) within
the bounds below. A report that is not usable never fails its reader: the result names the reason in
`trouble`.
"""

from __future__ import annotations

import enum
import math
import numbers
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import msgspec

from holdfast.errors import printable
from holdfast.shared_report import SharedTierReport
from holdfast.status import MemberStatus, SharedTierStatus, TierStatus
from holdfast.tiers.base import HealthReporting, Permitted, SharedTier, TierUsage, is_away

PlainValue: TypeAlias = Any
"""None, a bool, int, float or str, or a list or mapping of these."""

ENTRIES_MAX = 1024
"""Longest list or mapping in a report."""

TEXT_CHARS_MAX = 1024
"""Longest text in a report; the rest is left out."""

DEPTH_MAX = 6
"""Deepest nesting of lists and mappings in a report."""

INTEGER_MAX = (1 << 63) - 1

VERBS_MAX = 16
"""Most verbs of requests that a tier counts."""

_COUNTERS = tuple(field.name for field in msgspec.structs.fields(TierUsage) if field.type is int)
_TEXTS = tuple(field.name for field in msgspec.structs.fields(TierUsage) if field.type is str)


class _Used(Protocol):
    name: str

    def usage(self) -> TierUsage: ...


class _NotPlainError(Exception):
    """A report that is not usable; the message names the value."""


def plain_value(value: object, at: str, depth: int = DEPTH_MAX) -> PlainValue:
    """Return a value as a plain one; raise _NotPlainError, which names it by `at`, for any other.

    Text is cut, and its control characters are written as escapes. NaN and infinity are None.
    """
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        number = int(value)
        if abs(number) > INTEGER_MAX:
            raise _NotPlainError(f"{at} is an integer of more than 63 bits")
        return number
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, str):
        return printable(value, TEXT_CHARS_MAX)
    if not isinstance(value, Mapping | list | tuple):
        raise _NotPlainError(f"{at} is of type {type(value).__name__}, not a plain value")
    if len(value) > ENTRIES_MAX or not depth:
        raise _NotPlainError(f"{at} exceeds {ENTRIES_MAX} entries or {DEPTH_MAX} levels")
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise _NotPlainError(f"{at} has a key of type {type(name).__name__}, not str")
        return {
            plain_value(name, at): plain_value(each, f"{at}.{name:.80}", depth - 1)
            for name, each in value.items()
        }
    return [plain_value(each, f"{at}.{n}", depth - 1) for n, each in enumerate(value)]


def tier_status(tier: _Used) -> TierStatus:
    """Return a tier's usage and counters."""
    try:
        usage: object = tier.usage()
        if not isinstance(usage, TierUsage):
            raise _NotPlainError(f"usage() is of type {type(usage).__name__}, not TierUsage")
        figures = {name: plain_value(getattr(usage, name), f"usage().{name}") for name in _COUNTERS}
        for name, value in figures.items():
            if type(value) is not int or value < 0:
                raise _NotPlainError(f"usage().{name} is {value!r:.80}, not an integer >= 0")
        requests, dollars = _requests(usage)
        texts = {name: str(plain_value(getattr(usage, name), f"usage().{name}")) for name in _TEXTS}
        counted = TierStatus(tier.name, **figures, requests=requests, request_dollars=dollars)
        return msgspec.structs.replace(counted, **texts)
    except Exception as error:  # noqa: BLE001  # code of another package, in a report for people
        return TierStatus(tier.name, trouble=_words(error))


def _requests(usage: TierUsage) -> tuple[dict[str, int], float]:
    """Return the requests of a tier by verb, and their price."""
    requests = plain_value(usage.requests, "usage().requests")
    if not isinstance(requests, dict) or len(requests) > VERBS_MAX:
        raise _NotPlainError(f"usage().requests is not a mapping of at most {VERBS_MAX} verbs")
    for verb, number in requests.items():
        if type(number) is not int or number < 0:
            raise _NotPlainError(f"usage().requests.{verb:.80} is {number!r:.80}, not a count")
    dollars = plain_value(usage.request_dollars, "usage().request_dollars")
    if type(dollars) not in (int, float) or dollars < 0:
        raise _NotPlainError(f"usage().request_dollars is {dollars!r:.80}, not a number >= 0")
    return requests, float(dollars)


def shared_status(tier: SharedTier) -> SharedTierStatus:
    """Return whether a shared tier can be reached, and the health of its members."""
    try:
        members = list[MemberStatus]()
        if isinstance(tier, HealthReporting):
            plain = plain_value(list(tier.member_health()), "member_health()")
            members = msgspec.convert(plain, list[MemberStatus])
        limits = plain_value(tier.limits() if isinstance(tier, Permitted) else "", "limits()")
        return SharedTierStatus(not is_away(tier), members, limits=str(limits))
    except Exception as error:  # noqa: BLE001  # code of another package, in a report for people
        return SharedTierStatus(trouble=_words(error))


def description(tier: SharedTier) -> dict[str, PlainValue]:
    """Return what a shared tier tells of its remote side; it may ask there, bounded in time.

    The result has the fields of `SharedTierReport`, and any others that the tier adds.
    """
    try:
        told = {"members": [], **tier.describe(), "tier": tier.name}
        plain: dict[str, PlainValue] = plain_value(told, "describe()")
        msgspec.convert(plain, SharedTierReport)
        return plain
    except Exception as error:  # noqa: BLE001  # code of another package, in a report for people
        return {"tier": tier.name, "members": [], "trouble": _words(error)}


def _words(error: Exception) -> str:
    why = str(error) if isinstance(error, _NotPlainError) else f"{type(error).__name__}: {error}"
    text: str = plain_value(why, "trouble")
    return text
