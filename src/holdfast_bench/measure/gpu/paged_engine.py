"""An engine's side of a session with a node: blocks from pages to the node, and back."""

from __future__ import annotations

import time
from collections.abc import Sequence

from holdfast.blocks.envelope import HEADER_BYTES
from holdfast.blocks.key import Chain
from holdfast.buffers import SharedMapping
from holdfast.devices.base import Move, StagingDevice
from holdfast.errors import HoldfastError
from holdfast.wire.local import messages as m
from holdfast.wire.local.client import Client
from holdfast.wire.local.locked_memory import LockedMemory
from holdfast_bench.harness.node import call
from holdfast_bench.measure.gpu.accelerator import HostAccelerator, Tensor
from holdfast_bench.measure.gpu.block_copies import check_copied, save
from holdfast_bench.measure.gpu.shapes import BLOCK_TOKENS, PageShape

FINGERPRINT = b"holdfast-gpu-bench"[:16]
SAVE_BLOCKS = 64
ANSWER_S = 60.0
_POLL_S = 0.01


class PagedEngine:
    """A session with a node for the pages of one context, which are in order.

    `tensors` are the engine's pages; block b of the context has the pages from b * pages_per_block.
    """

    def __init__(
        self,
        address: str,
        gpu: HostAccelerator,
        shape: PageShape,
        tensors: list[Tensor],
        domain: str = "default",
    ) -> None:
        sizes = shape.block_bytes, BLOCK_TOKENS
        hello = m.Hello(m.PROTOCOL, "gpu bench", FINGERPRINT, *sizes, domain)
        self.client = Client(address, hello, ANSWER_S)
        if self.client.arena is None:
            raise HoldfastError("the node opened no arena for the session")
        self.arena: SharedMapping = self.client.arena
        self.tensors = tensors
        self.device = gpu.device(shape.pages(tensors), tensors)
        self._locks: LockedMemory | None = None
        if isinstance(self.device, StagingDevice):
            self._locks = LockedMemory(self.client, self.device.registrar)
            self._locks.lock_at_start()
            self._locks.start()
        self._per_block = shape.pages_per_block

    def chain(self, tokens: Sequence[int]) -> Chain:
        """Return the keys of a context's blocks."""
        chain = Chain(self.client.welcome.domain_key, FINGERPRINT, BLOCK_TOKENS)
        chain.extend(tokens)
        return chain

    def save(self, chain: Chain, start: int = 0) -> int:
        """Save the blocks from `start` on; return how many are new."""
        new = 0
        for at in range(start, len(chain), SAVE_BLOCKS):
            keys = b"".join(chain.keys[at : at + SAVE_BLOCKS])
            request = m.Reserve(keys, chain.parent(at), at)
            reserved = call(self.client, request, m.Reserved)
            moves = [
                self._move(place, at + number)
                for number, place in enumerate(reserved.places)
                if place >= 0
            ]
            if moves:
                save(self.device, self.arena, moves, self._locks)
            new += call(self.client, m.Commit(reserved.ticket), m.Committed).blocks
        return new

    def fetch(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Fetch the leading blocks of a context into their pages; return blocks by tier.

        Raises HoldfastError if one is missing.
        """
        fetched = self.fetch_held(keys)
        if len(fetched.places) != len(keys):
            raise HoldfastError(
                f"{len(fetched.places)} of {len(keys)} blocks fetched: {fetched.reason}"
            )
        return dict(fetched.sources)

    def fetch_held(self, keys: Sequence[bytes]) -> m.Fetched:
        """Fetch the leading blocks that are held into their pages.

        Raises HoldfastError if the lease was not valid after the copy.
        """
        after = self.device.mark()
        fetched = call(self.client, m.Fetch(b"".join(keys), ANSWER_S), m.Fetched)
        moves = [self._move(place, number) for number, place in enumerate(fetched.places)]
        check_copied(copied=self.device.scatter(self.arena, moves, after, self._locks).result())
        lease = fetched.lease  # none if no block is held any more
        if lease and not call(self.client, m.Release(lease), m.Released).valid:
            raise HoldfastError("the lease ended before the copy did")
        return fetched

    def await_locks(self, nbytes: int, within_s: float) -> int:
        """Return how much of the arena is locked, when it is `nbytes` or no more gets locked.

        What a save met unlocked is locked soon after it.
        """
        if self._locks is None:
            return 0
        until_s = time.monotonic() + within_s
        while self._locks.locked_bytes < nbytes and time.monotonic() < until_s:
            if self._locks.failure:
                break
            time.sleep(_POLL_S)
        return self._locks.locked_bytes

    def close(self) -> None:
        """End the locks, the device and the session."""
        if self._locks is not None:
            self._locks.close()
        self.device.close()
        self.client.close()

    def _move(self, place: int, block: int) -> Move:
        first = block * self._per_block
        return Move(place + HEADER_BYTES, range(first, first + self._per_block))
