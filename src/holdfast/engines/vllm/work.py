"""Messages between the scheduler side and the worker side of the connector, pickled each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


class LoadTask(NamedTuple):
    """Blocks to load into the pages of a waiting request.

    `keys`: 16 bytes a block, one string per tensor-parallel rank. `pages`: in the order of tokens;
    the first one is page `first` of the first block, and the last block may be partial. `plan`:
    number of the node's plan; a load that exceeds its `deadline_s` is computed instead.
    """

    request: str
    keys: tuple[bytes, ...]
    pages: list[int]
    first: int
    tokens: int
    plan: int = 0
    deadline_s: float = 0.0


class SaveTask(NamedTuple):
    """Blocks that are full at the end of this step; tuples have an entry per tensor-parallel rank.

    `depth`: index of the first block in its chain, whose parent is in `parents` and whose segment
    is in `segments`. `retention`: name of a retention class.
    """

    request: str
    keys: tuple[bytes, ...]
    parents: tuple[bytes, ...]
    segments: tuple[bytes, ...]
    depth: int
    pages: list[int]
    retention: str = "session"


@dataclass
class StepWork(KVConnectorMetadata):
    """One step: loads to start, saves to make, and how many tokens the model computes."""

    loads: list[LoadTask] = field(default_factory=list)
    saves: list[SaveTask] = field(default_factory=list)
    tokens: int = 0


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """A worker's report at the end of a step; vLLM aggregates the reports of all workers.

    `computed`: the step had a forward. `moving`: blocks are still being copied to the arena.
    `landed`: verified blocks of the loads that ended, by request and tier. `passive`: the device of
    a worker has failed, so it loads and saves nothing any more.
    """

    computed: bool = False
    moving: bool = False
    landed: dict[str, dict[str, int]] = field(default_factory=dict)
    passive: bool = False

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Return a report with each flag set that is set for any worker, and the fewest blocks."""
        landed = self.landed | other.landed
        for request in self.landed.keys() & other.landed.keys():
            both = self.landed[request], other.landed[request]
            landed[request] = min(both, key=lambda blocks: sum(blocks.values()))
        computed, moving = self.computed or other.computed, self.moving or other.moving
        return WorkerReport(computed, moving, landed, self.passive or other.passive)


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """A worker's namespace and block sizes, for the scheduler side.

    `refusal`: why this worker does not use the store; empty if it does.
    """

    fingerprint: bytes = b""
    raw_bytes: int = 0
    block_tokens: int = 0
    page_tokens: int = 0
    element_bytes: int = 1
    refusal: str = ""
