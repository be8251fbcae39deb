"""Flips campaign: damaged records are detected, never served, and repaired by the next save.

One round damages one block of a context at one place, fetches the context, and saves it again:

    fetch     returns the blocks before the damaged one, with every byte right
    cover     no longer counts the damaged block
    save      writes the block again
    fetch     returns the whole context from that place, with every byte right

On the wire a fault may hit bytes without effect (a reason, padding). Then the whole context may be
returned with every byte right, and the fault counts as harmless.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Iterator, Sequence

from holdfast.blocks.envelope import Header, read_header
from holdfast.codec import seal
from holdfast.errors import FormatError, HoldfastError
from holdfast.keys.keyring import KeyRing
from holdfast.limits import MIB
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.testing.extents import MemoryExtents, tier_on
from holdfast.tiers.disk.region import SECTOR, RegionGeometry
from holdfast_bench.campaigns.campaign import CampaignBudget, CampaignResult
from holdfast_bench.campaigns.contexts import Contexts, WrongByteError, chain_of, place_of
from holdfast_bench.campaigns.damage import EVERY_DAMAGE, WITHOUT_GENERATION, Damage, spoil
from holdfast_bench.campaigns.loopback import local_and_remote
from holdfast_bench.campaigns.noisy_line import NoisyLine

PAYLOAD_BYTES = 9_000
CHAIN_BLOCKS = 5
CHAINS = 16
REGION_BYTES = 64 * SECTOR
REGIONS = 40
HOST_BYTES = 8 * MIB
SECRET = {"default": b"s" * 32}

_ATTEMPTS_MIN = 4
_ATTEMPTS_S = 10.0
"""A save that stored nothing or a part is repeated at least so often and for so long."""

_WIRE_DEADLINE_S = 0.25
"""Deadline of a call on the damaged wire: a damaged length makes the reader wait for more bytes."""


class DamagedPlace:
    """A place where records are damaged, and the contexts that use it."""

    damages: Sequence[Damage] = WITHOUT_GENERATION
    """The kinds of damage that are possible here."""

    def __init__(self, store: Store) -> None:
        self.contexts = Contexts(store, PAYLOAD_BYTES)

    def copy(self, key: bytes) -> memoryview:
        """Return a writable view of the copy of a block that `expose` lets a fetch read."""
        raise NotImplementedError

    def expose(self, keys: Sequence[bytes]) -> None:
        """Make the next fetch of these blocks read the copy at this place, which is below memory.

        Wait until the blocks are written there, and remove them from the host tier.
        """
        self.contexts.wait_written()
        self.contexts.leave_host(keys)


class InMemory(DamagedPlace):
    """The host tier's arena, which is read first."""

    def copy(self, key: bytes) -> memoryview:
        return self.contexts.record(key)

    def expose(self, keys: Sequence[bytes]) -> None:
        pass


class OnDisk(DamagedPlace):
    """The regions of a disk tier on a medium in memory."""

    damages = EVERY_DAMAGE

    def __init__(self, store: Store, medium: MemoryExtents) -> None:
        super().__init__(store)
        self._medium = medium
        self._regions_at = RegionGeometry.of(REGION_BYTES, REGIONS).regions_at

    def copy(self, key: bytes) -> memoryview:
        namespace = self.contexts.namespace
        place = place_of(self.contexts.store, namespace, key, tier=1)
        at = self._regions_at + place * SECTOR
        return memoryview(self._medium.image)[at : at + namespace.slot_bytes]

    def expose(self, keys: Sequence[bytes]) -> None:
        super().expose(keys)
        self._medium.log.clear()


class AtTarget(DamagedPlace):
    """The host tier of another node."""

    def __init__(self, local: Store, remote: Store) -> None:
        super().__init__(local)
        self._remote = remote

    def copy(self, key: bytes) -> memoryview:
        namespace = self.contexts.namespace
        return self._remote.record(namespace, place_of(self._remote, namespace, key))


def run(budget: CampaignBudget) -> Iterator[CampaignResult]:
    """Damage records in memory, on disk, at a target, and on the wire in both directions."""
    part = budget.share(5.5)
    with Store(HOST_BYTES, [], SECRET) as store:
        store.start()
        yield _strike("flips.host", InMemory(store), part)
    with on_disk() as disk:
        yield _strike("flips.disk", disk, part)
    with at_target() as remote:
        yield _strike("flips.pool", remote, part)
    yield from _sealed(part)
    yield _strike_the_wire(budget.share(10))


def _sealed(budget: CampaignBudget) -> Iterator[CampaignResult]:
    """Damage sealed records on disk and at a target, without their key."""
    why_not = seal.missing()
    if why_not:
        for what in ("flips.sealed.disk", "flips.sealed.pool"):
            result = CampaignResult(what, "faults")
            result.skipped = why_not
            yield result
        return
    ring = KeyRing(None)
    ring.enrol("default", SECRET["default"])
    with on_disk(ring) as disk:
        yield _strike("flips.sealed.disk", disk, budget)
    with at_target(ring) as remote:
        yield _strike("flips.sealed.pool", remote, budget)


@contextlib.contextmanager
def on_disk(ring: KeyRing | None = None) -> Iterator[OnDisk]:
    """Open a store over a disk tier on a medium in memory; it seals with `ring` if given."""
    medium = MemoryExtents.formatted(REGION_BYTES, REGIONS)
    with Store(HOST_BYTES, [tier_on(medium)], SECRET, StoreOptions(ring=ring)) as store:
        store.start()
        yield OnDisk(store, medium)


@contextlib.contextmanager
def at_target(ring: KeyRing | None = None) -> Iterator[AtTarget]:
    """Open a store with one target, which has no keys of it; it seals with `ring` if given."""
    with local_and_remote(PAYLOAD_BYTES, ring=ring) as both:
        yield AtTarget(both.local.store, both.remote)


def _strike(what: str, place: DamagedPlace, budget: CampaignBudget) -> CampaignResult:
    """Damage one block in each round."""
    result = CampaignResult(what, "faults")
    chains = [chain_of(f"{what}/{number}", CHAIN_BLOCKS) for number in range(CHAINS)]
    for number, rng in enumerate(budget.rounds(result)):
        at, other_at = rng.sample(range(CHAINS), 2)
        chain, other = chains[at], chains[other_at]
        kind = rng.choice(place.damages)
        try:
            if _one_fault(result, place, chain, other, kind, rng):
                chains[at] = chain_of(f"{what}/after {number}", CHAIN_BLOCKS)
        except (AssertionError, HoldfastError, ValueError) as error:
            result.fail(f"round {number}, {kind}: {error}")
        result.counts[str(kind)] += 1
    return result


def _one_fault(
    result: CampaignResult, place: DamagedPlace, chain: list[bytes], other: list[bytes],
    kind: Damage, rng: random.Random,
) -> bool:  # fmt: skip
    """Damage one block and check the blocks served; return whether its record stays unreadable.

    A shared tier keeps a record that this node cannot open, because another node may have its key.
    """
    contexts, damaged = place.contexts, [chain, other] if kind is Damage.SWAP else [chain]
    _lay_out(place, chain)
    _lay_out(place, other)
    at, other_at = rng.randrange(CHAIN_BLOCKS), rng.randrange(CHAIN_BLOCKS)
    record = place.copy(chain[at])
    before, _ = read_header(record)
    spoil(record, place.copy(other[other_at]), kind, rng)
    forged = kind is Damage.FOREIGN_FIELD and isinstance(place, AtTarget)
    stays = forged and _other_format(record, before)
    for keys, bad in zip(damaged, (at, other_at), strict=False):
        result.tried += 1
        fetched = contexts.read(keys)
        assert fetched == bad, f"block {bad} is damaged, but {fetched} blocks were served"
        held = contexts.store.cover(contexts.namespace, keys).blocks
        assert held == bad, f"block {bad} failed its check and is still among {held} held"
        if stays:
            return True
        assert contexts.save(keys) >= 1, "a block that failed its check was not written again"
        place.expose(keys)
        assert _repaired(place, keys), "saved again, but not served whole"
    return False


def _other_format(record: memoryview, before: Header) -> bool:
    """Whether a forged header names another seal, codec or epoch, or a later format."""
    try:
        now, _ = read_header(record)
    except FormatError:
        return True
    return (now.seal, now.codec, now.epoch) != (before.seal, before.codec, before.epoch)


def _lay_out(place: DamagedPlace, keys: Sequence[bytes]) -> None:
    """Save a context until it is whole at the place: a full disk evicts the oldest blocks."""
    for _ in _attempts():
        place.contexts.save(keys)
        place.expose(keys)
        if place.contexts.store.cover(place.contexts.namespace, keys).blocks == CHAIN_BLOCKS:
            return
    raise AssertionError("a context cannot be saved")


def _repaired(place: DamagedPlace, keys: Sequence[bytes]) -> bool:
    """Whether a context that was saved again is served whole, if necessary after more saves.

    One save may not be enough if a full disk has just evicted a block, a connection was closed, or
    a call on a busy machine exceeded its deadline.
    """
    for _ in _attempts():
        if place.contexts.read(keys) == CHAIN_BLOCKS:
            return True
        place.contexts.save(keys)
        place.expose(keys)
    return False


def _attempts() -> Iterator[None]:
    """Yield once for each attempt allowed."""
    end_s = time.monotonic() + _ATTEMPTS_S
    for tried in itertools.count():
        if tried >= _ATTEMPTS_MIN and time.monotonic() > end_s:
            return
        yield


def _strike_the_wire(budget: CampaignBudget) -> CampaignResult:
    """Damage bytes between a node and a target, one burst a round, in one direction."""
    result = CampaignResult("flips.wire", "faults")
    line = NoisyLine()
    with (
        contextlib.closing(line),
        local_and_remote(PAYLOAD_BYTES, line.to, deadline_s=_WIRE_DEADLINE_S) as both,
    ):
        place = AtTarget(both.local.store, both.remote)
        for number, rng in enumerate(budget.rounds(result)):
            chain = chain_of(f"wire/{number % CHAINS}", CHAIN_BLOCKS)
            try:
                _one_burst(result, place, line, chain, rng)
            except (AssertionError, HoldfastError, ValueError) as error:
                result.fail(f"round {number}: {error}")
            result.tried += line.struck
    return result


def _one_burst(
    result: CampaignResult, place: AtTarget, line: NoisyLine, chain: list[bytes], rng: random.Random
) -> None:
    contexts = place.contexts
    sending = rng.random() < 0.4  # noqa: PLR2004 - more reads than writes
    if sending:
        contexts.store.drop("*")
    line.arm(sending, rng)
    try:
        contexts.save(chain)
        place.expose(chain)
        fetched = contexts.read(chain)
    except WrongByteError:
        result.fail(f"round {result.tried}: bytes damaged on the wire were served")
        return
    finally:
        line.disarm()
    if line.struck:
        result.counts["harmless" if fetched == CHAIN_BLOCKS else "detected"] += 1
    else:
        result.counts["hit no byte"] += 1
    assert _repaired(place, chain), "saved again, but not served whole"
