"""The blocks of one prompt between a cache of transformers and a store: loaded, and saved behind.

Blocks pass through rows of memory on the host, one row for each block of a KV group. A store that
fails or does not answer is a reason to compute, and never an error.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch  # noqa: TC002  # as TC001
import transformers

from holdfast.client.engine import GroupPages, LookupOptions
from holdfast.client.engine_opening import open_engine
from holdfast.client.session import NodeStore
from holdfast.client.store_engine import ANSWER_S, PendingContextSave, StoreEngine
from holdfast.devices.base import Pages
from holdfast.devices.host import HostDevice
from holdfast.engines.transformers.known_model import KnownModel
from holdfast.errors import HoldfastError, Outcome
from holdfast.session import RECOVERING, nothing_held
from holdfast.store.store import Store

LATE_S = 2.0
"""Time after its deadline at which a store without an answer counts as gone."""

_log = logging.getLogger("holdfast.transformers")


class PromptBlocks:
    """The whole blocks of a prompt; close it to have all saves ended.

    `saved`: blocks that are new in the store, known after `close`. `sources`: blocks fetched from
    each tier. `reason`: why no more was fetched or saved.
    """

    def __init__(self, store: Store | NodeStore, known: KnownModel, tokens: Sequence[int]) -> None:
        self.saved, self.sources, self.reason = 0, Counter[str](), ""
        self._known, self._prompt_tokens = known, len(tokens)
        self._saves: list[PendingContextSave] = []
        self._client: StoreEngine | None = None
        count = len(tokens) // known.block_tokens
        sizes = [each.layout.raw_bytes for each in known.layers]
        self._rows = [np.empty((count, size), np.uint8) for size in sizes]
        self._devices: list[HostDevice] = []
        if not count:
            return
        try:
            peer = f"transformers {transformers.__version__}"
            self._client = open_engine(store, known.groups, peer=peer)
            self._context = self._client.context(tokens)
        except HoldfastError as error:
            self._go_without(str(error))
        for rows, size in zip(self._rows, sizes, strict=True):
            pages = Pages.uniform((rows.ctypes.data,), size, size, count, pages_per_block=1)
            self._devices.append(HostDevice(pages, keep=rows))

    def fetch(self, cache: Any, device: torch.device) -> int:
        """Load what the store holds into an empty dynamic cache; return the tokens it then has."""
        if self._client is None:
            return 0
        options = LookupOptions(tokens=self._prompt_tokens)
        ticket = self._client.lookup(self._context, options).wait(options.deadline_s + LATE_S)
        if ticket is None:
            return self._go_without("the store did not answer a lookup in time")
        self.reason = ticket.reason
        if not ticket.held and ticket.outcome is Outcome.MISS:
            self.reason = nothing_held(recovering=RECOVERING in ticket.reason)
        if ticket.is_empty:
            return 0
        pages = [
            GroupPages(each, list(run.blocks))
            for each, run in zip(self._devices, ticket.runs, strict=True)
        ]
        loaded = self._client.load(ticket, pages).wait(ticket.deadline_s + LATE_S)
        if loaded is None:
            return self._go_without("the store did not load the blocks in time")
        tokens, size = loaded.tokens, self._known.block_tokens
        tokens = tokens // size * size
        self.sources.update(loaded.sources)
        self.reason = loaded.reason
        groups = zip(self._known.layers, self._known.groups, self._rows, strict=True)
        for layers, group, rows in groups if tokens else ():
            blocks = group.rule.needed(tokens)
            layers.restore(cache, rows[blocks.start : blocks.stop], tokens, device)
        return tokens

    def save(self, cache: Any, first: int, stop: int) -> None:
        """Save blocks `first` to `stop`, which a forward pass has just made, without waiting."""
        if self._client is None or first >= stop:
            return
        spare = int(cache.get_seq_length()) - stop * self._known.block_tokens
        saved, pages = [], []
        for layers, rows, device in zip(self._known.layers, self._rows, self._devices, strict=True):
            blocks = layers.new_blocks(first, stop)
            layers.read(cache, rows[blocks.start : blocks.stop], spare)
            saved.append(blocks)
            pages.append(GroupPages(device, list(blocks)))
        self._saves.append(self._client.save(self._context, saved, pages))

    def close(self) -> None:
        """Wait for the saves, and end the session."""
        for saving in self._saves:
            found = saving.wait(ANSWER_S)
            if found is None:
                self._go_without("the store did not save the blocks in time")
                break
            self.saved += found.blocks
            if found.outcome is not Outcome.OK:
                self._go_without(found.reason)
        if self._client is not None:
            self._client.close()
        for device in self._devices:
            device.close()

    def _go_without(self, reason: str) -> int:
        """Note why the model computes, or blocks are not saved; return no tokens."""
        self.reason = reason
        _log.warning("the prompt is computed, or not saved: %s", reason)
        if self._client is not None:
            self._client.close()  # a late load must not change rows that are used again
            self._client = None
        return 0
