"""Hints: what an engine, a router or an agent knows of the future, and the store can not.

On public traces perfect knowledge is worth 5 to 33 points of hit rate in a tight cache. A hint is
a wish: it may be late, wrong or about nothing that is here, and then it changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.blocks.world import World
from holdfast.errors import BlockError
from holdfast.plan.planner import Question
from holdfast.plan.prestage import begin_in_s
from holdfast.policy.base import NEVER
from holdfast.policy.turns import Errand
from holdfast.store.adopt import hold
from holdfast.store.core import Core
from holdfast.store.fetch import lend
from holdfast.store.wishes import Chain, Pin, Staging

NAME_CHARS_MAX = 256
PIN_S_MAX = 3_600.0
AHEAD_S_MAX = 86_400.0
PIN_SHARE = 0.5
"""Pins may take this share of the host tier, all together, and none of what others reserved."""

_CLIMB_S = 60.0


def follow(store: Core, world: World, session: str, keys: Sequence[bytes]) -> None:
    """Note that a session uses this chain; later hints name only the session."""
    if session:
        check_name(session)
        with store.states.lock:
            store.wishes.follow(world, session, keys)


def closed(store: Core, domain: bytes, session: str) -> int:
    """Say that a session is over: its blocks go first. Return how many are here; 0: not known."""
    check_name(session)
    blocks = _expect(store, domain, session, NEVER)
    with store.states.lock:
        store.wishes.forget(domain, session)
    return blocks


def returns(store: Core, domain: bytes, session: str, in_s: float) -> int:
    """Say that a session comes back in `in_s` seconds: its blocks stay, and are up by then."""
    check_name(session)
    check_within("returns.in_s", in_s, AHEAD_S_MAX)
    blocks = _expect(store, domain, session, store.clock.now() + in_s)
    with store.states.lock:
        chain = store.wishes.chain(domain, session)
    if chain is not None:
        _stage(store, chain, in_s)
    return blocks


def prestage(store: Core, world: World, keys: Sequence[bytes], in_s: float) -> int:
    """Have what is held of a chain in memory in `in_s` seconds; return how many blocks are held."""
    check_within("prestage.in_s", in_s, AHEAD_S_MAX)
    return _stage(store, Chain(world, b"".join(keys)), in_s)


def pin(store: Core, world: World, keys: Sequence[bytes], ttl_s: float) -> int:
    """Bring what is held of a chain to memory and keep it there for `ttl_s`; return its blocks.

    Reads from lower tiers, so it takes its time. What would exceed the room for pins is left out.
    A pin of the same chain, or of its beginning, becomes part of this one, which ends no sooner.
    """
    check_within("pin.ttl_s", ttl_s, PIN_S_MAX)
    size, states, wishes = world.record_bytes, store.states, store.wishes
    with states.lock:
        open_bytes = store.host_bytes - states.fill.reserved_by_others(world.domain)
        taken = wishes.pinned_bytes(store.clock.now())
        taken -= sum(pin.nbytes for pin in wishes.pins_within(world, keys).values())
        keys = keys[: max(0, int(PIN_SHARE * open_bytes) - taken) // size]
        claim = wishes.claim(len(keys) * size)  # or two would be given it at once
    try:
        lent = lend(store, world, keys, _CLIMB_S, Errand.AHEAD)
        try:
            with states.lock:
                return _pin(store, world, keys[: len(lent.places)], ttl_s)
        finally:
            store.release(lent.lease)
    finally:
        with states.lock:
            wishes.end_claim(claim)


def _pin(store: Core, world: World, keys: Sequence[bytes], ttl_s: float) -> int:
    """Pin what lies in memory of a chain instead of its beginnings; under the lock."""
    states, wishes = store.states, store.wishes
    before = wishes.pins_within(world, keys)
    until_s = max([store.clock.now() + ttl_s, *(pin.until_s for pin in before.values())])
    number, blocks = hold(states, world, keys, until_s)
    for last, pin in before.items():
        wishes.unpin(world, last)
        states.release(pin.lease)
    if blocks:
        wishes.pin(world, keys[blocks - 1], Pin(until_s, blocks * world.record_bytes, number))
    return blocks


def bring_up(store: Core) -> None:
    """Start to bring up what is due; called by the store's housekeeping."""
    with store.states.lock:
        due = store.wishes.due(store.clock.now())
    for staging in due:
        store.background.submit(_climb, store, staging)


def check_name(session: str) -> None:
    """Raise BlockError for a session name that is none."""
    if not 0 < len(session) <= NAME_CHARS_MAX:
        raise BlockError(
            f"session: a name of {len(session)} characters is not from 1 to {NAME_CHARS_MAX}"
        )


def check_within(what: str, seconds: float, most: float) -> None:
    """Raise BlockError for seconds out of range."""
    if not 0 <= seconds <= most:
        raise BlockError(f"{what}: {seconds:g} is not from 0 to {most:g} seconds")


def _expect(store: Core, domain: bytes, session: str, at_s: float) -> int:
    states = store.states
    with states.lock:
        chain = store.wishes.chain(domain, session)
        if chain is None:
            return 0
        rows = states.index.cover(chain.world, chain.split()).rows
        states.eviction.expect(rows, at_s)
    return len(rows)


def _stage(store: Core, chain: Chain, in_s: float) -> int:
    """Queue a chain for its time, by what it takes to read it.

    What is up now may have gone down by then: it is counted as on the tier below.
    """
    states, world = store.states, chain.world
    with states.lock:
        tiers = states.index.cover(world, chain.split()).tiers
        names = states.tier_names()
        if not tiers or len(names) == 1:
            return len(tiers)
        question = Question(
            tiers=[max(1, tier) for tier in tiers],
            block_bytes=world.record_bytes,
            block_tokens=world.block_tokens,
            estimates=store.judgement.estimates(world.domain),
            names=names,
            limit_s=AHEAD_S_MAX,
        )
        fetch_s = store.planner.plan(question).fetch_s
        now_s = store.clock.now()
        store.wishes.wait(now_s + begin_in_s(in_s, fetch_s), Staging(chain, now_s + in_s))
    return len(tiers)


def _climb(store: Core, staging: Staging) -> None:
    """Bring a chain up; that was no use of it, so what is expected of it still is."""
    world, keys = staging.chain.world, staging.chain.split()
    states = store.states
    try:
        store.release(lend(store, world, keys, _CLIMB_S, Errand.AHEAD).lease)
    finally:
        with states.lock:
            store.wishes.done()
    with states.lock:
        if staging.needed_s > store.clock.now():
            states.eviction.expect(states.index.cover(world, keys).rows, staging.needed_s)
