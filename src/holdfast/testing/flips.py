"""Damage to stored and sent records: detected, never served, and mended by the next save.

One round damages one block of a context at one place, fetches the context, and saves it again:

    fetch     ends before the damaged block, and every byte in front of it is right
    cover     the block is not known any more
    save      writes it
    fetch     brings the whole context from that place, every byte right

On the wire a fault may strike something that means nothing (a reason, padding), so there a whole
context may come all the same; then every byte must be right, and the fault counts as harmless.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from holdfast.codec import seal
from holdfast.limits import MIB
from holdfast.store.keyring import KeyRing
from holdfast.store.store import Store
from holdfast.testing.campaign import OpenTarget, Order, Tally
from holdfast.testing.contexts import Contexts, WrongByteError, chain_of
from holdfast.testing.damage import EVERY_DAMAGE, WITHOUT_GENERATION, Damage, spoil
from holdfast.testing.extents import MemoryExtents
from holdfast.testing.loopback import near_and_far
from holdfast.testing.noise import NoisyLine
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.region import SECTOR, Geometry
from holdfast.tiers.disk.tier import DiskTier

PAYLOAD_BYTES = 9_000
CHAIN_BLOCKS = 5
CHAINS = 16
REGION_BYTES = 64 * SECTOR
REGIONS = 40
HOST_BYTES = 8 * MIB
SECRET = {"default": b"s" * 32}

_PATIENCE = 4
_PATIENCE_S = 10.0
"""So many times and so long at least a save is repeated that brought nothing, or only a part."""

_GARBLED_S = 0.25
"""Until a call is over whose answer says, by a damaged length, that more is to come."""


class Place(Protocol):
    """Where records are damaged."""

    contexts: Contexts

    @property
    def damages(self) -> Sequence[Damage]:
        """What may happen to a record here."""
        ...

    def copy(self, key: bytes) -> memoryview:
        """Return the copy of a block that the next fetch reads, writable."""
        ...

    def expose(self, keys: Sequence[bytes]) -> None:
        """Bring it about that the next fetch of these reads that copy."""
        ...


class InMemory:
    """The host tier's arena."""

    damages = WITHOUT_GENERATION

    def __init__(self, store: Store) -> None:
        self.contexts = Contexts(store, PAYLOAD_BYTES)

    def copy(self, key: bytes) -> memoryview:
        """Return the slot."""
        return self.contexts.record(key)

    def expose(self, keys: Sequence[bytes]) -> None:
        """Nothing lies in front of memory."""


class OnDisk:
    """The regions of a disk tier, on a medium that a test can reach."""

    damages = EVERY_DAMAGE

    def __init__(self, store: Store, medium: MemoryExtents) -> None:
        self.contexts = Contexts(store, PAYLOAD_BYTES)
        self._medium = medium
        self._regions_at = Geometry.of(REGION_BYTES, REGIONS).regions_at

    def copy(self, key: bytes) -> memoryview:
        """Return the bytes on the medium."""
        states = self.contexts.store.states
        with states.lock:
            at = self._regions_at + states.index.places[1][states.index.find(key)] * SECTOR
        return memoryview(self._medium.image)[at : at + self.contexts.world.record_bytes]

    def expose(self, keys: Sequence[bytes]) -> None:
        """Wait until they are written, and forget them in memory."""
        self.contexts.settle()
        self.contexts.leave_host(keys)
        self._medium.log.clear()


class AtTarget:
    """The memory of another node."""

    damages = WITHOUT_GENERATION

    def __init__(self, near: Contexts, far: Store) -> None:
        self.contexts = near
        self._far = far

    def copy(self, key: bytes) -> memoryview:
        """Return the slot at the target."""
        states = self._far.states
        with states.lock:
            place = states.index.places[0][states.index.find(key)]
        return self._far.record(self.contexts.world, place)

    def expose(self, keys: Sequence[bytes]) -> None:
        """Wait until they are sent, and forget them here."""
        self.contexts.settle()
        self.contexts.leave_host(keys)


def run(order: Order) -> Iterator[Tally]:
    """Damage records in memory, on disk, at a target, and on their way there and back."""
    part = order.share(5.5)
    with contextlib.closing(Store(HOST_BYTES, [], SECRET)) as store:
        store.start()
        yield _strike("flips.host", InMemory(store), part)
    with on_disk() as disk:
        yield _strike("flips.disk", disk, part)
    with at_target(order.target) as far:
        yield _strike("flips.pool", far, part)
    yield from _sealed(part)
    yield _strike_the_wire(order.share(10))


def _sealed(order: Order) -> Iterator[Tally]:
    """Strike sealed records in the same places; whoever writes there has no key."""
    why_not = seal.missing()
    if why_not:
        tally = Tally("flips.sealed", "faults")
        tally.skipped = why_not
        yield tally
        return
    ring = KeyRing(None)
    ring.enrol("default", SECRET["default"])
    with on_disk(ring) as disk:
        yield _strike("flips.sealed.disk", disk, order)
    with at_target(order.target, ring) as far:
        yield _strike("flips.sealed.pool", far, order)


@contextlib.contextmanager
def on_disk(ring: KeyRing | None = None) -> Iterator[OnDisk]:
    """Open a store over a disk tier on a medium in memory; sealed with a ring, if one is given."""
    medium = MemoryExtents.formatted(REGION_BYTES, REGIONS)
    config = DiskConfig(path="memory", capacity_bytes=medium.size, region_bytes=REGION_BYTES)
    with contextlib.closing(
        Store(HOST_BYTES, [DiskTier(config, None, lambda _: medium)], SECRET)
    ) as store:
        if ring:
            store.seal_with(ring)
        store.start()
        yield OnDisk(store, medium)


@contextlib.contextmanager
def at_target(target: OpenTarget, ring: KeyRing | None = None) -> Iterator[AtTarget]:
    """Open a store with a target behind it, which never has the keys."""
    with near_and_far(target, PAYLOAD_BYTES, ring=ring) as both:
        yield AtTarget(both.near, both.far)


def _strike(what: str, place: Place, order: Order) -> Tally:
    """Damage one block after the other."""
    tally = Tally(what, "faults")
    chains = [chain_of(f"{what}/{number}", CHAIN_BLOCKS) for number in range(CHAINS)]
    for number, dice in enumerate(order.rounds(tally)):
        chain, other = dice.sample(chains, 2)
        kind = dice.choice(place.damages)
        try:
            _one_fault(tally, place, chain, other, kind, dice)
        except (AssertionError, ValueError) as error:
            tally.fail(f"round {number}, {kind}: {error}")
        tally.counts[str(kind)] += 1
    return tally


def _one_fault(
    tally: Tally, place: Place, chain: list[bytes], other: list[bytes], kind: Damage,
    dice: random.Random,
) -> None:  # fmt: skip
    contexts, struck = place.contexts, [chain, other] if kind is Damage.SWAP else [chain]
    _lay_out(place, chain)
    _lay_out(place, other)
    at, other_at = dice.randrange(CHAIN_BLOCKS), dice.randrange(CHAIN_BLOCKS)
    spoil(place.copy(chain[at]), place.copy(other[other_at]), kind, dice)
    for keys, hole in zip(struck, (at, other_at), strict=False):
        tally.tried += 1
        landed = contexts.read(keys)
        assert landed == hole, f"block {hole} is damaged, {landed} blocks were served"
        held = contexts.store.cover(contexts.world, keys).blocks
        assert held == hole, f"block {hole} failed its check and is still among {held} held"
        assert contexts.save(keys) >= 1, "a block that failed its check was not written again"
        place.expose(keys)
        assert _mended(place, keys), "saved again, and not served whole"


def _lay_out(place: Place, keys: Sequence[bytes]) -> None:
    """Save a context and have it whole at the place: a full disk drops what is oldest."""
    for _ in _repeated():
        place.contexts.save(keys)
        place.expose(keys)
        if place.contexts.store.cover(place.contexts.world, keys).blocks == CHAIN_BLOCKS:
            return
    raise AssertionError("a context can not be saved")


def _mended(place: Place, keys: Sequence[bytes]) -> bool:
    """Whether a context that was saved again is served whole, at the latest after some saves.

    One may not be enough where a full disk has just dropped a block, a connection was cut, or a
    busy machine took longer over a call than the call lasts.
    """
    for _ in _repeated():
        if place.contexts.read(keys) == CHAIN_BLOCKS:
            return True
        place.contexts.save(keys)
        place.expose(keys)
    return False


def _repeated() -> Iterator[None]:
    """Yield for every time that something may be tried."""
    end_s = time.monotonic() + _PATIENCE_S
    for tried in itertools.count():
        if tried >= _PATIENCE and time.monotonic() > end_s:
            return
        yield


def _strike_the_wire(order: Order) -> Tally:
    """Damage bytes between a node and a target, one burst a round, in one direction."""
    tally = Tally("flips.wire", "faults")
    with contextlib.ExitStack() as undo:
        line = NoisyLine()
        undo.callback(line.close)
        both = undo.enter_context(
            near_and_far(order.target, PAYLOAD_BYTES, line.to, deadline_s=_GARBLED_S)
        )
        place = AtTarget(both.near, both.far)
        for number, dice in enumerate(order.rounds(tally)):
            chain = chain_of(f"wire/{number % CHAINS}", CHAIN_BLOCKS)
            try:
                _one_burst(tally, place, line, chain, dice)
            except (AssertionError, ValueError) as error:
                tally.fail(f"round {number}: {error}")
            tally.tried += line.struck
    return tally


def _one_burst(
    tally: Tally, place: AtTarget, line: NoisyLine, chain: list[bytes], dice: random.Random
) -> None:
    contexts = place.contexts
    sending = dice.random() < 0.4  # noqa: PLR2004 - reads are what serves
    if sending:
        contexts.store.drop("*")
    line.arm(sending, dice)
    with contextlib.ExitStack() as undo:
        undo.callback(line.disarm)
        contexts.save(chain)
        place.expose(chain)
        try:
            landed = contexts.read(chain)
        except WrongByteError:
            tally.fail(f"round {tally.tried}: bytes damaged on the wire were served")
            return
    if line.struck:
        tally.counts["harmless" if landed == CHAIN_BLOCKS else "detected"] += 1
    else:
        tally.counts["missed the line"] += 1
    assert _mended(place, chain), "saved again, and not served whole"
