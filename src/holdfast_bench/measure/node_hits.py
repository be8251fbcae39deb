"""Replay a slice of a public agent trace through a real store, beside the simulator.

The store has host memory, a disk, and a shared folder that takes what the disk evicts. It is
compared with a store that has one disk of the summed capacity, and with the simulator of the same
ladder. The store's clock shows the times of the trace, so that its eviction policy decides as in
the simulator. Blocks are long in tokens and short in bytes: only the number of blocks decides.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np

from holdfast.blocks.envelope import HEADER_BYTES, TAG_BYTES
from holdfast.blocks.key import KEY_BYTES
from holdfast.blocks.namespace import Namespace
from holdfast.byte_size import Size
from holdfast.clock import ManualClock
from holdfast.errors import HoldfastError, Outcome
from holdfast.limits import KIB
from holdfast.plan.planner import FetchHeld
from holdfast.policy.movement import Intake
from holdfast.report import Row
from holdfast.sim.formats.load import load
from holdfast.sim.shipped import find_trace
from holdfast.sim.trace import Trace
from holdfast.store.options import StoreOptions, TierRules
from holdfast.store.store import Store
from holdfast.tiers.base import Tier
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.region import SECTOR, RegionGeometry
from holdfast.tiers.disk.tier import DiskTier
from holdfast.tiers.files.kind import FilesOptions, open_files
from holdfast.tiers.kind import TierContext
from holdfast_bench.measure.demoted_hits import GOAL, LadderBlocks, demoted_hits, token_hit

RECORD_BYTES = 64 * KIB
REGION_RECORDS = 16
REGION_BYTES = REGION_RECORDS * RECORD_BYTES + 2 * SECTOR
"""A region of the disk: its records, a header and a footer."""

POLL_S = 0.5
"""Interval in seconds at which the shared folder makes room."""

WAIT_S = 120.0
"""Longest wait for moves, in seconds; also the deadline of every call of a tier."""

DIFFERENCE_MAX = 0.02
"""Largest difference between the hits of the simulator and those of the store, as a share."""

_FINGERPRINT = b"replayed context"
_LOOK_AGAIN_S = 0.0005


class TraceSlice(NamedTuple):
    """A part of a trace: its first requests, in blocks longer by a factor, and a ladder for it.

    Host memory must hold the longest request.
    """

    name: str
    requests: int
    blocks: int
    ladder: LadderBlocks

    def load(self) -> Trace:
        """Return the slice of the trace, by the name that `holdfast sim` knows it by."""
        return load(find_trace(self.name)).first(self.requests).coarse(self.blocks)


SLICES = (TraceSlice("claude-code", 1_500, 64, LadderBlocks(185, 185, 1_051)),)
QUICK_SLICES = (TraceSlice("claude-code", 1_000, 64, LadderBlocks(120, 120, 690)),)
"""Both lower tiers together hold three fifths of the distinct blocks, as so short a slice needs."""


class ReplayedStore:
    """A store over host memory and lower tiers, through which a trace is replayed."""

    def __init__(self, trace: Trace, host_blocks: int, lower: Sequence[Tier]) -> None:
        self._trace = trace
        self._clock = ManualClock()
        rules = {
            1: TierRules(intake=Intake(evicted="never")),
            2: TierRules(intake=Intake(saves=False, evicted="always", fetched="never")),
        }
        options = StoreOptions(
            planner=FetchHeld(),
            rules={number: rules[number] for number in range(1, len(lower) + 1)},
            clock=self._clock,
        )
        secrets = {"default": bytes(range(32))}
        self._store = Store(host_blocks * RECORD_BYTES, list(lower), secrets, options)
        _, domain = self._store.domain("default")
        payload_bytes = RECORD_BYTES - HEADER_BYTES - TAG_BYTES
        self._namespace = Namespace(_FINGERPRINT, domain, payload_bytes, trace.block_tokens)
        self._store.start()

    def close(self) -> None:
        """Close the store and its tiers."""
        self._store.close()

    def replay(self) -> list[dict[str, int]]:
        """Serve each request of the trace; return the blocks that it got, by tier."""
        return [self._serve(request) for request in range(self._trace.requests)]

    def _serve(self, request: int) -> dict[str, int]:
        """Fetch the longest held prefix, and save the rest; return the blocks fetched, by tier."""
        store, namespace = self._store, self._namespace
        self._clock.advance(float(self._trace.time_s[request]) - self._clock.now())
        keys = [_key(int(each)) for each in self._trace.chain(request)]
        fetched = store.fetch(namespace, keys, WAIT_S)
        held = len(fetched.places)
        if held < len(keys):
            parent = keys[held - 1] if held else namespace.fingerprint
            reserved = store.reserve(namespace, keys[held:], parent, held)
            if reserved.outcome is not Outcome.OK:
                raise HoldfastError(f"no memory for request {request}: {reserved.outcome}")
            store.commit(reserved.ticket)
        store.release(fetched.lease)
        self._await_moves()
        return fetched.sources

    def _await_moves(self) -> None:
        end_s = time.monotonic() + WAIT_S
        while self._store.table.unwritten() > 0:
            if time.monotonic() > end_s:
                raise HoldfastError(f"blocks still move after {WAIT_S:g} s")
            time.sleep(_LOOK_AGAIN_S)


class StoreHits(NamedTuple):
    """Token hit of a replay, and the blocks that each tier gave."""

    token_hit: float
    by_tier: dict[str, int]


def demoted_store_hits(trace: Trace, blocks: LadderBlocks, folder: Path) -> StoreHits:
    """Replay a trace through a store whose disk demotes to a shared folder.

    The files are in `folder`, which is removed; so in `summed_store_hits`.
    """
    lower = [_disk(folder / "disk", blocks.disk), _shared_folder(folder / "files", blocks.far)]
    return _store_hits(trace, blocks.host, lower, folder)


def summed_store_hits(trace: Trace, blocks: LadderBlocks, folder: Path) -> StoreHits:
    """Replay a trace through a store with one disk, of the capacity of disk and shared folder."""
    lower = [_disk(folder / "disk", blocks.disk + blocks.far)]
    return _store_hits(trace, blocks.host, lower, folder)


def _store_hits(trace: Trace, host_blocks: int, lower: Sequence[Tier], folder: Path) -> StoreHits:
    with closing(ReplayedStore(trace, host_blocks, lower)) as store:
        served = store.replay()
    shutil.rmtree(folder)
    by_tier = dict[str, int]()
    for sources in served:
        for name, count in sources.items():
            by_tier[name] = by_tier.get(name, 0) + count
    fetched = np.array([sum(sources.values()) for sources in served], np.int64)
    return StoreHits(token_hit(trace, fetched), by_tier)


def node_hits_rows(folder: Path, slices: Sequence[TraceSlice]) -> Iterator[Row]:
    """Yield two rows for each slice: the store's hits, and the simulator's beside them."""
    for each in slices:
        what = f"movement.hits.node.{each.name}"
        yield from hits_beside_simulator(what, each.load(), each.ladder, folder)


def hits_beside_simulator(
    what: str, trace: Trace, blocks: LadderBlocks, folder: Path
) -> Iterator[Row]:
    """Yield the hits of a store, beside one disk of the summed capacity and the simulator."""
    simulated = demoted_hits(trace, blocks)
    demoted = demoted_store_hits(trace, blocks, folder / "demoted")
    summed = summed_store_hits(trace, blocks, folder / "summed")
    ratio = demoted.token_hit / summed.token_hit
    size = {"requests": trace.requests, **blocks._asdict()}
    yield Row(
        what,
        demoted.token_hit,
        "token hit",
        limit=summed.token_hit,
        ratio=ratio,
        goal=GOAL,
        ok=ratio >= GOAL,
        more={
            **size,
            "far_fetched": demoted.by_tier.get("files", 0),
            "limit_is": "one disk of the summed capacity",
        },
    )
    ratio = simulated.demoted / demoted.token_hit
    yield Row(
        f"{what}.simulated",
        simulated.demoted,
        "token hit",
        limit=demoted.token_hit,
        ratio=ratio,
        ok=abs(ratio - 1) <= DIFFERENCE_MAX,
        more={
            "disk_alone": simulated.alone,
            "summed": simulated.summed,
            "limit_is": "the same slice in a node",
        },
    )


def _key(number: int) -> bytes:
    """Return the key of a block; tiers expect keys to be hashes."""
    return hashlib.blake2b(number.to_bytes(4, "little"), digest_size=KEY_BYTES).digest()


def _disk(folder: Path, blocks: int) -> Tier:
    regions = -(-blocks // REGION_RECORDS)
    nbytes = RegionGeometry.of(REGION_BYTES, regions).file_bytes
    config = DiskConfig(path=str(folder), capacity_bytes=nbytes, region_bytes=REGION_BYTES)
    return DiskTier(config)


def _shared_folder(folder: Path, blocks: int) -> Tier:
    options = FilesOptions(
        path=str(folder),
        capacity=Size(blocks * RECORD_BYTES),
        deadline_s=WAIT_S,
        ask_s=WAIT_S,
        write_s=WAIT_S,
        poll_s=POLL_S,
        gather_s=0.0,
    )
    folder.mkdir(parents=True, exist_ok=True)
    return open_files(options, TierContext("bench", "files", 512))
