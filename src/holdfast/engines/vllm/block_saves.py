"""Which blocks a step of vLLM saves: those that it fills, or those whose pages vLLM takes next."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from holdfast.client.counts import ClientCounts
from holdfast.client.prompt_ledger import CountedPrompt
from holdfast.client.request_hints import DURABLE
from holdfast.client.save_choice import SaveChoice
from holdfast.client.tasks import SaveTask
from holdfast.client.tracked_request import TrackedRequest
from holdfast.engines.vllm.deferred_saves import DeferredSaves
from holdfast.engines.vllm.group_tasks import SAVE_BLOCKS, GroupTasks
from holdfast.engines.vllm.options import SaveTime

_log = logging.getLogger("vllm.holdfast")


class BlockSaves:
    """The saves of a scheduler side.

    A block is saved in the step that fills it (`when_full`), or when vLLM is about to use its pages
    again (`before_eviction`), for which `watch_pages` must have been called; `auto` chooses from
    the prompts that `counted` gets. Recurrent states, which vLLM offers once, and durable blocks
    are saved at once.
    """

    def __init__(self, tasks: GroupTasks, save: SaveTime = "when_full") -> None:
        self._tasks = tasks
        self._save = save
        self._choice = SaveChoice()
        self._deferred: DeferredSaves | None = None

    def watch_pages(self, pool: Any, step_tokens: int, context_tokens: int) -> None:
        """Make it possible to defer saves; call it unless `save` is `when_full`.

        `pool`: vLLM's pages. `step_tokens`: most tokens that a step computes; `context_tokens`:
        most that a load brings.
        """
        watched = sum(
            len(shape.tables) * -(-tokens // shape.page_tokens)
            for shape in self._tasks.shapes
            for tokens in (step_tokens, context_tokens)
        )
        self._deferred = DeferredSaves(pool, watched, SAVE_BLOCKS)

    def counted(self, prompt: CountedPrompt) -> None:
        """Note where a prompt's tokens came from; with `auto`, choose when to save."""
        before = self._choice.defers
        self._choice.counted(prompt)
        if self._save == "auto" and self._deferred is not None and self._choice.defers != before:
            _log.info(
                "blocks are saved %s from now on: %.0f %% of the tokens that prompts reuse come "
                "from the store, the others from vLLM's own cache",
                "before vLLM uses their pages" if self._choice.defers else "when they are full",
                100 * self._choice.store_share,
            )

    def of_step(self, output: Any, tracked: Mapping[str, TrackedRequest]) -> list[SaveTask]:
        """Return the saves of a step. `output`: vLLM's; `tracked`: the requests to save."""
        saves: list[SaveTask] = []
        defers = self._save == "before_eviction" or self._choice.defers
        deferred = self._deferred if defers else None
        most = SAVE_BLOCKS if deferred is None else 1
        state = output.kv_connector_block_state
        if getattr(output, "has_sync_kv_loads", False):
            _leave_out_loads_of_others(output, tracked)
        for request_id, scheduled in output.num_scheduled_tokens.items():
            if request_id in tracked and tracked[request_id].may_save:
                lists = partial(state.get_block_ids, request_id)
                saves += self._tasks.saves(tracked[request_id], scheduled, lists, most)
        if deferred is not None:
            saves = [s for s in saves if s.retention == DURABLE or not deferred.put(s)]
        if self._deferred is not None:
            saves += self._deferred.due()
        offered = getattr(state, "boundary_state_offloads", None) or {}
        for request_id, states in offered.items():
            if request_id in tracked and tracked[request_id].may_save:
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


def _leave_out_loads_of_others(output: Any, tracked: Mapping[str, TrackedRequest]) -> None:
    """Save nothing of requests for which another connector may load pages during this step.

    Behind MultiConnector, such a connector reports pages that it could not load after the step,
    when they, and what was computed from them, would have been saved.
    """
    begun = {new.req_id for new in output.scheduled_new_reqs}
    for request_id in begun | set(output.scheduled_cached_reqs.resumed_req_ids):
        found = tracked.get(request_id)
        if found is not None and found.request.num_computed_tokens:
            found.stop_saving()
