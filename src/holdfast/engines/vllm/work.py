"""Messages between the scheduler side and the worker side of the connector, pickled each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from holdfast.client.tasks import LoadTask, SaveTask


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
    landed: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    passive: bool = False

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Return a report with each flag set that is set for any worker, and the fewest blocks."""
        landed = {**self.landed, **other.landed}
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
