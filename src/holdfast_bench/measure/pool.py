"""Measure a target over loopback TCP against plain sockets: speed, and CPU time at both ends.

Holdfast and plain sockets alternate, each between two processes and memory larger than any CPU
cache. Every record put is new to the target. Records received are verified after their timing; of
single gets, the last of 20.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from holdfast.blocks.key import KEY_BYTES
from holdfast.blocks.namespace import Namespace
from holdfast.buffers import aligned_buffer
from holdfast.codec.pack import pack, verify
from holdfast.errors import HoldfastError, Outcome
from holdfast.limits import BLOCK_TOKENS, GIB, KIB, MIB
from holdfast.probe import free_port
from holdfast.report import Row, at_most, not_measured, share
from holdfast.testing.payloads import header_of
from holdfast.wire.remote.buffer_pool import TransferBuffers
from holdfast.wire.remote.client import TargetClient
from holdfast.wire.remote.credentials import Credentials, TlsFiles
from holdfast_bench.harness.hardware_limits import GB
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.harness.process import wait_until
from holdfast_bench.peers.plain_sockets import HOST, PlainPeer, PlainPool

SIZES = (64 * KIB, 512 * KIB, 2 * MIB, 8 * MIB)
BATCH = 32
MAIN_BYTES = 2 * MIB
SMALL_PUTS = ("put", 512 * KIB)
"""The other batches with a goal: small records, as each of several KV groups has."""
HOST_BYTES = GIB + 256 * MIB
RECORDS_BYTES = 1 * GIB
ANSWER_S = 30.0
READY_S = 60.0

SPEED_GOAL = 0.9
CPU_GOAL = 1.2
SMALL_GOAL_US = 110.0
EXIST_GOAL_MS = 0.8
EXIST_KEYS = 1_000
SINGLES_PER_ROUND = 20

_SCHEDULED = 2
"""Low three bits of a process's CPU clock id (CPUCLOCK_SCHED); the rest is the inverted pid."""


class TransferCost(NamedTuple):
    """One transfer: seconds, and CPU seconds of this process (local) and of the server (remote)."""

    seconds: float
    local_cpu_s: float
    remote_cpu_s: float


class RoundTrip(NamedTuple):
    """A transfer, which is timed, and its check, which is not."""

    run: Callable[[], None]
    check: Callable[[], None]


class TargetUnderTest(NodeUnderTest):
    """A node with memory only, which serves peers on a loopback port, and a client of it.

    `http`: the address of its metrics, such as tcp://127.0.0.1:9400; empty for none.
    """

    def __init__(
        self,
        folder: Path,
        tls: TlsFiles | None = None,
        transfer_buffers: TransferBuffers | None = None,
        http: str = "",
    ) -> None:
        self.peer_address = f"tcp://{HOST}:{free_port()}"
        settings: dict[str, object] = {
            "transport": "nixl" if transfer_buffers else "tcp",
            "tiers": [{"kind": "host", "capacity": HOST_BYTES}],
            "http": {"listen": http},
        }
        if tls:
            settings["tls"] = msgspec.structs.asdict(tls)
        super().__init__(folder, settings=settings, also=self.peer_address)
        self.client = TargetClient(
            self.peer_address, Credentials(tls), transfer_buffers=transfer_buffers
        )

    def over_nixl(self) -> bool:
        """Reconnect; return whether the connection uses NIXL."""
        transfer_buffers = self.client.transfer_buffers
        self.client.close()
        self.client = TargetClient(self.peer_address, transfer_buffers=transfer_buffers)
        self.client.stats(ANSWER_S)
        return self.client.transport == "nixl"

    def __exit__(self, *_: object) -> None:
        self.client.close()
        super().__exit__()


def records_memory() -> memoryview:
    """Return memory for records, every page of it touched: pages never written are sent faster."""
    memory = aligned_buffer(RECORDS_BYTES)
    np.frombuffer(memory, np.uint8).fill(1)
    return memory


class RecordBatch:
    """Packed records of one size that fill `memory`; they get new keys when all were used.

    Gets and lookups name any of the records put last, as many as fill the memory.
    """

    def __init__(self, raw_bytes: int, memory: memoryview) -> None:
        self.namespace = Namespace(
            b"holdfast-bench-p", b"holdfast-bench-d", raw_bytes, BLOCK_TOKENS
        )
        size = self.namespace.slot_bytes
        self._views = [memory[at : at + size] for at in range(0, len(memory) - size + 1, size)]
        self._numbers = itertools.count()
        self._keys: list[bytes] = []
        self._held = deque[bytes](maxlen=len(self._views))
        self._next = len(self._views)
        self._random = random.Random(raw_bytes)  # noqa: S311  # an order, not a secret

    def fill(self, target: TargetClient) -> None:
        """Put all records twice, so that the target is full and each later put evicts a record."""
        for _ in range(2 * (len(self._views) // BATCH)):
            trip = self.put(target, BATCH)
            trip.run()
            trip.check()

    def put(self, target: TargetClient, count: int) -> RoundTrip:
        """Return the put of `count` new, adjacent records; its check: the target accepted all."""
        if self._next + count > len(self._views):
            self._rename()
        part = slice(self._next, self._next + count)
        records, keys = self._views[part], self._keys[part]
        self._next += count

        outcomes: list[Outcome] = []

        def put() -> None:
            outcomes.extend(target.put(records, ANSWER_S))

        def check() -> None:
            if outcomes != [Outcome.OK] * count:
                found = ", ".join(f"{outcomes.count(each)} {each}" for each in set(outcomes))
                raise HoldfastError(f"the target did not accept {count} records: {found}")
            self._held.extend(keys)

        return RoundTrip(put, check)

    def get(self, target: TargetClient, pool: PlainPool, count: int) -> RoundTrip:
        """Return the get of `count` random records to random places; its check verifies them."""
        keys = self._random.sample(self._held, count)
        into = pool.pick(self.namespace.slot_bytes, count)

        def get() -> None:
            got = target.get(self.namespace, keys, into, ANSWER_S)
            if got.blocks != count:
                raise HoldfastError(f"got {got.blocks} of {count}: {got.outcome} {got.reason}")

        def check() -> None:
            for key, record in zip(keys, into, strict=True):
                check_record(self.namespace, key, record)

        return RoundTrip(get, check)

    def sample(self, count: int) -> list[bytes]:
        """Return random keys of records that the target holds."""
        return self._random.choices(self._held, k=count)

    def _rename(self) -> None:
        size = self.namespace.raw_bytes
        numbers = (size << 64 | next(self._numbers) for _ in self._views)
        self._keys = [number.to_bytes(KEY_BYTES, "little") for number in numbers]
        self._next = 0
        for view, key in zip(self._views, self._keys, strict=True):
            pack(view, header_of(self.namespace, key))


class PoolBench(NamedTuple):
    """A target, a plain-socket server and local memory; `suffix` is appended to row names."""

    target: TargetUnderTest
    plain: PlainPeer
    pool: PlainPool
    rounds: int
    suffix: str = ""
    goal: float | None = SPEED_GOAL

    def every_size(self) -> list[Row]:
        """Measure get and put of 32 blocks and of one at every size, and lookups."""
        memory, rows = records_memory(), list[Row]()
        for nbytes in SIZES:
            records = RecordBatch(nbytes, memory)
            records.fill(self.target.client)
            if nbytes == SIZES[0]:
                rows.append(self.exist(records))
            rows += self.batches(records, nbytes) + self.singles(records, nbytes)
        return rows

    def batches(self, records: RecordBatch, nbytes: int) -> list[Row]:
        rows = []
        for verb, trip, plain in self._ways(records, nbytes, BATCH):
            goal = self.goal if nbytes == MAIN_BYTES or (verb, nbytes) == SMALL_PUTS else None
            self._turn(trip(), plain)
            turns = [self._turn(trip(), plain) for _ in range(self.rounds)]
            ours, limit = zip(*turns, strict=True)
            what = f"pool.{verb}.{label(nbytes)}x{BATCH}{self.suffix}"
            rows.append(_speed_row(what, BATCH * nbytes, goal, ours, limit))
            if goal and nbytes == MAIN_BYTES and not self.suffix:
                spent, limit_s = (
                    sum(cost.local_cpu_s + cost.remote_cpu_s for cost in side)
                    for side in (ours, limit)
                )
                rows.append(at_most(f"{what}.cpu", spent / limit_s, "x plain", CPU_GOAL))
        return rows

    def singles(self, records: RecordBatch, nbytes: int) -> list[Row]:
        rows = []
        for verb, trip, plain in self._ways(records, nbytes, 1):
            ours_us: list[float] = []
            plain_us: list[float] = []
            for _ in range(self.rounds):
                plain_us += [_microseconds(plain) for _ in range(SINGLES_PER_ROUND)]
                for number in range(1, SINGLES_PER_ROUND + 1):
                    single = trip()
                    ours_us.append(_microseconds(single.run))
                    # Of gets the last only: a check reads the record into the processor's cache.
                    if verb == "put" or number == SINGLES_PER_ROUND:
                        single.check()
            goal = SMALL_GOAL_US if self.goal and (verb, nbytes) == ("get", SIZES[0]) else None
            what = f"pool.{verb}.{label(nbytes)}{self.suffix}"
            more = {"plain_us": statistics.median(plain_us)}
            rows.append(at_most(what, statistics.median(ours_us), "us", goal, **more))
        return rows

    def exist(self, records: RecordBatch) -> Row:
        """Time a lookup of 1,000 blocks that are all held."""
        times_ms = []
        for _ in range(SINGLES_PER_ROUND * self.rounds):
            keys = records.sample(EXIST_KEYS)
            start_s = time.perf_counter()
            found = self.target.client.exist(records.namespace, keys, ANSWER_S)
            times_ms.append(1e3 * (time.perf_counter() - start_s))
            if found.held != b"\1" * EXIST_KEYS:
                raise HoldfastError(f"{sum(found.held)} of {EXIST_KEYS} exist: {found.outcome}")
        goal = EXIST_GOAL_MS if self.goal else None
        what = f"pool.exist.{EXIST_KEYS}{self.suffix}"
        return at_most(what, statistics.median(times_ms), "ms", goal)

    def _turn(
        self, ours: RoundTrip, plain: Callable[[], None]
    ) -> tuple[TransferCost, TransferCost]:
        """Time both transfers, plain sockets first; return the costs of ours and of theirs."""
        limit = _cost(plain, self.plain.process.pid)
        cost = _cost(ours.run, self.target.process.pid)
        ours.check()
        return cost, limit

    def _ways(
        self, records: RecordBatch, nbytes: int, count: int
    ) -> list[tuple[str, Callable[[], RoundTrip], Callable[[], None]]]:
        client, pool, plain = self.target.client, self.pool, self.plain
        return [
            ("get", lambda: records.get(client, pool, count), lambda: plain.get(nbytes, count)),
            ("put", lambda: records.put(client, count), lambda: plain.put(nbytes, count)),
        ]


def pool_rows(folder: Path, rounds: int) -> list[Row]:
    """Measure get, put and exist at every size, one block and 32 per call."""
    pool = PlainPool()
    with TargetUnderTest(folder) as target, PlainPeer(folder, pool) as plain:
        return PoolBench(target, plain, pool, rounds).every_size()


def sealed_rows(folder: Path, rounds: int) -> list[Row]:
    """Measure get and put of 32 blocks of 2 MiB over TLS, against plain sockets over TLS."""
    from holdfast_bench.harness.certificates import Authority

    pool, records = PlainPool(), RecordBatch(MAIN_BYTES, records_memory())
    tls = Authority(folder).issue("bench", HOST)
    with TargetUnderTest(folder, tls) as target, PlainPeer(folder, pool, tls) as plain:
        records.fill(target.client)
        return PoolBench(target, plain, pool, rounds, ".tls").batches(records, MAIN_BYTES)


def nixl_rows(folder: Path, rounds: int) -> list[Row]:
    """Measure get, put and exist at every size over NIXL, against plain sockets.

    One row without a value if NIXL cannot be used here. No goal: on one host without RDMA, NIXL
    has no advantage.
    """
    transfer_buffers = TransferBuffers()
    if transfer_buffers.wait(READY_S) is None:
        why = "NIXL is not installed, or failed to start: pip install 'holdfast-kv[nixl]'"
        return [not_measured("pool.nixl", why)]
    pool = PlainPool()
    with (
        TargetUnderTest(folder, transfer_buffers=transfer_buffers) as target,
        PlainPeer(folder, pool) as plain,
    ):
        wait_until(target.process, target.over_nixl, READY_S)
        return PoolBench(target, plain, pool, rounds, ".nixl", None).every_size()


def check_record(namespace: Namespace, key: bytes, record: memoryview) -> None:
    """Raise HoldfastError if a received record is not the one that was stored."""
    outcome = verify(record, key, namespace.fingerprint, namespace.raw_bytes)
    if outcome is not Outcome.OK:
        raise HoldfastError(f"a received record is {outcome}")


def label(nbytes: int) -> str:
    """Return a size as it stands in the names of rows."""
    return f"{nbytes // MIB}MiB" if nbytes >= MIB else f"{nbytes // KIB}KiB"


def spent_s(pid: int) -> float:
    """Return the CPU seconds of a process, including its ended threads."""
    return time.clock_gettime(~pid << 3 | _SCHEDULED)


def _cost(work: Callable[[], None], remote_pid: int) -> TransferCost:
    local_s, remote_s, start_s = time.process_time(), spent_s(remote_pid), time.perf_counter()
    work()
    seconds = time.perf_counter() - start_s
    return TransferCost(seconds, time.process_time() - local_s, spent_s(remote_pid) - remote_s)


def _microseconds(work: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    work()
    return 1e6 * (time.perf_counter() - start_s)


def _speed_row(
    what: str,
    nbytes: int,
    goal: float | None,
    ours: Sequence[TransferCost],
    plain: Sequence[TransferCost],
) -> Row:
    """Return the row of a batch: GB/s, with plain sockets as the limit."""
    more = {}
    for prefix, side in (("", ours), ("plain_", plain)):
        local_s = statistics.fmean(cost.local_cpu_s for cost in side)
        remote_s = statistics.fmean(cost.remote_cpu_s for cost in side)
        more[f"{prefix}local_cpu_s_per_gb"] = local_s * GB / nbytes
        more[f"{prefix}remote_cpu_s_per_gb"] = remote_s * GB / nbytes
    speed, limit = (
        nbytes / statistics.median(cost.seconds for cost in side) / GB for side in (ours, plain)
    )
    return share(what, speed, "GB/s", limit, goal, **more)
