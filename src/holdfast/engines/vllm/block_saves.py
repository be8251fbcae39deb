"""Which blocks a step of vLLM saves: those that it fills, or those whose pages vLLM takes next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from holdfast.client.counts import ClientCounts
from holdfast.client.request_hints import DURABLE
from holdfast.client.tasks import SaveTask
from holdfast.client.tracked_request import TrackedRequest
from holdfast.engines.vllm.deferred_saves import DeferredSaves
from holdfast.engines.vllm.group_tasks import SAVE_BLOCKS, GroupTasks


class BlockSaves:
    """The saves of a scheduler side.

    A block is saved in the step that fills it. After `watch_pages`, it is saved when vLLM is about
    to use its pages again; recurrent states, which vLLM offers once, and durable blocks are still
    saved at once.
    """

    def __init__(self, tasks: GroupTasks) -> None:
        self._tasks = tasks
        self._deferred: DeferredSaves | None = None

    def watch_pages(self, pool: Any, step_tokens: int, context_tokens: int) -> None:
        """Defer saves from now on. `pool`: vLLM's pages.

        `step_tokens`: most tokens that a step computes; `context_tokens`: most that a load brings.
        """
        watched = sum(
            len(shape.tables) * -(-tokens // shape.page_tokens)
            for shape in self._tasks.shapes
            for tokens in (step_tokens, context_tokens)
        )
        self._deferred = DeferredSaves(pool, watched, SAVE_BLOCKS)

    def of_step(self, output: Any, tracked: Mapping[str, TrackedRequest]) -> list[SaveTask]:
        """Return the saves of a step. `output`: vLLM's; `tracked`: the requests to save."""
        saves: list[SaveTask] = []
        most = SAVE_BLOCKS if self._deferred is None else 1
        state = output.kv_connector_block_state
        for request_id, scheduled in output.num_scheduled_tokens.items():
            if request_id in tracked:
                lists = partial(state.get_block_ids, request_id)
                saves += self._tasks.saves(tracked[request_id], scheduled, lists, most)
        if self._deferred is not None:
            saves = self._due(self._deferred, saves)
        offered = getattr(state, "boundary_state_offloads", None) or {}
        for request_id, states in offered.items():
            if request_id in tracked:
                saves += self._tasks.state_saves(tracked[request_id], states)
        return saves

    def count_lost(self, counts: ClientCounts) -> None:
        """Count deferred blocks that were not saved in time since the last call."""
        if self._deferred is not None and self._deferred.lost:
            counts.add("lost_blocks", number=self._deferred.lost)
            self._deferred.lost = 0

    def clear(self) -> None:
        """Forget deferred blocks: they are not to be saved any more."""
        if self._deferred is not None:
            self._deferred.clear()

    def _due(self, deferred: DeferredSaves, full: Iterable[SaveTask]) -> list[SaveTask]:
        """Return what of the full blocks is saved now, and the deferred ones that must be."""
        now = [save for save in full if save.retention == DURABLE or not deferred.put(save)]
        return now + deferred.due()
