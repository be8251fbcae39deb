"""Measure Redis, Mooncake Store and LMCache with the records and sizes of `bench pool`.

Each peer is a process on this machine, reached over loopback TCP; both ends use memory larger than
any CPU cache. Every record received is verified after its timing.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

from holdfast.blocks.key import KEY_BYTES, SEGMENT_BYTES
from holdfast.blocks.namespace import Namespace
from holdfast.buffers import aligned_buffer
from holdfast.codec.pack import pack
from holdfast.errors import HoldfastError
from holdfast.limits import BLOCK_TOKENS, GIB, MIB
from holdfast.report import Row, at_least, not_measured
from holdfast.testing.payloads import header_of
from holdfast.tiers.mooncake.kind import MooncakeOptions
from holdfast.tiers.mooncake.tier import MooncakeTier
from holdfast.tiers.valkey.kind import ValkeyOptions
from holdfast.tiers.valkey.tier import ValkeyTier
from holdfast_bench.harness.hardware_limits import GB, SEED
from holdfast_bench.harness.paired_runs import Speed, median_speed, timed
from holdfast_bench.measure.pool import (
    ANSWER_S,
    BATCH,
    EXIST_KEYS,
    SINGLES_PER_ROUND,
    SIZES,
    check_record,
    label,
)
from holdfast_bench.peers import lmcache_server, mooncake_server, valkey_server
from holdfast_bench.peers.mooncake_server import MooncakeServers
from holdfast_bench.peers.peers import MeasuredPeer, MooncakePeer, RedisPeer, TierPeer
from holdfast_bench.peers.plain_sockets import PlainPool
from holdfast_bench.peers.valkey_server import ValkeyServers

LEASED_BYTES = 2 * GIB
BESIDE_BYTES = 2 * MIB
BESIDE_GOALS = {"mooncake": 3.0, "redis": 6.0}
"""How many times their GB/s ours has to be, 32 blocks of 2 MiB a call."""


class RecordRing:
    """Packed records that fill one buffer, and a pool of the same size to receive them."""

    def __init__(self) -> None:
        self.pool = PlainPool()
        self.records = aligned_buffer(len(self.pool.memory))
        self.keys: list[bytes] = []
        self.namespace = _namespace(SIZES[0])
        self._random = random.Random(SEED)  # noqa: S311  # an order, not a secret

    def fill(self, nbytes: int) -> None:
        """Pack records with payloads of `nbytes`, all of one segment."""
        self.namespace = _namespace(nbytes)
        count = len(self.records) // self.namespace.slot_bytes
        segment = nbytes.to_bytes(SEGMENT_BYTES, "little")
        self.keys = [
            segment + n.to_bytes(KEY_BYTES - SEGMENT_BYTES, "little") for n in range(count)
        ]
        for number, key in enumerate(self.keys):
            header = header_of(self.namespace, key)._replace(segment=segment)
            pack(self.record(number), header)

    def record(self, number: int) -> memoryview:
        size = self.namespace.slot_bytes
        return self.records[number * size : (number + 1) * size]

    def draw(self, count: int) -> list[int]:
        """Return `count` different random record numbers."""
        return self._random.sample(range(len(self.keys)), count)


Opener: TypeAlias = Callable[[Path, RecordRing, ExitStack], dict[str, MeasuredPeer]]
"""Starts a peer and returns its clients by row name; the stack ends all of them."""


def peer_rows(folder: Path, rounds: int, tell: Callable[[str], None]) -> list[Row]:
    """Measure the peers that are installed; takes 5 GiB of memory.

    A peer that is not installed or does not start has one row, `peer.NAME`, without a value; its
    field `why` gives the reason. A wrong or lost record ends the measurement.
    """
    rows, missing = list[Row](), list[Row]()
    ring = RecordRing()
    stores: list[tuple[str, Opener, str]] = [
        ("redis", _redis, _why_no_redis()),
        ("mooncake", _mooncake, mooncake_server.why_not()),
        ("lmcache", _lmcache, "" if lmcache_server.installed() else lmcache_server.why_not()),
    ]
    for name, opener, why_not in stores:
        if why_not:
            missing.append(not_measured(f"peer.{name}", why_not))
            continue
        with ExitStack() as stack:
            try:
                peers = opener(folder, ring, stack)
            except Exception as error:  # noqa: BLE001  # code of another project, in our process
                missing.append(not_measured(f"peer.{name}", str(error) or repr(error)))
                continue
            for nbytes in SIZES:
                tell(f"{', '.join(peers)}: {label(nbytes)}")
                ring.fill(nbytes)
                rows += _size_rows(peers, ring, nbytes, rounds)
    return rows + missing


def beside_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield our speed divided by each peer's, for transfers that this run measured of both.

    The field `plain` is the speed of plain sockets divided by the peer's: the upper bound for any
    store over TCP on this machine. A run that measured peers, but not this one, yields a row
    without a value; its field `why` gives the reason.
    """
    found = {row.what: row for row in rows}
    if not any(what.startswith("peer.") for what in found):
        return
    for peer, goal in BESIDE_GOALS.items():
        for verb in ("get", "put"):
            way = f"{verb}.{label(BESIDE_BYTES)}x{BATCH}"
            what = f"pool.{way}.over_{peer}"
            ours, theirs = found.get(f"pool.{way}"), found.get(f"peer.{peer}.{way}")
            if ours is None or not ours.value or not ours.limit:
                continue
            if theirs is None or not theirs.value:
                failed = found.get(f"peer.{peer}")
                why = failed.more.get("why") if failed else None
                yield not_measured(what, str(why or f"this run has no peer.{peer}.{way}"))
                continue
            plain = ours.limit / theirs.value
            yield at_least(what, ours.value / theirs.value, "x", goal, plain=plain)


def _why_no_redis() -> str:
    """Return why Redis cannot be measured here, "" if it can."""
    if valkey_server.program() is None:
        return f"none of {', '.join(valkey_server.PROGRAMS)} is installed; install one"
    if find_spec("redis") and find_spec("hiredis"):
        return ""
    return "redis-py or hiredis is not installed: pip install 'holdfast-kv[peers]'"


def _redis(folder: Path, ring: RecordRing, stack: ExitStack) -> dict[str, MeasuredPeer]:
    servers = stack.enter_context(closing(ValkeyServers(folder / "redis")))
    servers.start()
    port = servers.endpoints[0].port
    redis = stack.enter_context(closing(RedisPeer(port, lambda: ring.namespace)))
    options = ValkeyOptions(address=list(servers.addresses), deadline_s=ANSWER_S, ask_s=ANSWER_S)
    tier = TierPeer(ValkeyTier(options), lambda: ring.namespace, redis)
    return {"peer.redis": redis, "tier.valkey": stack.enter_context(closing(tier))}


def _mooncake(folder: Path, ring: RecordRing, stack: ExitStack) -> dict[str, MeasuredPeer]:
    servers = stack.enter_context(closing(MooncakeServers(folder / "mooncake", LEASED_BYTES)))
    servers.start()
    memories = [ring.records, ring.pool.memory]
    mooncake = MooncakePeer(servers.master, memories, lambda: ring.namespace)
    stack.callback(mooncake.close)
    options = MooncakeOptions(master=servers.address, deadline_s=ANSWER_S, ask_s=ANSWER_S)
    tier = TierPeer(MooncakeTier(options), lambda: ring.namespace, mooncake)
    return {"peer.mooncake": mooncake, "tier.mooncake": stack.enter_context(closing(tier))}


def _lmcache(folder: Path, ring: RecordRing, stack: ExitStack) -> dict[str, MeasuredPeer]:
    del ring
    return {"peer.lmcache": stack.enter_context(closing(lmcache_server.LMCachePeer(folder)))}


def _size_rows(
    peers: dict[str, MeasuredPeer], ring: RecordRing, nbytes: int, rounds: int
) -> list[Row]:
    """Fill the peer, measure each of its clients, and empty the peer."""
    first = next(iter(peers.values()))
    for at in range(0, len(ring.keys), BATCH):
        some = range(at, min(at + BATCH, len(ring.keys)))
        first.put([ring.keys[n] for n in some], [ring.record(n) for n in some])
    rows = []
    for name, peer in peers.items():
        if nbytes == SIZES[0]:
            rows.append(_exist_row(name, peer, ring, rounds))
        for verb, trip in (("get", _get), ("put", _put)):
            what = f"{name}.{verb}.{label(nbytes)}"
            trip(peer, ring, BATCH)
            batches = [trip(peer, ring, BATCH) for _ in range(rounds)]
            singles = [trip(peer, ring, 1) for _ in range(rounds * SINGLES_PER_ROUND)]
            local_s = statistics.fmean(each.cpu_s_per_gb for each in batches)
            speed, single = median_speed(batches).gb_per_s, median_speed(singles).gb_per_s
            more: dict[str, object] = {"local_cpu_s_per_gb": local_s}
            rows.append(Row(what=f"{what}x{BATCH}", value=speed, unit="GB/s", more=more))
            rows.append(Row(what=what, value=1e6 * nbytes / GB / single, unit="us"))
    first.clear()
    return rows


def _get(peer: MeasuredPeer, ring: RecordRing, count: int) -> Speed:
    keys = [ring.keys[number] for number in ring.draw(count)]
    into = ring.pool.pick(ring.namespace.slot_bytes, count)
    speed = timed(count * ring.namespace.raw_bytes, lambda: peer.get(keys, into))
    for key, record in zip(keys, into, strict=True):
        check_record(ring.namespace, key, record)
    return speed


def _put(peer: MeasuredPeer, ring: RecordRing, count: int) -> Speed:
    numbers = ring.draw(count)
    keys = [ring.keys[number] for number in numbers]
    records = [ring.record(number) for number in numbers]
    peer.forget(keys)
    return timed(count * ring.namespace.raw_bytes, lambda: peer.put(keys, records))


def _exist_row(name: str, peer: MeasuredPeer, ring: RecordRing, rounds: int) -> Row:
    times_s = []
    for _ in range(rounds * SINGLES_PER_ROUND):
        keys = ring.keys[:1] + [ring.keys[number] for number in ring.draw(EXIST_KEYS - 1)]
        start_s = time.perf_counter()
        found = peer.exist(keys)
        times_s.append(time.perf_counter() - start_s)
        if found != EXIST_KEYS:
            raise HoldfastError(f"{name}: {found} of {EXIST_KEYS} exist")
    value = 1e3 * statistics.median(times_s)
    return Row(what=f"{name}.exist.{EXIST_KEYS}", value=value, unit="ms")


def _namespace(nbytes: int) -> Namespace:
    return Namespace(b"holdfast-bench-p", b"holdfast-bench-d", nbytes, BLOCK_TOKENS)
