"""Messages between the scheduler side and the worker side of the connector, pickled each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from holdfast.blocks.fingerprint import Attention
from holdfast.blocks.group_rules import GroupRule
from holdfast.client.tasks import LoadTask, SaveTask
from holdfast.engines.vllm.group_pages import GroupShape


@dataclass
class StepWork(KVConnectorMetadata):
    """One step: loads to start, saves to make, and how many tokens the model computes.

    `updates`: updates of the workers' weights that the scheduler side knows of. A worker that knows
    of another number carries out no load or save of this step: their names are of other weights.
    """

    loads: list[LoadTask] = field(default_factory=list)
    saves: list[SaveTask] = field(default_factory=list)
    tokens: int = 0
    updates: int = 0


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """A worker's report at the end of a step; vLLM aggregates the reports of all workers.

    `computed`: the step had a forward. `moving`: blocks are still being copied to the arena.
    `landed`: verified blocks of the loads that ended, by request and tier. `passive`: the device of
    a worker has failed, so it loads and saves nothing any more. `updates`: how often the worker's
    weights were updated.
    """

    computed: bool = False
    moving: bool = False
    landed: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    passive: bool = False
    updates: int = 0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Return a report with each flag set that is set for any worker, and the fewest blocks.

        Of the updates, the most count.
        """
        landed = {**self.landed, **other.landed}
        for request in self.landed.keys() & other.landed.keys():
            both = self.landed[request], other.landed[request]
            landed[request] = min(both, key=lambda blocks: sum(blocks.values()))
        computed, moving = self.computed or other.computed, self.moving or other.moving
        passive, updates = self.passive or other.passive, max(self.updates, other.updates)
        return WorkerReport(computed, moving, landed, passive, updates)


class GroupHandshake(NamedTuple):
    """A KV group of a worker: its namespace, its blocks, and vLLM's lists with their pages.

    `window`: tokens of a window or chunk that a resume needs; 0 for the other kinds. `lookahead`:
    tokens after a block that its content depends on, too.
    """

    fingerprint: bytes
    raw_bytes: int
    block_tokens: int
    page_tokens: int
    element_bytes: int = 1
    attention: Attention = "full"
    window: int = 0
    tables: tuple[int, ...] = (0,)
    lookahead: int = 0

    @property
    def shape(self) -> GroupShape:
        """What a resume needs of the group, and where its pages are listed."""
        size = self.block_tokens
        rule = GroupRule(self.attention, self.window, size, size)
        return GroupShape(rule, self.page_tokens, self.tables, self.lookahead)


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """A worker's KV groups, for the scheduler side.

    `refusal`: why this worker does not use the store; empty if it does.
    """

    groups: tuple[GroupHandshake, ...] = ()
    refusal: str = ""
