"""Measure the disk tier, and a store's verified fetches from it, relative to plain direct I/O."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from holdfast.blocks.key import DOMAIN_KEY_BYTES, KEY_BYTES, Chain
from holdfast.blocks.namespace import Namespace, domain_id
from holdfast.buffers import aligned_buffer
from holdfast.codec.pack import pack, payload
from holdfast.errors import HoldfastError, Outcome
from holdfast.limits import BLOCK_TOKENS, GIB, MIB
from holdfast.report import Row
from holdfast.store.fetch import FetchResult
from holdfast.store.save import SaveSlots
from holdfast.store.store import Store
from holdfast.testing.payloads import header_of
from holdfast.tiers.base import Place, TierGet, TierPut
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.tier import DiskTier
from holdfast_bench.harness.hardware_limits import DirectIoLimit
from holdfast_bench.harness.paired_runs import Speed, paired, speed_row, timed

PAYLOAD_BYTES = 2 * MIB
BATCH = 32
PASSES = 3
"""Passes per round: one takes 30 ms, in which a shared disk's speed may vary by a tenth."""

FINGERPRINT = b"holdfast-bench-0"
SECRET = bytes(range(DOMAIN_KEY_BYTES))
NAMESPACE = Namespace(FINGERPRINT, domain_id(SECRET), PAYLOAD_BYTES, BLOCK_TOKENS)

READ_GOAL = 0.90
WRITE_GOAL = 0.90
FETCH_GOAL = 0.85
FETCH_S = 30.0
WRITE_S = 60.0
"""Longest wait until the tier below holds a context."""

SEED_OFFSET = 1 << 14
"""Offset of the second store's seeds, so that two stores over one target or disk share no key."""


def chain_of(seed: int, blocks: int) -> Chain:
    """Return the chain of a synthetic context."""
    chain = Chain(SECRET, FINGERPRINT, BLOCK_TOKENS)
    chain.extend([seed] * (blocks * BLOCK_TOKENS))
    return chain


def disk_rows(folder: Path, capacity_bytes: int, rounds: int) -> list[Row]:
    """Measure the disk tier alone, then a store's verified fetches from it."""
    scratch_bytes = min(capacity_bytes, 2 * GIB)
    config = DiskConfig(path=str(folder / "tier"), capacity_bytes=capacity_bytes)
    with (
        DirectIoLimit(folder, scratch_bytes, PAYLOAD_BYTES, BATCH) as limit,
        closing(DiskTier(config)) as tier,
    ):
        return _disk_rows(tier, limit, rounds) + _fetch_rows(tier, limit, rounds)


def _disk_rows(tier: DiskTier, limit: DirectIoLimit, rounds: int) -> list[Row]:
    size = NAMESPACE.slot_bytes
    memory = aligned_buffer(size * BATCH)
    records = [memory[i * size : (i + 1) * size] for i in range(BATCH)]
    seeds = itertools.count()
    written: list[tuple[list[bytes], list[Place]]] = []

    def write() -> Speed:
        keys = chain_of(next(seeds), BATCH).keys
        for record, key in zip(records, keys, strict=True):
            pack(record, header_of(NAMESPACE, key))
        places = tier.reserve([size] * BATCH).places
        puts = [TierPut(place, record) for place, record in zip(places, records, strict=True)]
        written.append((keys, places))
        return _timed(lambda: tier.write(puts))

    def read() -> Speed:
        keys, places = written[-1 - 7 * next(seeds) % reach]
        wanted = zip(places, keys, records, strict=True)
        gets = [TierGet(place, key, into, NAMESPACE) for place, key, into in wanted]
        return _timed(lambda: tier.read(gets))

    # Fill the log once, so that later writes overwrite allocated space, as the limit's writes do.
    while not tier.usage().records or tier.usage().used_bytes < 0.9 * tier.usage().capacity_bytes:
        write()
    reach = max(1, len(written) // 2)  # of the newest contexts, which the log still holds
    wrote = paired(PASSES * rounds, write, lambda: limit.write_gb_per_s(BATCH))
    found = paired(PASSES * rounds, read, lambda: limit.read_gb_per_s(BATCH))
    return [
        speed_row("disk.read", found, READ_GOAL, direct=tier.direct),
        speed_row("disk.write", wrote, WRITE_GOAL, direct=tier.direct),
    ]


def _timed(call: Callable[[], list[Outcome]]) -> Speed:
    """Time a call of the tier for one batch; raise RuntimeError unless every outcome is OK."""
    outcomes = list[Outcome]()
    speed = timed(BATCH * PAYLOAD_BYTES, lambda: outcomes.extend(call()))
    if set(outcomes) != {Outcome.OK}:
        raise RuntimeError(f"the disk answered {sorted(set(outcomes))}")
    return speed


def _fetch_rows(tier: DiskTier, limit: DirectIoLimit, rounds: int) -> list[Row]:
    """Measure a store whose arena is much smaller than its disk, so that every fetch promotes."""
    with Store(8 * BATCH * PAYLOAD_BYTES, [tier], {"default": SECRET}) as store:
        store.start()
        bench = BenchedStore(store, SEED_OFFSET)
        bench.hold(24)
        fetched = paired(PASSES * rounds, bench.fetch, lambda: limit.read_gb_per_s(BATCH))
        return [speed_row("disk.fetch", fetched, FETCH_GOAL, verified=True)]


class BenchedStore:
    """A store over one tier; its arena is much smaller than the tier, so every fetch promotes.

    `first` is the seed of the first context that it writes. `content`: the payload of all blocks;
    by default each has its key, repeated.
    """

    def __init__(self, store: Store, first: int = 1, content: memoryview | None = None) -> None:
        self._store = store
        self._content = content
        self._tier = store.table.lower[0].name
        self._numbers = itertools.count(first)
        self._held: list[list[bytes]] = []
        self._turn = itertools.count()

    def write(self) -> Speed:
        """Save a context; time from its commit until the tier below holds all of it.

        Raises HoldfastError if that takes longer than `WRITE_S`.
        """
        store, keys = self._store, chain_of(next(self._numbers), BATCH).keys
        reserved = self._reserve(keys)
        arena = store.arena(NAMESPACE.domain).view
        for key, place in zip(keys, reserved.places, strict=True):
            if place >= 0:
                into = payload(arena[place:], PAYLOAD_BYTES)
                into[:] = self._content or key * (PAYLOAD_BYTES // KEY_BYTES)
        self._held.append(keys)

        def commit() -> None:
            if store.commit(reserved.ticket) != BATCH:
                raise RuntimeError("a block got no slot in memory")
            end_s = time.monotonic() + WRITE_S
            while store.table.unwritten():
                if time.monotonic() > end_s:
                    raise HoldfastError(
                        f"{self._tier} does not hold {BATCH} blocks after {WRITE_S:.0f} s"
                    )
                time.sleep(0.0005)

        return timed(BATCH * PAYLOAD_BYTES, commit)

    def _reserve(self, keys: Sequence[bytes]) -> SaveSlots:
        """Reserve slots; wait while the store's first read of the tier pins blocks."""
        end_s = time.monotonic() + FETCH_S
        while True:
            reserved = self._store.reserve(NAMESPACE, keys, FINGERPRINT, 0)
            if reserved.outcome is Outcome.OK or time.monotonic() > end_s:
                return reserved
            self._store.abort(reserved.ticket)
            time.sleep(0.001)

    def hold(self, contexts: int) -> None:
        """Save this number of contexts, for `fetch`, after one that is not fetched.

        The store's first read of the tier, a probe, keeps the tier's first blocks in memory.
        """
        self.write()
        self._held.clear()
        for _ in range(contexts):
            self.write()

    def fetch(self) -> Speed:
        """Time the fetch of the least recently fetched context.

        Raises RuntimeError if a block is not read from the tier.
        """
        keys, results = self._held[next(self._turn) % len(self._held)], list[FetchResult]()
        speed = timed(
            BATCH * PAYLOAD_BYTES,
            lambda: results.append(self._store.fetch(NAMESPACE, keys, FETCH_S)),
        )
        [fetched] = results
        self._store.release(fetched.lease)
        if fetched.sources != {self._tier: BATCH}:
            raise RuntimeError(
                f"expected {BATCH} blocks from {self._tier}, got {fetched.sources}: "
                f"{fetched.outcome}, {fetched.reason}"
            )
        return speed
