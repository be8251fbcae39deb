"""Check whether members of a pool answer: one connection and one question each, concurrently.

For people (`inspect pool`, `doctor`). A check bypasses the circuit breakers: breakers show what
this host does, a check shows how the member is.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import NamedTuple

from holdfast.errors import HoldfastError, Outcome
from holdfast.membership.members import Member
from holdfast.status import TierStatus
from holdfast.wire.remote.client import TargetClient

CHECK_S = 2.0
"""Longest time for one member to connect and answer, in seconds."""

LATE_S = 0.5
"""A member whose handshake and answer take longer than this is late, in seconds."""

_AT_ONCE = 64


class TargetCondition(enum.StrEnum):
    """How a member answered a check."""

    FINE = "fine"
    LATE = "late"
    BUSY = "busy"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"


class CheckedTarget(NamedTuple):
    """What a check of one member found; `why` is empty if it is fine, `tiers` if it is not."""

    condition: TargetCondition
    why: str
    seconds: float
    tiers: list[TierStatus]

    def text(self) -> str:
        """Return the finding in words."""
        return f"{self.condition}: {self.why}" if self.why else str(self.condition)


def check_members(
    members: Sequence[Member], connect: Callable[[Member], TargetClient]
) -> list[CheckedTarget]:
    """Check members at once, each over a connection of its own."""
    if not members:
        return []
    with ThreadPoolExecutor(min(len(members), _AT_ONCE), "holdfast-check") as threads:
        return list(threads.map(lambda member: check_member(member, connect, CHECK_S), members))


def check_member(
    member: Member, connect: Callable[[Member], TargetClient], within_s: float
) -> CheckedTarget:
    """Connect to one member, ask how it is, and close the connection."""
    began_s = time.monotonic()
    try:
        with closing(connect(member)) as target:
            report, outcome = target.stats(within_s)
            refusal, trouble = target.refusal, target.trouble
    except HoldfastError as error:  # credentials: ours, or the target's opinion of them
        return CheckedTarget(TargetCondition.REFUSED, str(error), time.monotonic() - began_s, [])
    took_s = time.monotonic() - began_s
    if outcome is Outcome.OK:
        condition, why = TargetCondition.FINE, ""
        if took_s > LATE_S:
            condition = TargetCondition.LATE
            why = f"answered after {took_s:.2f} s, more than {LATE_S:g} s"
        return CheckedTarget(condition, why, took_s, report.tiers)
    if refusal:
        return CheckedTarget(TargetCondition.REFUSED, refusal, took_s, [])
    if outcome is Outcome.UNSENT and trouble:
        return CheckedTarget(TargetCondition.BUSY, trouble.removeprefix("busy: "), took_s, [])
    why = trouble or f"no answer ({outcome})"
    if outcome is Outcome.LATE:
        why = f"no answer within {within_s:g} s"
    return CheckedTarget(TargetCondition.UNREACHABLE, why, took_s, [])
