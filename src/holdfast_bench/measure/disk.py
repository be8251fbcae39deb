"""Measure the disk tier, and a store's verified fetches from it, relative to plain direct I/O."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from holdfast.blocks.key import DOMAIN_KEY_BYTES, Chain
from holdfast.blocks.namespace import Namespace, domain_id
from holdfast.buffers import aligned_buffer
from holdfast.codec.pack import pack, payload
from holdfast.limits import GIB, MIB
from holdfast.report import Row
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

BLOCK_TOKENS = 128
FINGERPRINT = b"holdfast-bench-0"
SECRET = bytes(range(DOMAIN_KEY_BYTES))
NAMESPACE = Namespace(FINGERPRINT, domain_id(SECRET), PAYLOAD_BYTES, BLOCK_TOKENS)

READ_GOAL = 0.90
WRITE_GOAL = 0.85
FETCH_S = 30.0


def chain_of(seed: int, blocks: int, domain_key: bytes = SECRET) -> Chain:
    """Return the chain of a synthetic context."""
    chain = Chain(domain_key, FINGERPRINT, BLOCK_TOKENS)
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
    size = NAMESPACE.record_bytes
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
        return timed(BATCH * PAYLOAD_BYTES, lambda: tier.write(puts))

    def read() -> Speed:
        keys, places = written[-1 - 7 * next(seeds) % (len(written) // 2)]
        gets = [TierGet(*wanted) for wanted in zip(places, keys, records, strict=True)]
        return timed(BATCH * PAYLOAD_BYTES, lambda: tier.read(gets))

    # Fill the log once, so that later writes overwrite allocated space, as the limit's writes do.
    while not tier.usage().records or tier.usage().used_bytes < 0.9 * tier.usage().capacity_bytes:
        write()
    wrote = paired(PASSES * rounds, write, lambda: limit.write_gb_per_s(BATCH))
    found = paired(PASSES * rounds, read, lambda: limit.read_gb_per_s(BATCH))
    return [
        speed_row("disk.read", found, READ_GOAL, direct=tier.direct),
        speed_row("disk.write", wrote, WRITE_GOAL, direct=tier.direct),
    ]


def _fetch_rows(tier: DiskTier, limit: DirectIoLimit, rounds: int) -> list[Row]:
    """Measure a store whose arena is much smaller than its disk, so that every fetch promotes."""
    store = Store(8 * BATCH * PAYLOAD_BYTES, [tier], {"default": SECRET})
    store.start()
    try:
        contexts = [chain_of(-1 - seed & 0xFFFF, BATCH).keys for seed in range(24)]
        for keys in contexts:
            save(store, keys)
        turn = itertools.count()

        def fetch() -> Speed:
            return timed_fetch(store, contexts[next(turn) % len(contexts)], "disk")

        fetched = paired(PASSES * rounds, fetch, lambda: limit.read_gb_per_s(BATCH))
        return [speed_row("disk.fetch", fetched, None, verified=True)]
    finally:
        store.ladder.close()


def timed_fetch(store: Store, keys: Sequence[bytes], tier: str) -> Speed:
    """Time the fetch of a context; raise RuntimeError if a block is not read from this tier."""
    results = []
    speed = timed(
        len(keys) * PAYLOAD_BYTES, lambda: results.append(store.fetch(NAMESPACE, keys, FETCH_S))
    )
    for fetched in results:
        store.release(fetched.lease)
        if fetched.sources != {tier: len(keys)}:
            raise RuntimeError(
                f"expected {len(keys)} blocks from {tier}, got {fetched.sources}: "
                f"{fetched.outcome}, {fetched.reason}"
            )
    return speed


def save(store: Store, keys: Sequence[bytes]) -> None:
    """Save synthetic blocks and wait until the tier below holds them."""
    reserved = store.reserve(NAMESPACE, keys, FINGERPRINT, 0)
    fill(store, keys, reserved.places)
    store.commit(reserved.ticket)
    while store.table.unwritten():
        time.sleep(0.001)


def fill(store: Store, keys: Sequence[bytes], places: Sequence[int]) -> None:
    """Write synthetic payloads into slots."""
    arena = store.arena(NAMESPACE.domain).view
    for key, place in zip(keys, places, strict=True):
        if place >= 0:
            payload(arena[place:], PAYLOAD_BYTES)[:] = (key * (4096 // len(key))) * (
                PAYLOAD_BYTES // 4096
            )
