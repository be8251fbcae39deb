"""Measure placement on a pool: segments moved by a join, prefixes lost with a member, and reads.

No figure is a time. The placement code computes the owners of the segments; the reads are those
that reach a real target if many threads fetch the same context from one host.
"""

from __future__ import annotations

import hashlib
import random
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from holdfast.blocks.key import SEGMENT_BYTES
from holdfast.blocks.namespace import Namespace
from holdfast.errors import HoldfastError
from holdfast.limits import BLOCK_TOKENS, KIB, MIB, SEGMENT_BLOCKS
from holdfast.membership.members import Member
from holdfast.membership.placement import Placement
from holdfast.report import Row, at_least, at_most
from holdfast.store.store import Store
from holdfast.tiers.pool.tier import PoolTier, PoolTierOptions
from holdfast.wire.remote.client import HeldFlags, ReceivedRecords, TargetClient
from holdfast_bench.campaigns.contexts import Contexts, keys_of
from holdfast_bench.harness.hardware_limits import SEED
from holdfast_bench.harness.pool import ManualMembers
from holdfast_bench.measure.pool import TargetUnderTest

MEMBERS = (4, 8, 16)
SEGMENTS = 40_000
MOVED_GOAL = 10.0
PREFIX_BLOCKS = 2_048
PREFIXES = 8_000
USABLE_GOAL = 0.84

CROWD = 1_000
CROWD_BLOCKS = 32
CROWD_READS_GOAL = 2
DEADLINE_S = 30.0
"""Long, because the threads share a few cores and the figure counts reads, not time."""

_PAYLOAD_BYTES = 64 * KIB
_HOST_BYTES = 16 * MIB


class CountedTarget(TargetClient):
    """A client of a target that counts lookups, and reads by key."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.lookups = 0
        self.reads = Counter[bytes]()
        self._counting = threading.Lock()

    def get(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        deadline_s: float,
        on_progress: Callable[[int], None] | None = None,
    ) -> ReceivedRecords:
        with self._counting:
            self.reads.update(keys)
        return super().get(namespace, keys, into, deadline_s, on_progress)

    def exist(self, namespace: Namespace, keys: Sequence[bytes], deadline_s: float) -> HeldFlags:
        with self._counting:
            self.lookups += 1
        return super().exist(namespace, keys, deadline_s)


def placement_rows(folder: Path) -> list[Row]:
    """Measure moved segments, usable prefixes after a loss, and reads of concurrent fetches."""
    return [_moved_row(), _lost_row(), _crowd_row(folder)]


def _moved_row() -> Row:
    """Return the largest deviation of the moved segments from the ideal when a member joins."""
    names = [hashlib.blake2b(bytes([n % 256, n >> 8]), digest_size=8).digest()
             for n in range(SEGMENTS)]  # fmt: skip
    off: dict[str, float] = {}
    for count in MEMBERS:
        few, many = (_owners(Placement(_members(n)), names) for n in (count - 1, count))
        moved = sum(a != b for a, b in zip(few, many, strict=True)) / len(names)
        off[f"of_{count}"] = 100.0 * abs(moved * count - 1.0)
    worst = max(off.values())
    return at_most("pool.member.moved", worst, "% off ideal", MOVED_GOAL, segments=SEGMENTS, **off)


def _lost_row() -> Row:
    """Remove one of 16 members; return the share of long prefixes before the first lost segment."""
    count, parts = max(MEMBERS), PREFIX_BLOCKS // SEGMENT_BLOCKS
    placement, rng = Placement(_members(count)), random.Random(SEED)  # noqa: S311  # no secret
    usable = 0
    for _ in range(PREFIXES):
        lost = f"t{rng.randrange(count)}"
        names = [rng.randbytes(SEGMENT_BYTES) for _ in range(parts)]
        usable += [*(owner == lost for owner in _owners(placement, names)), True].index(True)
    ideal = sum((1 - 1 / count) ** part for part in range(1, parts + 1)) / parts
    more = {"ideal": ideal, "members": count, "prefix_blocks": PREFIX_BLOCKS}
    share = usable / parts / PREFIXES
    return at_least("pool.lost.usable", share, "of prefix", USABLE_GOAL, **more)


def _crowd_row(folder: Path) -> Row:
    """Fetch one segment with 1,000 concurrent threads of a host; count the reads of its blocks."""
    secret = secrets.token_bytes(32)
    keys = keys_of(secret, [1] * (CROWD_BLOCKS * BLOCK_TOKENS))
    with TargetUnderTest(folder) as target:
        with closing(_store(CountedTarget(target.peer_address), secret)) as writer:
            contexts = Contexts(writer, _PAYLOAD_BYTES)
            contexts.save(keys)
            contexts.wait_written()
        counted = CountedTarget(target.peer_address)
        with closing(_store(counted, secret)) as store:
            came = _ask_at_once(Contexts(store, _PAYLOAD_BYTES), keys)
    if came != {CROWD_BLOCKS}:
        raise HoldfastError(f"fetches returned {sorted(came)} of {CROWD_BLOCKS} blocks")
    most = float(max(counted.reads.values()))
    more = {"asked_by": CROWD, "blocks": CROWD_BLOCKS, "lookups": counted.lookups}
    return at_most("pool.crowd.reads", most, "reads", CROWD_READS_GOAL, **more)


def _store(target: TargetClient, secret: bytes) -> Store:
    members = ManualMembers([Member(id="t0", address=target.address)])
    options = PoolTierOptions(deadline_s=DEADLINE_S, ask_s=DEADLINE_S)
    tier = PoolTier(members, lambda _: target, options)
    store = Store(_HOST_BYTES, [tier], {"default": secret})
    store.start()
    return store


def _ask_at_once(contexts: Contexts, keys: list[bytes]) -> set[int]:
    """Look up and fetch a context in `CROWD` threads; return the set of block counts fetched."""
    store, namespace, begin = contexts.store, contexts.namespace, threading.Barrier(CROWD)

    def ask(_: int) -> int:
        begin.wait()
        store.look(namespace, keys, DEADLINE_S)
        fetched = store.fetch(namespace, keys, DEADLINE_S)
        store.release(fetched.lease)
        return len(fetched.places)

    with ThreadPoolExecutor(CROWD) as crowd:
        return set(crowd.map(ask, range(CROWD)))


def _members(count: int) -> list[Member]:
    return [Member(id=f"t{number}", address=f"tcp://10.0.0.{number}:1") for number in range(count)]


def _owners(placement: Placement, names: Sequence[bytes]) -> list[str]:
    return [placement.order(name)[0].id for name in names]
