"""The read street: coverage, plan, leases, tiers, verified records, in this order.

Keys come in; what goes out is a lease on the longest leading run of blocks that lies, verified, in
the host arena, and the reason why it is not longer. The caller copies the payloads to its pages,
then releases the lease; if the lease ended meanwhile, what it copied does not count.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from typing import NamedTuple, TypeAlias

from holdfast.blocks.world import World
from holdfast.codec.pack import verify
from holdfast.errors import Outcome
from holdfast.index.residency import Coverage
from holdfast.plan.cost import TierEstimate
from holdfast.plan.planner import Question
from holdfast.policy.turns import Errand
from holdfast.store.core import Core
from holdfast.store.cover import sources
from holdfast.store.ladder import Wave
from holdfast.store.room import slots
from holdfast.store.states import HOST, States
from holdfast.tiers.base import Place
from holdfast.tiers.host import HostTier

_log = logging.getLogger("holdfast.store")


class Fetched(NamedTuple):
    """Blocks that landed: a lease on them, a place in the arena for each, and where from."""

    lease: int
    places: list[int]
    sources: dict[str, int]
    outcome: Outcome
    reason: str


class Wanted(NamedTuple):
    """Blocks of a chain, within what time, and why."""

    world: World
    keys: Sequence[bytes]
    deadline_s: float
    errand: Errand = Errand.DEMAND


Check: TypeAlias = Callable[[Core, Coverage, int], Mapping[int, int]]
"""Says where those of the first so many blocks of a coverage lie in the arena that may be believed.

What is put in their place later may not: by row, the place where each of them was looked at.
"""


def fetch(store: Core, world: World, keys: Sequence[bytes], deadline_s: float) -> Fetched:
    """Bring the leading run of `keys` worth fetching into the arena, verified and leased.

    Blocks for at most about `deadline_s` seconds; what has not landed by then is left out. What is
    being read then lands for the next fetch; what nobody has begun to read, and no other fetch
    waits for, is taken back.
    """
    return _street(store, Wanted(world, keys, deadline_s), _verify_held)


def lend(
    store: Core,
    world: World,
    keys: Sequence[bytes],
    deadline_s: float,
    errand: Errand = Errand.DEMAND,
) -> Fetched:
    """Like `fetch`, but what lies in the arena already is not read: its reader verifies it.

    A reader that finds a bad record has it forgotten. The lease lasts until it is released, which
    the caller surely does: what was lent may go to a peer that takes its time.
    """
    at_hand = _at_hand(store, world, keys)
    if at_hand is not None:
        return at_hand
    lent = _street(store, Wanted(world, keys, deadline_s, errand), _believe_held)
    with store.states.lock:
        if store.states.extend(lent.lease, math.inf):
            return lent
    return lent._replace(places=[], outcome=Outcome.LATE)


def _at_hand(store: Core, world: World, keys: Sequence[bytes]) -> Fetched | None:
    """Lease a chain that lies in the arena whole, or not at all: nothing to plan or to wait for."""
    states = store.states
    with states.lock:
        _, rows, tiers = states.index.cover(world, keys)
        if any(tiers) or 0 < len(rows) < len(keys):
            return None
        column = states.index.places[HOST]
        places = [column[row] for row in rows]
        lease = states.lease(rows, math.inf)
        states.touch(rows)
    if not rows:
        return Fetched(lease, places, {}, Outcome.MISS, "nothing is held")
    return Fetched(lease, places, {HostTier.name: len(rows)}, Outcome.OK, "all is at hand")


def _street(store: Core, wanted: Wanted, check: Check) -> Fetched:
    states, ladder = store.states, store.ladder
    world, keys, deadline_s, errand = wanted
    late_at = store.clock.now() + deadline_s
    estimates = store.judgement.estimates(world.domain)
    with states.lock:
        coverage = states.index.cover(world, keys)
        plan = store.planner.plan(_question(states, coverage, estimates, deadline_s))
        rows = coverage.rows[: min(plan.blocks, slots(states, world))]
        lease = states.lease(rows, late_at + store.lease_s)
        states.touch(rows)
        if errand is Errand.DEMAND:
            ladder.hurry(rows)
        loading = [states.loading[row] for row in rows if row in states.loading]
        for each in loading:
            each.waiting += 1
        climbs = ladder.claim(world, rows)
    waves = ladder.climb(world, climbs, errand)
    verified = check(store, coverage, len(rows))
    _await(store, waves, late_at)
    for each in loading:
        each.over.wait(max(0.0, late_at - store.clock.now()))
    with states.lock:
        for each in loading:
            each.waiting -= 1
        places = _landed(states, coverage, rows, verified)
        outcome = _outcome(store, coverage, plan.blocks, len(places), late_at)
        states.shorten(lease, len(places))
    return Fetched(lease, places, sources(states, coverage, len(places)), outcome, plan.reason)


def _question(
    states: States, coverage: Coverage, estimates: Sequence[TierEstimate], deadline_s: float
) -> Question:
    """Ask what of a coverage can be here in time: whoever asks has decided that it is worth it."""
    return Question(
        tiers=coverage.tiers,
        block_bytes=coverage.world.record_bytes,
        block_tokens=coverage.world.block_tokens,
        estimates=estimates,
        names=states.tier_names(),
        limit_s=deadline_s,
    )


def _verify_held(store: Core, coverage: Coverage, blocks: int) -> Mapping[int, int]:
    """Verify the leased blocks that already lie in the arena; quarantine those that fail."""
    states, world = store.states, coverage.world
    host, size = states.host(world), world.record_bytes
    good: dict[int, int] = {}
    started = store.clock.now()
    for row, tier in zip(coverage.rows[:blocks], coverage.tiers[:blocks], strict=True):
        if tier != HOST:
            continue
        place = Place(states.index.places[HOST][row])
        key = states.index.keys[row]
        if place < 0 or key is None:
            continue
        outcome = verify(host.view(place, size), key, world.fingerprint, world.payload_bytes)
        if outcome is Outcome.OK:
            good[row] = place
            continue
        with states.lock:
            # Whose lease ended meanwhile may find another block in the row.
            if states.index.places[HOST][row] == place and states.index.keys[row] == key:
                states.quarantine(row, HOST, outcome)
    store.judgement.verified(len(good) * size, store.clock.now() - started)
    return good


def _believe_held(store: Core, coverage: Coverage, blocks: int) -> Mapping[int, int]:
    """Take every leased block in the arena for good."""
    column = store.states.index.places[HOST]
    return {row: column[row] for row in coverage.rows[:blocks]}


def _await(store: Core, waves: Sequence[Wave], late_at: float) -> None:
    """Wait for the waves until then; what is not begun by that time is taken back."""
    if not waves:
        return
    readings = [wave.reading for wave in waves]
    done, late = wait(readings, timeout=max(0.0, late_at - store.clock.now()))
    if late:
        store.ladder.cancel(waves)
    for reading in done:
        if not reading.cancelled() and (error := reading.exception()) is not None:
            _log.error("what was being fetched is computed", exc_info=error)


def _landed(
    states: States, coverage: Coverage, rows: Sequence[int], verified: Mapping[int, int]
) -> list[int]:
    """Return the places of the leading rows in the arena.

    What came there since they were covered was packed here or verified on landing, unless a peer
    put it: then it is unproven.
    """
    places: list[int] = []
    for row, tier in zip(rows, coverage.tiers, strict=False):
        place = states.index.places[HOST][row]
        to_verify = tier == HOST or row in states.unproven
        if place < 0 or (to_verify and verified.get(row) != place):
            break
        places.append(place)
    return places


def _outcome(store: Core, coverage: Coverage, planned: int, landed: int, late_at: float) -> Outcome:
    if landed == planned:
        return Outcome.OK if landed else Outcome.MISS
    if coverage.rows[landed] in store.states.loading or store.clock.now() >= late_at:
        return Outcome.LATE
    key = store.states.index.keys[coverage.rows[landed]]
    for fault in reversed(store.states.faults):
        if fault.key == key:
            return fault.outcome
    return Outcome.FULL
