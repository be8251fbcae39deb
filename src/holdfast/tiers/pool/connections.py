"""Connections to the members of a pool: one client each, every outcome reported to health."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

from holdfast.errors import HoldfastError, Outcome
from holdfast.membership.members import Member
from holdfast.tiers.breaker import CallEnding
from holdfast.tiers.pool.health import PoolHealth
from holdfast.tiers.pool.target_statistics import CallKind
from holdfast.tiers.transfer_counts import TransferCounts
from holdfast.wire.remote.client import BlockCount, HeldFlags, ReceivedRecords, TargetClient
from holdfast.wire.remote.stream import OnProgress
from holdfast.wire.remote.token import VERBS, Verb

Answer: TypeAlias = ReceivedRecords | HeldFlags | BlockCount | list[Outcome] | Outcome
A = TypeVar("A", bound=Answer)
_log = logging.getLogger(__name__)


class TargetConnections:
    """Connects to members when they are needed. Thread-safe; owns the connections.

    Adds failed calls to `counts`.
    """

    def __init__(
        self,
        connect: Callable[[Member], TargetClient],
        health: PoolHealth,
        counts: TransferCounts,
    ) -> None:
        self._connect = connect
        self._health = health
        self._counts = counts
        self._lock = threading.Lock()
        self._targets: dict[str, tuple[Member, TargetClient]] = {}
        self._left: list[TargetClient] = []
        """Targets at previous addresses; `keep` closes them, because `_connected` must not wait."""
        self._refusals: dict[str, str] = {}
        """Last logged reason why a member could not be connected to, by its id."""
        self._troubles: dict[str, str] = {}
        """What is wrong with members, from the first failed call to the next good one."""
        self._busy: set[str] = set()
        """Members whose trouble is that they have no connection free."""

    def keep(self, known: Collection[str]) -> None:
        """Forget all members but these; close connections to others and to previous addresses."""
        with self._lock:
            left, self._left = self._left, []
            left += [self._targets.pop(gone)[1] for gone in self._targets.keys() - set(known)]
            for noted in (self._refusals, self._troubles):
                for gone in noted.keys() - set(known):
                    del noted[gone]
            self._busy &= set(known)
        for target in left:
            target.close()

    def close(self) -> None:
        """Close every connection."""
        self.keep(())

    def call(
        self,
        member: Member,
        ask: Callable[[TargetClient, OnProgress], A],
        nbytes: int = 0,
        kind: CallKind = CallKind.QUESTION,
    ) -> A | None:
        """Call a member and record the outcome; `nbytes` is the size of request and answer.

        `ask` gets its client, and a callback for moved bytes. Returns None if the member is
        unhealthy, cannot be connected to, or refuses.
        """
        begun = self._health.begin(member.id, nbytes, kind)
        if begun is None:
            return None
        answer: A | None = None
        ending, trouble = CallEnding.CANCELLED, ""
        try:
            target = self._connected(member)
            if target is not None:
                ending = CallEnding.ERROR
                answer = ask(target, partial(self._health.on_progress, begun))
                ending = _ending(answer)
                if ending is CallEnding.CANCELLED and target.is_turned_away:
                    ending = CallEnding.BUSY
                if ending in (CallEnding.ERROR, CallEnding.BUSY):
                    trouble = target.trouble or "no answer"
        except HoldfastError as error:
            trouble = f"refused: {error}"
        finally:
            # otherwise the call would count as in progress, and as a stall of the member, for ever
            self._counts.add(failures=ending is CallEnding.ERROR)
            self._health.end(begun, ending)
        if ending is CallEnding.CANCELLED or not (trouble or self._troubles):
            return answer
        with self._lock:
            before, was_busy = self._troubles.pop(member.id, ""), member.id in self._busy
            self._busy.discard(member.id)
            if trouble:
                self._troubles[member.id] = trouble
            if ending is CallEnding.BUSY:
                self._busy.add(member.id)
        if trouble and (not before or was_busy != (ending is CallEnding.BUSY)):
            how = "has no connection free" if ending is CallEnding.BUSY else "is gone"
            _log.warning("pool member %s at %s %s: %s", member.id, member.address, how, trouble)
        elif before and not trouble:
            _log.warning("pool member %s at %s answers again", member.id, member.address)
        return answer

    def may(self) -> Sequence[Verb]:
        """Return what the token permits, as far as a member was connected to."""
        target = next(iter(self._targets.values()), None)
        return VERBS if target is None else target[1].may()

    def trouble(self, member_id: str) -> str:
        """Return why the last call to a member failed; empty if it succeeded."""
        return self._troubles.get(member_id, "")

    def page(self, member_id: str) -> str:
        """Return the URL of a member's status page; empty if it has none, or is not connected."""
        _, target = self._targets.get(member_id, (None, None))
        return target.page if target is not None else ""

    def _connected(self, member: Member) -> TargetClient | None:
        """Return the client of a member at its present address; None if it cannot be made."""
        try:
            with self._lock:
                known, target = self._targets.get(member.id, (None, None))
                reached = (member.address, member.tls_name)
                if target is None or known is None or (known.address, known.tls_name) != reached:
                    connected = self._connect(member)
                    self._refusals.pop(member.id, None)
                    self._left += [target] if target is not None else []
                    self._targets[member.id], target = (member, connected), connected
                return target
        except HoldfastError as error:  # an error of this host, not a failure of the member
            why = str(error)
        with self._lock:
            is_new = self._refusals.get(member.id) != why
            self._refusals[member.id] = why
        if is_new:
            _log.warning("pool member %s at %s is not asked: %s", member.id, member.address, why)
        return None


def _ending(answer: Answer) -> CallEnding:
    if isinstance(answer, Outcome):
        outcomes = {answer}
    else:
        outcomes = set(answer) if isinstance(answer, list) else {answer.outcome}
    if Outcome.GONE in outcomes or Outcome.LATE in outcomes:
        return CallEnding.ERROR
    if Outcome.UNSENT in outcomes:
        return CallEnding.CANCELLED
    empty = isinstance(answer, ReceivedRecords) and not answer.blocks
    return CallEnding.EMPTY if empty else CallEnding.OK
