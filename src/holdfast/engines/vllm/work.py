"""What the two sides tell each other in one step; pickled from process to process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


class Load(NamedTuple):
    """Blocks to bring into the pages of a waiting request.

    `keys`: 16 bytes a block, one string per tensor-parallel rank. `pages`: in the order of tokens;
    the first one is page `first` of the first block, and the last block may not be filled up.
    `plan`: number of the node's plan; what takes longer than its `deadline_s` is computed instead.
    """

    request: str
    keys: tuple[bytes, ...]
    pages: list[int]
    first: int
    tokens: int
    plan: int = 0
    deadline_s: float = 0.0


class Save(NamedTuple):
    """Blocks that are full at the end of this step; tuples have an entry per tensor-parallel rank.

    `depth` is the index of the first one in its chain, behind `parents`, in `segments`;
    `retention` says for how long they are worth keeping.
    """

    request: str
    keys: tuple[bytes, ...]
    parents: tuple[bytes, ...]
    segments: tuple[bytes, ...]
    depth: int
    pages: list[int]
    retention: str = "session"


@dataclass
class Work(KVConnectorMetadata):
    """One step: loads to start, saves to make, and how many tokens the model computes."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    tokens: int = 0


@dataclass
class Said(KVConnectorWorkerMetadata):
    """What a worker says at the end of a step, and vLLM sums up over the workers.

    `computed`: the step had a forward. `moving`: saved blocks are on their way to the arena still.
    """

    computed: bool = False
    moving: bool = False

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Said:
        """Return what is so for any of the workers."""
        return Said(self.computed or other.computed, self.moving or other.moving)


@dataclass
class Described(KVConnectorHandshakeMetadata):
    """What a worker found out about itself, for the scheduler side.

    `refusal` says why this worker serves nothing; empty if it does.
    """

    fingerprint: bytes = b""
    payload_bytes: int = 0
    block_tokens: int = 0
    page_tokens: int = 0
    refusal: str = ""
