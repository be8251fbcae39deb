"""Measure Redis, Mooncake Store and LMCache with the records and sizes of `bench pool`.

Each over TCP to a process beside this one, between two pools too large for a cache. Every record
got is verified once the clock has stopped.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from holdfast.blocks.envelope import Header
from holdfast.blocks.key import KEY_BYTES, SEGMENT_BYTES
from holdfast.blocks.world import World
from holdfast.buffers import aligned_buffer
from holdfast.codec.pack import pack, verify
from holdfast.errors import HoldfastError, Outcome
from holdfast.limits import GIB, KIB, MIB
from holdfast.rig import lmcache_peer, mooncake_server, valkey_server
from holdfast.rig.limits import GB
from holdfast.rig.mooncake_server import MooncakeServers
from holdfast.rig.peers import MooncakePeer, Peer, RedisPeer, TierPeer
from holdfast.rig.report import Row, at_least, with_more
from holdfast.rig.valkey_server import ValkeyServers
from holdfast.tiers.mooncake.tier import MooncakeOptions, MooncakeTier
from holdfast.tiers.valkey.tier import ValkeyOptions, ValkeyTier

SIZES = (64 * KIB, 512 * KIB, 2 * MIB, 8 * MIB)
BATCH = 32
POOL_BYTES = 1 * GIB
LENT_BYTES = 2 * GIB
EXIST_KEYS = 1_000
SINGLES = 20
CALL_S = 30.0
SEED = 20_26

BESIDE_BYTES = 2 * MIB
BESIDE_GOALS = {"mooncake": 3.0, "redis": 6.0}
"""How many times their GB/s ours has to be, 32 blocks of 2 MiB a call."""


class Cost(NamedTuple):
    """One transfer: seconds, and processor seconds of this process."""

    seconds: float
    near_s: float


class Ring:
    """Packed records that fill one pool, and another pool to bring them to."""

    def __init__(self) -> None:
        self.records = aligned_buffer(POOL_BYTES)
        self.into = aligned_buffer(POOL_BYTES)
        self.into[:] = b"\1" * POOL_BYTES
        self.keys: list[bytes] = []
        self.world = _world(SIZES[0])
        self._random = random.Random(SEED)  # noqa: S311  # an order, not a secret

    def fill(self, nbytes: int) -> None:
        """Pack records with payloads of so many bytes; all of one segment."""
        self.world = _world(nbytes)
        count = POOL_BYTES // self.world.record_bytes
        segment = nbytes.to_bytes(SEGMENT_BYTES, "little")
        self.keys = [
            segment + n.to_bytes(KEY_BYTES - SEGMENT_BYTES, "little") for n in range(count)
        ]
        for number, key in enumerate(self.keys):
            world = self.world
            header = Header(
                *(key, world.fingerprint, world.fingerprint, world.domain, 0),
                *(world.block_tokens, nbytes, nbytes),
                segment=segment,
            )
            pack(self.record(number), header)

    def record(self, number: int) -> memoryview:
        """Return a record's memory."""
        size = self.world.record_bytes
        return self.records[number * size : (number + 1) * size]

    def place(self, number: int) -> memoryview:
        """Return memory to bring a record to."""
        size = self.world.record_bytes
        return self.into[number * size : (number + 1) * size]

    def draw(self, count: int) -> list[int]:
        """Return so many random numbers of records, no two the same."""
        return self._random.sample(range(len(self.keys)), count)

    def verify(self, key: bytes, record: memoryview) -> None:
        """Raise HoldfastError if this is not what was stored."""
        world = self.world
        outcome = verify(record, key, world.fingerprint, world.payload_bytes)
        if outcome is not Outcome.OK:
            raise HoldfastError(f"a record that was got is {outcome}")


def peer_rows(folder: Path, rounds: int, tell: Callable[[str], None]) -> list[Row]:
    """Measure what is installed; nothing where nothing is. Takes 5 GiB of memory."""
    rows: list[Row] = []
    ring = Ring()
    mooncake_not = mooncake_server.why_not()
    stores: list[tuple[Callable[[Path, Ring, ExitStack], dict[str, Peer]], bool]] = [
        (_redis, valkey_server.program() is not None and find_spec("redis") is not None),
        (_mooncake, not mooncake_not),
        (_lmcache, lmcache_peer.installed()),
    ]
    for opener, installed in stores:
        if installed:
            with ExitStack() as stack:
                peers = opener(folder, ring, stack)
                for nbytes in SIZES:
                    tell(f"{', '.join(peers)}: {_label(nbytes)}")
                    ring.fill(nbytes)
                    rows += _size_rows(peers, ring, nbytes, rounds)
    missing = {
        "mooncake": mooncake_not if mooncake_server.installed() else "",
        "lmcache": "" if lmcache_peer.installed() else lmcache_peer.WHY_NOT,
    }
    return rows + [
        Row(what=f"peer.{name}", value=None, unit="", more={"why": why})
        for name, why in missing.items()
        if why
    ]


def beside_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield how many times a peer's speed ours is, for what one run measured of both.

    `plain` says the same of plain sockets: no store over TCP can do better than that here.
    """
    found = {row.what: row for row in rows}
    for peer, goal in BESIDE_GOALS.items():
        for verb in ("get", "put"):
            way = f"{verb}.{_label(BESIDE_BYTES)}x{BATCH}"
            ours, theirs = found.get(f"pool.{way}"), found.get(f"peer.{peer}.{way}")
            if ours and theirs and ours.value and theirs.value and ours.limit:
                row = at_least(f"pool.{way}.over_{peer}", ours.value / theirs.value, "x", goal)
                yield with_more(row, {"plain": ours.limit / theirs.value})


def _redis(folder: Path, ring: Ring, stack: ExitStack) -> dict[str, Peer]:
    servers = ValkeyServers(folder / "redis")
    stack.callback(servers.close)
    servers.start()
    redis = RedisPeer(servers.endpoints[0].port)
    stack.callback(redis.close)
    options = ValkeyOptions(addresses=servers.addresses, deadline_s=CALL_S, ask_s=CALL_S)
    tier = TierPeer(ValkeyTier(options), lambda: ring.world, redis)
    stack.callback(tier.close)
    return {"peer.redis": redis, "tier.valkey": tier}


def _mooncake(folder: Path, ring: Ring, stack: ExitStack) -> dict[str, Peer]:
    servers = MooncakeServers(folder / "mooncake", LENT_BYTES)
    stack.callback(servers.close)
    servers.start()
    mooncake = MooncakePeer(servers.master, [ring.records, ring.into])
    stack.callback(mooncake.close)
    options = MooncakeOptions(master=servers.address, deadline_s=CALL_S, ask_s=CALL_S)
    tier = TierPeer(MooncakeTier(options), lambda: ring.world, mooncake)
    stack.callback(tier.close)
    return {"peer.mooncake": mooncake, "tier.mooncake": tier}


def _lmcache(folder: Path, ring: Ring, stack: ExitStack) -> dict[str, Peer]:
    del ring
    lmcache = lmcache_peer.LMCachePeer(folder)
    stack.callback(lmcache.close)
    return {"peer.lmcache": lmcache}


def _size_rows(peers: dict[str, Peer], ring: Ring, nbytes: int, rounds: int) -> list[Row]:
    """Fill the store, measure each way into it, leave it empty."""
    first = next(iter(peers.values()))
    for at in range(0, len(ring.keys), BATCH):
        some = range(at, min(at + BATCH, len(ring.keys)))
        first.put([ring.keys[n] for n in some], [ring.record(n) for n in some])
    rows = []
    for name, peer in peers.items():
        if nbytes == SIZES[0]:
            rows.append(_exist_row(name, peer, ring, rounds))
        for verb, trip in (("get", _get), ("put", _put)):
            what = f"{name}.{verb}.{_label(nbytes)}"
            trip(peer, ring, BATCH)
            batches = [trip(peer, ring, BATCH) for _ in range(rounds)]
            singles = [trip(peer, ring, 1) for _ in range(rounds * SINGLES)]
            rows.append(_speed_row(f"{what}x{BATCH}", BATCH * nbytes, batches))
            single_s = statistics.median(cost.seconds for cost in singles)
            rows.append(Row(what=what, value=1e6 * single_s, unit="us"))
    first.clear()
    return rows


def _get(peer: Peer, ring: Ring, count: int) -> Cost:
    keys = [ring.keys[number] for number in ring.draw(count)]
    into = [ring.place(number) for number in ring.draw(count)]
    cost = _timed(lambda: peer.get(keys, into))
    for key, record in zip(keys, into, strict=True):
        ring.verify(key, record)
    return cost


def _put(peer: Peer, ring: Ring, count: int) -> Cost:
    numbers = ring.draw(count)
    keys = [ring.keys[number] for number in numbers]
    records = [ring.record(number) for number in numbers]
    peer.forget(keys)
    return _timed(lambda: peer.put(keys, records))


def _exist_row(name: str, peer: Peer, ring: Ring, rounds: int) -> Row:
    times_s = []
    for _ in range(rounds * SINGLES):
        keys = ring.keys[:1] + [ring.keys[number] for number in ring.draw(EXIST_KEYS - 1)]
        start_s = time.perf_counter()
        found = peer.exist(keys)
        times_s.append(time.perf_counter() - start_s)
        if found != EXIST_KEYS:
            raise HoldfastError(f"{name}: {found} of {EXIST_KEYS} exist")
    value = 1e3 * statistics.median(times_s)
    return Row(what=f"{name}.exist.{EXIST_KEYS}", value=value, unit="ms")


def _speed_row(what: str, nbytes: int, costs: Sequence[Cost]) -> Row:
    speed = nbytes / statistics.median(cost.seconds for cost in costs) / GB
    near_s = statistics.fmean(cost.near_s for cost in costs) / nbytes * GB
    return Row(what=what, value=speed, unit="GB/s", more={"near_s_per_gb": near_s})


def _timed(work: Callable[[], None]) -> Cost:
    near_s, start_s = time.process_time(), time.perf_counter()
    work()
    return Cost(time.perf_counter() - start_s, time.process_time() - near_s)


def _world(nbytes: int) -> World:
    return World(b"holdfast-bench-p", b"holdfast-bench-d", nbytes, 128)


def _label(nbytes: int) -> str:
    return f"{nbytes // MIB}MiB" if nbytes >= MIB else f"{nbytes // KIB}KiB"
