"""The store: a ladder of tiers with an index, a planner and policies.

What you fetch from and save to, in this process; `holdfast serve` puts the same object behind a
socket. Threads: every method may be called from any thread. `cover`, `reserve`, `release` and
`abort` only change state and return at once; `fetch` and `commit` move and check bytes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from holdfast.blocks.envelope import Header
from holdfast.blocks.fingerprint import Fingerprint
from holdfast.blocks.world import World
from holdfast.clock import Clock
from holdfast.errors import Outcome
from holdfast.plan.planner import Planner
from holdfast.policy.base import Eviction
from holdfast.policy.retention import Retention
from holdfast.policy.turns import Errand
from holdfast.store import adopt as adoption
from holdfast.store import commons, hints
from holdfast.store import cover as coverage
from holdfast.store import domains as domain_street
from holdfast.store import fetch as fetch_street
from holdfast.store import inspect as inspection
from holdfast.store import save as save_street
from holdfast.store import scrub as scrubbing
from holdfast.store.adopt import Berth
from holdfast.store.core import Core
from holdfast.store.cover import Covered, Judged, Prompt
from holdfast.store.fetch import Fetched
from holdfast.store.judgement import Ending, Engine, Step
from holdfast.store.learnt import Learnt
from holdfast.store.meet import meet, strangers
from holdfast.store.prefault import Prefault
from holdfast.store.save import Reserved
from holdfast.store.scrub import EVERYTHING, Scrubber, Wish
from holdfast.store.session import Session
from holdfast.tiers.base import Tier

_HOUSEKEEPING_S = 0.5
_LEARNT_S = 30.0

_log = logging.getLogger("holdfast.store")


class Store(Core):
    """Host arenas above `lower` tiers, fastest first. The store owns and closes the tiers."""

    def __init__(
        self,
        host_bytes: int,
        lower: Sequence[Tier],
        domains: Mapping[str, bytes],
        *,
        eviction: Eviction | None = None,
        planner: Planner | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(
            host_bytes, lower, domains, eviction=eviction, planner=planner, clock=clock
        )
        self._learnt = Learnt(self.judgement, None)
        self.scrubber = Scrubber(self)
        self._met = set[int]()
        self._keep_at = self.clock.now() + _LEARNT_S
        self._prefault = Prefault(self.states)
        self._closed = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="holdfast-keeper", daemon=True)

    def keep_learnt(self, file: Path) -> None:
        """Keep what is learnt of tiers and engines in a file, and know what it says; at start."""
        self._learnt = Learnt(self.judgement, file)
        self._learnt.recall()

    def start(self) -> None:
        """Start the store's threads: memory, recovery, writing behind, housekeeping."""
        self._prefault.start()
        self.recovery.start()
        if self.states.lower:
            self.ladder.start()
        self.cold = True
        self._keeper.start()
        self.scrubber.start()

    def session(self, fingerprint: Fingerprint, domain: str = "default") -> Session:
        """Return the store in terms of tokens and blocks, for one fingerprint in one domain."""
        return Session(self, fingerprint, domain)

    def cover(self, world: World, keys: Sequence[bytes]) -> Covered:
        """Count the leading blocks of a chain that the index knows of, by tier."""
        return coverage.cover(self.states, world, keys)

    def look(self, world: World, keys: Sequence[bytes]) -> Covered:
        """Like `cover`, and ask shared tiers about the rest; waits for them, a bounded time."""
        return coverage.look(self.states, world, keys)

    def asks(self, world: World, keys: Sequence[bytes]) -> bool:
        """Return whether `look` would ask anybody: about blocks that the index does not know."""
        return coverage.asks(self.states, world, keys)

    def judge(self, world: World, keys: Sequence[bytes], prompt: Prompt) -> Judged:
        """Say what of a prompt is worth fetching; see `holdfast.store.cover`."""
        return coverage.judge(self, world, keys, prompt)

    def told(self, engine: Engine, steps: Sequence[Step], endings: Sequence[Ending]) -> None:
        """Learn from what an engine timed, and do what would hold up one that computes."""
        self.judgement.computed(engine, steps)
        for ending in endings:
            self.judgement.ended(engine, ending)
        self.judgement.settle()
        coverage.probe(self)

    def fetch(self, world: World, keys: Sequence[bytes], deadline_s: float) -> Fetched:
        """Bring blocks into the arena, verified and leased; see `holdfast.store.fetch`."""
        return fetch_street.fetch(self, world, keys, deadline_s)

    def lend(
        self,
        world: World,
        keys: Sequence[bytes],
        deadline_s: float,
        errand: Errand = Errand.DEMAND,
    ) -> Fetched:
        """Like `fetch`, for a reader that verifies every record itself, now or later."""
        return fetch_street.lend(self, world, keys, deadline_s, errand)

    def reserve(
        self, world: World, keys: Sequence[bytes], parent: bytes, depth: int, segment: bytes = b""
    ) -> Reserved:
        """Hand out slots to fill; see `holdfast.store.save`."""
        return save_street.reserve(self, world, keys, parent, depth, segment)

    def commit(self, ticket: int, retention: Retention = Retention.SESSION) -> int:
        """Pack and publish filled slots; return how many blocks are new."""
        return save_street.commit(self, ticket, retention)

    def borrowable(self, world: World, keys: Sequence[bytes], common: Sequence[bytes]) -> bool:
        """Whether the public domain holds more of a chain; see `holdfast.store.commons`."""
        return commons.borrowable(self, world, keys, common)

    def borrow(self, world: World, keys: Sequence[bytes], common: Sequence[bytes]) -> int:
        """Copy what the public domain holds of a chain; return how many blocks are new."""
        return commons.borrow(self, world, keys, common)

    def follow(self, world: World, session: str, keys: Sequence[bytes]) -> None:
        """Note the chain that a session uses; see `holdfast.store.hints`."""
        hints.follow(self, world, session, keys)

    def closed(self, domain: bytes, session: str) -> int:
        """Say that a session is over; return how many of its blocks are here."""
        return hints.closed(self, domain, session)

    def returns(self, domain: bytes, session: str, in_s: float) -> int:
        """Say when a session comes back; return how many of its blocks are here."""
        return hints.returns(self, domain, session, in_s)

    def prestage(self, world: World, keys: Sequence[bytes], in_s: float) -> int:
        """Have a chain in memory in `in_s` seconds; return how many of its blocks are held."""
        return hints.prestage(self, world, keys, in_s)

    def pin(self, world: World, keys: Sequence[bytes], ttl_s: float) -> int:
        """Keep a chain in memory for `ttl_s`; return how many of its blocks are."""
        return hints.pin(self, world, keys, ttl_s)

    def abort(self, ticket: int, *, rest_s: float = 0.0) -> None:
        """Give a ticket's slots back, after a rest if its writer may still be alive."""
        save_street.abort(self, ticket, rest_s=rest_s)

    def held(self, world: World, keys: Sequence[bytes]) -> bytes:
        """Return one byte per key, in any order: 1 if the block is held, on whatever tier."""
        with self.states.lock:
            return self.states.index.held(world, keys)

    def berth(self, headers: Sequence[Header]) -> list[Berth]:
        """Hand out slots for records from another node; see `holdfast.store.adopt`."""
        return adoption.berth(self, headers)

    def adopt(self, berths: Sequence[Berth], announced: bytes = b"") -> list[Outcome]:
        """Verify and publish the records received; see `holdfast.store.adopt`."""
        return adoption.adopt(self, berths, announced)

    def abandon(self, berths: Sequence[Berth]) -> None:
        """Give slots back that were not filled, and that nobody writes to any more."""
        adoption.abandon(self, berths)

    def lease(self, world: World, keys: Sequence[bytes], ttl_s: float) -> int:
        """Keep the leading run that lies in memory there for `ttl_s`; return its length."""
        return adoption.lease(self, world, keys, ttl_s)

    def forget(self, world: World, keys: Sequence[bytes]) -> int:
        """Forget these blocks on all tiers; return how many were held."""
        return inspection.forget(self, world, keys)

    def status(self) -> dict[str, Any]:
        """Return fill, speed, counters and recovery as plain data."""
        return {**inspection.status(self), "scrub": self.scrubber.status()}

    def listing(self) -> list[dict[str, Any]]:
        """Return what is stored, by fingerprint and domain, with blocks and bytes per tier."""
        return inspection.listing(self)

    def shared(self) -> dict[str, Any]:
        """Return what each shared tier below says of its far side."""
        return inspection.shared(self)

    def verify(self, wish: Wish = EVERYTHING) -> dict[str, Any]:
        """Read and verify stored copies; drop what fails; see `holdfast.store.scrub`."""
        return scrubbing.scrub(self, wish)

    def drop(self, fingerprint: str) -> dict[str, Any]:
        """Forget the blocks of one fingerprint (hex), or all with `*`; leased ones go last."""
        return inspection.drop(self, fingerprint)

    def domains(self) -> dict[str, Any]:
        """Return every domain and its epochs as plain data."""
        return domain_street.listing(self)

    def rotate(self, name: str) -> dict[str, Any]:
        """Begin another epoch of a domain's data key."""
        return domain_street.rotate(self, name)

    def retire(self, name: str) -> dict[str, Any]:
        """Destroy all data keys of a domain but the newest."""
        return domain_street.retire(self, name)

    def erase(self, name: str) -> dict[str, Any]:
        """Destroy a domain's data keys and forget its blocks; see `holdfast.store.domains`."""
        return domain_street.erase(self, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write what waits to be written, stop the threads, close the tiers."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._keeper.is_alive():
            self._keeper.join()
        self.recovery.close()  # the scrub waits for its end
        self.scrubber.close()
        self._prefault.close()
        self.ladder.give_up()
        self.background.shutdown(wait=True, cancel_futures=True)
        self.ladder.close()
        self._learnt.keep()
        for tier in (*self.states.lower, *self.states.all_hosts()):
            tier.close()
        self.audit.catch_up(whole=True)

    def _keep(self) -> None:
        while not self._closed.wait(_HOUSEKEEPING_S):
            try:
                self._keep_once()
            except Exception:  # noqa: BLE001  # without this thread no lease would ever end
                _log.exception("housekeeping failed; it goes on")

    def _keep_once(self) -> None:
        self.keep_house()
        self.audit.catch_up()
        domain_street.follow(self)
        if self.cold and self.recovery.seconds is not None:
            self.cold = False
            self.background.submit(commons.warm, self)
        hints.bring_up(self)
        for number in set(strangers(self)) - self._met:
            self._met.add(number)
            self.background.submit(meet, self, number)
        if self.clock.now() >= self._keep_at:
            self._learnt.keep()
            self._keep_at = self.clock.now() + _LEARNT_S
