"""Measure moves between tiers below memory, and what they cost the reads that a request waits for.

One store over a disk and a second tier. The rate of each kind of move is compared with the tiers
alone: the source is read while the target is written, with records of the same size, in the same
run. Two tiers on one drive share what the drive can do.
"""

from __future__ import annotations

import itertools
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

from holdfast.blocks.key import KEY_BYTES
from holdfast.buffers import aligned_buffer
from holdfast.byte_size import Size
from holdfast.codec.pack import pack, payload
from holdfast.errors import HoldfastError, Outcome
from holdfast.limits import GIB
from holdfast.policy.movement import Intake
from holdfast.report import Row
from holdfast.store.options import StoreOptions, TierRules
from holdfast.store.store import Store
from holdfast.testing.payloads import header_of
from holdfast.tiers.base import NOWHERE, LocalTier, Tier, TierGet, TierPut
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.tier import DiskTier
from holdfast.tiers.files.kind import FilesOptions, open_files
from holdfast.tiers.kind import TierContext
from holdfast.tiers.object.kind import ObjectOptions, open_object
from holdfast_bench.harness.paired_runs import Speed, paired, speed_row, timed
from holdfast_bench.harness.standard_error import percentile_99
from holdfast_bench.measure.disk import BATCH, FINGERPRINT, NAMESPACE, PAYLOAD_BYTES, chain_of
from holdfast_bench.peers.seaweed_server import BUCKET, SeaweedServer

HOST, NEAR, FAR = 0, 1, 2
CONTEXT_BYTES = BATCH * PAYLOAD_BYTES
HOST_CONTEXTS = 8
WAIT_S = 120.0
"""Longest wait for moves, in seconds; also the deadline of every call of a tier."""

LIMIT_SEED = 1 << 20
"""First seed of the contexts that tiers write and read alone."""

LEASED_EVERY = 8
"""Of this number of consecutive slots one stays in use: fewer than a run of slots has."""

_LOOK_AGAIN_S = 0.0005


class MovingStore:
    """A store whose first lower tier gets saves, and whose second one what the first evicts.

    What is fetched from the second tier is kept on the first one. Its memory is full, as that of a
    node at work: blocks that leave make room for others, and no page is cleared by the kernel.
    """

    def __init__(self, near: Tier, far: Tier) -> None:
        rules = {
            NEAR: TierRules(intake=Intake(evicted="never", fetched="always")),
            FAR: TierRules(intake=Intake(saves=False, evicted="always", fetched="never")),
        }
        memory = HOST_CONTEXTS * BATCH * NAMESPACE.slot_bytes
        options = StoreOptions(rules=rules)
        self._store = Store(memory, [near, far], {"default": bytes(range(32))}, options)
        self._seeds = itertools.count(1)
        self._store.start()
        for _ in range(HOST_CONTEXTS):
            keys, _ = self.save()
            # A run of slots that becomes empty is returned to the kernel.
            self._store.fetch_unverified(NAMESPACE, keys[::LEASED_EVERY], WAIT_S)

    def close(self) -> None:
        """Close the store and its tiers."""
        self._store.close()

    def save(self) -> tuple[list[bytes], Speed]:
        """Save a new context; return its keys, and the speed until the first lower tier has it."""
        store, keys = self._store, chain_of(next(self._seeds), BATCH).keys
        reserved = store.reserve(NAMESPACE, keys, FINGERPRINT, 0)
        if reserved.outcome is not Outcome.OK:
            raise HoldfastError(f"no memory for a context: {reserved.outcome}")
        arena = store.arena(NAMESPACE.domain).view
        for key, place in zip(keys, reserved.places, strict=True):
            payload(arena[place:], PAYLOAD_BYTES)[:] = key * (PAYLOAD_BYTES // KEY_BYTES)

        def commit() -> None:
            store.commit(reserved.ticket)
            self.wait()

        return keys, timed(CONTEXT_BYTES, commit)

    def demote(self, keys: Sequence[bytes]) -> Speed:
        """Move a context to the second tier; return the speed until it is there."""

        def work() -> None:
            self.queue([keys])
            self.wait()

        return timed(CONTEXT_BYTES, work)

    def promote(self, keys: Sequence[bytes]) -> Speed:
        """Fetch a context from the second tier; return the speed until the first one has it."""

        def work() -> None:
            self.fetch(keys, FAR)
            self.wait()

        return timed(CONTEXT_BYTES, work)

    def queue(self, contexts: Sequence[Sequence[bytes]]) -> None:
        """Queue contexts for the second tier, as if the first one would evict them next."""
        table = self._store.table
        with table.lock:
            for keys in contexts:
                for row in table.index.find_all(NAMESPACE, keys):
                    table.movement.demote(row, NEAR)
        self._store.mover.wake()

    def remove(self, keys: Sequence[bytes], tier: int) -> None:
        """Remove the copies of blocks from one tier."""
        table = self._store.table
        with table.lock:
            for row in table.index.find_all(NAMESPACE, keys):
                table.remove_copy(row, tier)

    def fetch(self, keys: Sequence[bytes], source: int) -> None:
        """Fetch blocks; raise HoldfastError unless all come from this tier."""
        fetched = self._store.fetch(NAMESPACE, keys, WAIT_S)
        self._store.release(fetched.lease)
        if fetched.sources != {self._store.tier_names()[source]: len(keys)}:
            raise HoldfastError(f"blocks came from {fetched.sources}: {fetched.reason}")

    @property
    def is_moving(self) -> bool:
        """Whether a move is queued or running."""
        return self._store.table.unwritten() > 0

    def wait(self) -> None:
        """Wait until no move is queued or running; raise HoldfastError after `WAIT_S`."""
        end_s = time.monotonic() + WAIT_S
        while self.is_moving:
            if time.monotonic() > end_s:
                raise HoldfastError(f"blocks still move after {WAIT_S:g} s")
            time.sleep(_LOOK_AGAIN_S)

    def check_on(self, keys: Sequence[bytes], tier: int) -> None:
        """Raise HoldfastError unless a tier holds all of these blocks."""
        table = self._store.table
        with table.lock:
            rows = table.index.find_all(NAMESPACE, keys)
            held = sum(row >= 0 and table.is_on(row, tier) for row in rows)
        if held != len(keys):
            raise HoldfastError(f"tier {tier} holds {held} of {len(keys)} blocks that moved to it")


class TierAlone:
    """A tier's own speed: a context written, or read back, in one call.

    A local tier must have room for what is written; it is freed after the next write.
    """

    def __init__(self, tier: Tier, seed: int) -> None:
        self._tier = tier
        memory = aligned_buffer(BATCH * NAMESPACE.slot_bytes)
        size = NAMESPACE.slot_bytes
        self._records = [memory[at * size : (at + 1) * size] for at in range(BATCH)]
        self._seeds = itertools.count(seed)
        self._keys = list[bytes]()
        self._places = [NOWHERE] * BATCH

    def write_gb_per_s(self) -> float:
        """Write a new context."""
        return self.ready_to_write()()

    def read_gb_per_s(self) -> float:
        """Read the context that was written last."""
        return self.ready_to_read()()

    def ready_to_write(self) -> Callable[[], float]:
        """Return what writes a new context and returns the speed in GB/s."""
        self._keys = chain_of(next(self._seeds), BATCH).keys
        for record, key in zip(self._records, self._keys, strict=True):
            pack(record, header_of(NAMESPACE, key))
        if isinstance(self._tier, LocalTier):
            self._tier.free([place for place in self._places if place != NOWHERE])
            self._places = self._tier.reserve([NAMESPACE.slot_bytes] * BATCH).places
        puts = list(map(TierPut, self._places, self._records))
        return lambda: self._timed(lambda: self._tier.write(puts))

    def ready_to_read(self) -> Callable[[], float]:
        """Return what reads the context that was written last and returns the speed in GB/s."""
        wanted = zip(self._places, self._keys, self._records, strict=True)
        gets = [TierGet(place, key, into, NAMESPACE) for place, key, into in wanted]
        return lambda: self._timed(lambda: self._tier.read(gets))

    def _timed(self, call: Callable[[], list[Outcome]]) -> float:
        outcomes = list[Outcome]()
        speed = timed(CONTEXT_BYTES, lambda: outcomes.extend(call()))
        if set(outcomes) != {Outcome.OK}:
            raise HoldfastError(f"{self._tier.name} answered {sorted(set(outcomes))}")
        return speed.gb_per_s


@contextmanager
def _stores(folder: Path, far: Tier) -> Iterator[tuple[MovingStore, TierAlone, TierAlone]]:
    """Yield a store over a new disk and a tier, and both tiers alone; writes and reads are warm.

    Removes the folder at the end: each disk takes 4 GiB.
    """
    near = DiskTier(DiskConfig(path=str(folder / "near"), capacity_bytes=4 * GIB))
    with closing(MovingStore(near, far)) as store:
        sides = TierAlone(near, LIMIT_SEED), TierAlone(far, 2 * LIMIT_SEED)
        for side in sides:
            side.write_gb_per_s()
            side.read_gb_per_s()
        yield store, *sides
    shutil.rmtree(folder)


def move_rows(folder: Path, far: Tier, kind: str, rounds: int) -> Iterator[Row]:
    """Yield the rates of moves between a disk and a tier of a kind, in both directions.

    Takes 64 MiB on each tier for every round.
    """
    with _stores(folder, far) as (store, near_alone, far_alone):
        moved = list[list[bytes]]()

        def demote() -> Speed:
            keys, _ = store.save()
            store.remove(keys, HOST)
            speed = store.demote(keys)
            store.check_on(keys, FAR)
            moved.append(keys)
            return speed

        def promote() -> Speed:
            keys = moved.pop(0)
            for tier in (HOST, NEAR):
                store.remove(keys, tier)
            speed = store.promote(keys)
            store.check_on(keys, NEAR)
            return speed

        def down_limit() -> float:
            return at_once_gb_per_s(near_alone, far_alone)

        def up_limit() -> float:
            return at_once_gb_per_s(far_alone, near_alone)

        for what, ours, limit in (
            (f"movement.demotion.disk.{kind}", demote, down_limit),
            (f"movement.promotion.{kind}.disk", promote, up_limit),
        ):
            more = {"bytes": PAYLOAD_BYTES, "limit_is": "both tiers alone, at once"}
            yield speed_row(what, paired(rounds, ours, limit), None, **more)


def at_once_gb_per_s(source: TierAlone, target: TierAlone) -> float:
    """Read a context from one tier while another one writes one; return the slower speed."""
    read, write = source.ready_to_read(), target.ready_to_write()
    with ThreadPoolExecutor(1) as beside:
        written = beside.submit(write)
        return min(read(), written.result())


def save_row(folder: Path, rounds: int) -> Row:
    """Return the rate of write-behind to a disk, beside the disk alone."""
    far = DiskTier(DiskConfig(path=str(folder / "far"), capacity_bytes=GIB))
    with _stores(folder, far) as (store, near_alone, _):
        pairs = paired(rounds, lambda: store.save()[1], near_alone.write_gb_per_s)
        return speed_row("movement.save.disk", pairs, None, bytes=PAYLOAD_BYTES)


def beside_row(folder: Path, rounds: int) -> Row:
    """Return the latency of fetching one block from a disk that blocks are demoted from.

    `limit` is the latency without moves. Both disks are folders of one drive.
    """
    far = DiskTier(DiskConfig(path=str(folder / "far"), capacity_bytes=4 * GIB))
    with _stores(folder, far) as (store, _, _):
        held = [store.save()[0] for _ in range(2 * HOST_CONTEXTS)]
        moved, read = held[:HOST_CONTEXTS], itertools.cycle(itertools.chain(*held[HOST_CONTEXTS:]))

        def fetch_ms() -> float:
            key = next(read)
            store.remove([key], HOST)
            began_s = time.perf_counter()
            store.fetch([key], NEAR)
            return 1e3 * (time.perf_counter() - began_s)

        busy, idle = list[float](), list[float]()
        for keys in moved:
            store.remove(keys, HOST)
        for _ in range(rounds):
            before = len(busy)
            store.queue(moved)
            while store.is_moving:
                busy.append(fetch_ms())
            idle += [fetch_ms() for _ in range(len(busy) - before)]
            for keys in moved:
                store.remove(keys, FAR)
        value, limit = statistics.median(busy), statistics.median(idle)
        more = {
            "p99_ms": percentile_99(busy),
            "idle_p99_ms": percentile_99(idle),
            "reads": len(busy),
            "limit_is": "the same without moves",
        }
        return Row("movement.read.beside", value, "ms", limit=limit, ratio=value / limit, more=more)


def open_shared_folder(folder: Path) -> Tier:
    """Open a files tier in a folder of this machine."""
    options = FilesOptions(
        path=str(folder), capacity=Size(64 * GIB), deadline_s=60.0, ask_s=60.0, gather_s=0.0
    )
    folder.mkdir(parents=True, exist_ok=True)
    return open_files(options, TierContext("bench", "files", 512))


@contextmanager
def bucket_tier(folder: Path, contexts: int) -> Iterator[Tier]:
    """Yield an object tier on a SeaweedFS server in a folder, with room for so many contexts."""
    volumes = contexts * CONTEXT_BYTES // GIB + 8
    with closing(SeaweedServer(folder, volume_mb=1_024, volumes=volumes)) as server:
        server.start()
        options = ObjectOptions(
            url=f"s3://{BUCKET}/bench",
            endpoint=server.endpoint,
            credentials_file=str(server.write_credentials(folder / "credentials")),
            deadline_s=60.0,
            ask_s=60.0,
            gather_s=0.0,
        )
        yield open_object(options, TierContext("bench", "object", 512))
