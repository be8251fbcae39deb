"""The far sides of a pool: one connection each, and every call judged by its outcome."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from holdfast.blocks.world import World
from holdfast.errors import HoldfastError, Outcome
from holdfast.tiers.pool.breaker import Ending
from holdfast.tiers.pool.evidence import Kind
from holdfast.tiers.pool.health import Call as Begun
from holdfast.tiers.pool.health import PoolHealth
from holdfast.tiers.pool.members import Member
from holdfast.wire.stream import Heard
from holdfast.wire.target import Found, Got, Held

Answer: TypeAlias = Got | Held | Found | list[Outcome] | tuple[dict[str, Any], Outcome]
A = TypeVar("A", bound=Answer)
_log = logging.getLogger(__name__)


class Far(Protocol):
    """What the pool needs of a target; `holdfast.wire.target.Target` is one."""

    epoch: int

    def put(
        self, records: Sequence[memoryview], deadline_s: float, heard: Heard | None = None
    ) -> list[Outcome]:
        """Store whole records; tell `heard` of bytes as they go."""
        ...

    def get(
        self,
        world: World,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        deadline_s: float,
        heard: Heard | None = None,
    ) -> Got:
        """Receive the leading run; tell `heard` of bytes as they come."""
        ...

    def exist(self, world: World, keys: Sequence[bytes], deadline_s: float) -> Held:
        """Say which are held."""
        ...

    def delete(self, world: World, keys: Sequence[bytes], deadline_s: float) -> Found:
        """Forget blocks."""
        ...

    def stage(self, world: World, keys: Sequence[bytes], deadline_s: float) -> Found:
        """Bring blocks to the target's memory."""
        ...

    def stats(self, deadline_s: float) -> tuple[dict[str, Any], Outcome]:
        """Say how it is."""
        ...

    def close(self) -> None:
        """Close the connections."""
        ...


class Call(NamedTuple):
    """A request that health let through, to whom."""

    begun: Begun
    far: Far
    member: Member


class Reach:
    """Connects to members as they are needed. Any thread; owns the connections."""

    def __init__(self, connect: Callable[[Member], Far], health: PoolHealth) -> None:
        self._connect = connect
        self._health = health
        self._lock = threading.Lock()
        self._far: dict[str, tuple[Member, Far]] = {}
        self._left: list[Far] = []
        """At addresses that members have left; closing may wait for calls, which `begin` may not.
        """
        self._refusals: dict[str, str] = {}
        """Why members could not be connected to, as it was said last."""
        self.failures = 0

    def keep(self, known: Collection[str]) -> None:
        """Close the connections to all but these members, and to where members were before."""
        with self._lock:
            gone = [self._far.pop(member_id)[1] for member_id in self._far.keys() - set(known)]
            left, self._left = self._left, []
        for far in gone + left:
            far.close()

    def close(self) -> None:
        """Close every connection."""
        self.keep(())

    def begin(
        self, member: Member, nbytes: int, digest: int, kind: Kind = Kind.QUESTION
    ) -> Call | None:
        """Let a call through, or not, as the member's health is, or if it can not be spoken to."""
        begun = self._health.begin(member.id, nbytes, kind)
        if begun is None:
            return None
        try:
            far = self._far_of(member)
        except HoldfastError as error:  # our own fault, nothing against the member
            self._health.end(begun, Ending.GIVEN_UP)
            self._tell_once(member, str(error))
            return None
        except BaseException:
            self._health.end(begun, Ending.GIVEN_UP)
            raise
        far.epoch = digest
        return Call(begun, far, member)

    def _far_of(self, member: Member) -> Far:
        with self._lock:
            known, far = self._far.get(member.id, (None, None))
            if far is None or known is None or known.address != member.address:
                anew = self._connect(member)
                self._refusals.pop(member.id, None)
                self._left += [far] if far is not None else []
                self._far[member.id], far = (member, anew), anew
            return far

    def _tell_once(self, member: Member, words: str) -> None:
        if self._refusals.get(member.id) != words:
            self._refusals[member.id] = words
            _log.warning("pool member %s at %s is not asked: %s", member.id, member.address, words)

    def heard(self, call: Call | None) -> Heard | None:
        """Return whom to tell how many bytes moved; None where nothing is asked."""
        return None if call is None else partial(self._health.heard, call.begun)

    def tell(self, call: Call | None, ask: Callable[[Far], A]) -> A | None:
        """Make the call and note how it went; None where it was not made or not understood."""
        if call is None:
            return None
        answer: A | None = None
        ending = Ending.BADLY
        try:
            answer = ask(call.far)
            ending = _ending(answer)
        except HoldfastError as error:
            _log.warning("pool member %s at %s: %s", call.member.id, call.member.address, error)
        finally:  # or it would count as under way, and be held against the member, for ever
            self.failures += ending is Ending.BADLY
            self._health.end(call.begun, ending)
        return answer


def _ending(answer: Answer) -> Ending:
    outcomes = _outcomes(answer)
    if not {Outcome.GONE, Outcome.LATE}.isdisjoint(outcomes):
        return Ending.BADLY
    if Outcome.UNSENT in outcomes:
        return Ending.GIVEN_UP
    return Ending.EMPTY if isinstance(answer, Got) and not answer.blocks else Ending.WELL


def _outcomes(answer: Answer) -> set[Outcome]:
    if isinstance(answer, list):
        return set(answer)
    return {answer.outcome} if isinstance(answer, Got | Held | Found) else {answer[1]}
