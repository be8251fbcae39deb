"""The KV pool of one rank as portable blocks, which vLLM and transformers read and write, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from holdfast.blocks.layout import Layout, PortableLayout
from holdfast.buffers import SharedMapping
from holdfast.client.engine import (
    BlockRun,
    ContextKeys,
    GroupPages,
    LookupOptions,
    Pending,
    Ticket,
)
from holdfast.client.store_engine import StoreEngine
from holdfast.devices.base import LockedRanges, Move, Pages
from holdfast.engines.sglang.page_names import PageNames, keys_of
from holdfast.errors import BlockError, Outcome
from holdfast.named_blocks import BlockMemory, PrefixPosition
from holdfast.session import LOOK_S

T = TypeVar("T")

LATE_S = 2.0
"""Time after a deadline at which the answer to a lookup is not waited for any longer."""

LOOK_AGAIN_S = 60.0
"""Interval at which a wait for the end of a load or save is begun again."""

TO_PORTABLE = {
    "layer_first": (0, 2, 1, 3),
    "page_first": (1, 2, 0, 3),
    "page_first_direct": (0, 2, 1, 3),
    "page_head": (2, 0, 1, 3),
}
"""By layout of the host pool: the axes layer, head, token and dim of a page's keys or values."""


class HostPoolPages:
    """SGLang's host pages of keys and values as a device: it converts while it copies.

    See `holdfast.devices.base.DirectDevice`. Copies end before a call returns.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.layout = portable_layout(pool)
        nbytes, count = self.layout.raw_bytes, int(pool.size) // int(pool.page_size)
        self.pages = Pages.uniform((0,), nbytes, nbytes, count, 1)

    @property
    def failure(self) -> str:
        """Always empty: memory of the host does not fail."""
        return ""

    def mark(self) -> Any:
        """Return None: host work is synchronous, so earlier calls have ended."""
        return None

    def scatter(
        self,
        arena: SharedMapping,
        moves: Sequence[Move],
        after: Any = None,
        locks: LockedRanges | None = None,
        proceed: Callable[[], bool] | None = None,
    ) -> CopyEnded:
        """Copy blocks from the arena into pages, converted."""
        for move in moves:
            block = self._block(arena, move)
            for which, page in enumerate(self._page(move.pages[0])):
                page.copy_(block[:, which])
        return CopyEnded()

    def gather(
        self, arena: SharedMapping, moves: Sequence[Move], locks: LockedRanges | None = None
    ) -> CopyEnded:
        """Copy pages into the arena, converted."""
        for move in moves:
            block = self._block(arena, move)
            for which, page in enumerate(self._page(move.pages[0])):
                block[:, which].copy_(page)
        return CopyEnded()

    def close(self) -> None:
        """Do nothing: no copy is in progress."""

    def _block(self, arena: SharedMapping, move: Move) -> Any:
        """Return a block in the arena as a tensor: layer, keys or values, head, token, dim."""
        import torch

        pool, count = self._pool, self.layout.raw_bytes
        flat = torch.frombuffer(arena.view, dtype=torch.uint8, offset=move.payload, count=count)
        shape = (int(pool.layer_num), 2, int(pool.head_num), int(pool.page_size), -1)
        return flat.view(pool.dtype).view(shape)

    def _page(self, number: int) -> list[Any]:
        """Return keys and values of a page: layer, head, token, dim, in the pool's memory."""
        pool, axes = self._pool, TO_PORTABLE[self._pool.layout]
        first, tokens = number * int(pool.page_size), int(pool.page_size)
        if pool.layout == "layer_first":
            found = [part[:, first : first + tokens] for part in (pool.k_buffer, pool.v_buffer)]
        elif pool.layout == "page_first":
            found = [part[first : first + tokens] for part in (pool.k_buffer, pool.v_buffer)]
        else:
            found = [part[number] for part in (pool.k_buffer, pool.v_buffer)]
        return [part.permute(axes) for part in found]


class CopyEnded:
    """A transfer that has ended; see `holdfast.devices.base.Transfer`."""

    def done(self) -> bool:
        return True

    def result(self) -> bool:
        return True


class PortablePool:
    """See `host_pool.HostPool`: the same questions, for pages named by Holdfast's keys."""

    def __init__(self, device: HostPoolPages, engine: StoreEngine, names: PageNames) -> None:
        self._device, self._engine, self._names = device, engine, names
        self._page_tokens = device.layout.block_tokens
        self.fingerprint = engine.groups[0].fingerprint.digest()

    def held(self, keys: Sequence[str]) -> list[bool]:
        """Return whether each page is held with all before it in `keys`, on any tier."""
        chain, pages = self._names.run(keys), 0
        if len(chain):
            found = self._engine.lookup(ContextKeys((chain,)), LookupOptions())
            ticket = found.wait(LOOK_S + LATE_S)
            pages = ticket.held // self._page_tokens if ticket is not None else 0
        return [i < pages for i in range(len(keys))]

    def load(self, keys: Sequence[str], indices: Any, deadline_s: float) -> list[bool]:
        """Copy pages into the pool; return which are there now, whole and verified."""
        run = BlockRun(0, b"".join(keys_of(keys)))
        tokens = len(keys) * self._page_tokens
        ticket = Ticket(tokens, runs=(run,), deadline_s=deadline_s, outcome=Outcome.OK)
        loaded = _end_of(self._engine.load(ticket, [self._pages(indices)]))
        pages = loaded.tokens // self._page_tokens
        return [i < pages for i in range(len(keys))]

    def save(self, keys: Sequence[str], indices: Any, after: PrefixPosition) -> list[bool]:
        """Copy pages into the node's memory; return which are held now."""
        chain = self._names.context(keys)
        blocks = range(len(chain) - len(keys), len(chain))
        given = [self._pages(indices)]
        saved = _end_of(self._engine.save(ContextKeys((chain,)), [blocks], given))
        return [saved.outcome is Outcome.OK] * len(keys)

    def load_into(
        self, keys: Sequence[str], memory: Sequence[BlockMemory], deadline_s: float
    ) -> list[bool]:
        """Raise BlockError: pages are converted in the pool only."""
        raise BlockError('portable pages need "interface_v1": 1')

    def save_from(self, keys: Sequence[str], memory: Sequence[BlockMemory]) -> list[bool]:
        """Raise BlockError, as `load_into`."""
        raise BlockError('portable pages need "interface_v1": 1')

    def close(self) -> None:
        """End the connection to the node."""
        self._engine.close()

    def _pages(self, indices: Any) -> GroupPages:
        firsts = indices[:: self._page_tokens].tolist()
        return GroupPages(self._device, [first // self._page_tokens for first in firsts])


def _end_of(pending: Pending[T]) -> T:
    """Wait until a load or save has ended, which its own deadlines bound; return its result.

    Until then it writes or reads pages that SGLang uses for something else after the call.
    """
    while (result := pending.wait(LOOK_AGAIN_S)) is None:
        pass
    return result


def portable_layout(pool: Any) -> PortableLayout:
    """Return the layout of the portable blocks of a pool of keys and values.

    Raises BlockError for a pool of another kind.
    """
    equal = getattr(pool, "v_head_dim", pool.head_dim) == pool.head_dim
    if pool.layout not in TO_PORTABLE or not hasattr(pool, "v_buffer") or not equal:
        raise BlockError(
            f"pages of {type(pool).__name__} in the layout {pool.layout} are not portable; omit "
            "layout"
        )
    return Layout.portable(
        layers=int(pool.layer_num),
        kv_heads=int(pool.head_num),
        head_size=int(pool.head_dim),
        dtype=str(pool.dtype).removeprefix("torch."),
        block_tokens=int(pool.page_size),
    )
