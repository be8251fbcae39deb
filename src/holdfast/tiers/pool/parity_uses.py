"""Uses of parity records: they are not read as long as their blocks are there.

A target evicts what was not used for long. So that a context that is read again and again keeps its
protection, the members are told now and then which parity records belong to blocks that were read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from holdfast.blocks.namespace import Namespace
from holdfast.clock import Clock
from holdfast.errors import Outcome
from holdfast.limits import CHAIN_BLOCKS_MAX
from holdfast.membership.members import Member
from holdfast.tiers.base import TierGet
from holdfast.tiers.pool.chain_links import ChainLinks
from holdfast.tiers.pool.lookup import SegmentLookup
from holdfast.tiers.pool.parity import parity_key, parity_namespace
from holdfast.tiers.pool.pool_calls import PoolCalls
from holdfast.tiers.pool.segment_batch import SegmentBatch, segment_of

EVERY_S = 600.0
"""A block's row is told about at most once in this time."""

NOTED_MAX = 1 << 16
"""Most blocks of which it is known that they were told about, or are to be; more are left out until
these are forgotten."""


class ParityUses:
    """Blocks that were read, until their rows are told about. Thread-safe."""

    def __init__(
        self,
        clock: Clock,
        lookup: SegmentLookup,
        links: ChainLinks,
        calls: PoolCalls,
        every_s: float = EVERY_S,
    ) -> None:
        self._clock = clock
        self._lookup = lookup
        self._links = links
        self._calls = calls
        self._every_s = every_s
        self._lock = threading.Lock()
        self._noted: dict[tuple[Namespace, bytes], float] = {}
        """When a block was noted last, the oldest first."""
        self._due: list[tuple[Namespace, bytes, bytes]] = []
        """Namespace, segment and key of blocks whose rows are to be told about."""

    def note(self, batch: Sequence[TierGet], outcomes: Sequence[Outcome]) -> None:
        """Note the blocks of a batch that were read."""
        now_s = self._clock.now()
        with self._lock:
            while self._noted and next(iter(self._noted.values())) + self._every_s <= now_s:
                del self._noted[next(iter(self._noted))]
            for get, outcome in zip(batch, outcomes, strict=True):
                name = get.namespace, get.key
                if outcome is not Outcome.OK or name in self._noted:
                    continue
                if len(self._noted) >= NOTED_MAX:
                    break
                self._noted[name] = now_s
                self._due.append((get.namespace, segment_of(get.place), get.key))

    def tell(self, within_s: float) -> None:
        """Tell the members about the rows that begin with the noted blocks.

        No message names more than `CHAIN_BLOCKS_MAX` rows: a member refuses a longer one.
        """
        with self._lock:
            due, self._due = self._due, []
        of_member: dict[tuple[Member, Namespace], list[bytes]] = {}
        for namespace, segment, key in due:
            block = self._links.block(key)
            if block is not None:
                for member in self._lookup.route(segment, block=block - 1).write:
                    name = member, parity_namespace(namespace)
                    keys = [parity_key(key, n) for n in range(1, self._lookup.stripe)]
                    of_member.setdefault(name, []).extend(keys)
        until = time.monotonic() + within_s

        def use(one: tuple[tuple[Member, Namespace], list[bytes]]) -> None:
            (member, namespace), keys = one
            part = SegmentBatch(b"", [], until)
            for first in range(0, len(keys), CHAIN_BLOCKS_MAX):
                if part.left_s:
                    self._calls.use(member, part, namespace, keys[first : first + CHAIN_BLOCKS_MAX])

        self._calls.each(list(of_member.items()), use)
