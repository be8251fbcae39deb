"""The scheduler side: look up the coverage of requests, and plan their loads and saves.

All methods run on vLLM's scheduler loop, where a wait delays every request. So the coverage of a
request is requested on its arrival, and the answer is read when vLLM schedules the request. If it
has not arrived, the step waits for a small share of a step's time; see `client.answer_wait`. The
context of a request that vLLM does not schedule in its first step is prestaged.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from holdfast.blocks.key import Chain
from holdfast.client.counts import REFUSED, ClientCounts
from holdfast.client.durable_requests import DurableRequests
from holdfast.client.engine_queue import EngineQueue, queue_ahead, queues_ahead
from holdfast.client.prompt_ledger import PromptLedger, by_tier
from holdfast.client.queued_requests import QueuedRequests
from holdfast.client.request_hints import DURABLE, NO_HINT, at_end
from holdfast.client.request_lookups import LookupLimits, RequestLookups
from holdfast.client.shared_loads import SharedLoads
from holdfast.client.step_timer import PrefillChunk, StepTimer
from holdfast.client.tasks import LoadTask
from holdfast.client.timeouts import EngineClocks
from holdfast.client.timing_reporter import TimingReporter
from holdfast.client.tracked_request import PendingLoad, TrackedRequest
from holdfast.engines.vllm.block_saves import BlockSaves
from holdfast.engines.vllm.group_pages import PageLists
from holdfast.engines.vllm.group_tasks import GroupTasks
from holdfast.engines.vllm.options import ConnectorSettings
from holdfast.engines.vllm.request_identity import (
    NO_IDENTITY,
    AdapterDigests,
    MediaDigests,
    UnnamedInputError,
    extras_of,
    identity_of,
    why_declined,
    why_not_read,
)
from holdfast.engines.vllm.transfer_params import hint_of, is_asked, transfer_params
from holdfast.engines.vllm.work import Handshake, StepWork
from holdfast.errors import NodeGoneError, NotFollowed, Outcome
from holdfast.wire.local.client import Client
from holdfast.wire.local.messages import Prestage
from holdfast.wire.local.reconnecting_client import ReconnectingClient

_MEMORY = "host"
"""The node's tier whose blocks need no prestage."""

_log = logging.getLogger("vllm.holdfast")


class SchedulerSide:
    """Tracks every request.

    `connections` and `handshakes` have one entry per tensor-parallel rank.
    """

    def __init__(
        self,
        connections: Sequence[ReconnectingClient],
        handshakes: Sequence[Handshake],
        setting: ConnectorSettings,
        reporter: TimingReporter,
        clocks: EngineClocks | None = None,
        ledger: PromptLedger | None = None,
    ) -> None:
        """`ledger`: shared with the engine's other connectors; default: one of its own."""
        clocks = clocks or EngineClocks()
        self.counts = ClientCounts()
        self._ledger = ledger or PromptLedger()
        self._member = self._ledger.join()
        self._connections = connections
        self._groups = [handshake.groups for handshake in handshakes]
        self._tasks = GroupTasks([group.shape for group in handshakes[0].groups])
        self._saves = BlockSaves(self._tasks, setting.save)
        self._shapes, self._unit = self._tasks.shapes, self._tasks.unit_tokens
        self._setting = setting
        self._adapters = AdapterDigests(setting.adapter_settings)
        self._media = MediaDigests()
        self._reporter = reporter
        self._queued = QueuedRequests()
        self._durable = DurableRequests()
        self._computing: set[str] = set()
        self._timer = StepTimer(clocks.now)
        limits = LookupLimits(setting.fetch_deadline_s, setting.cover_deadline_s)
        whole = not self._tasks.is_plain
        self._lookups = RequestLookups(limits, self.counts, clocks, self._timer, whole=whole)
        self._shared_loads = SharedLoads(setting.fetch_deadline_s, self.counts, whole=whole)
        self._now = clocks.now
        self._live: dict[str, Any] = {}
        self._tracked: dict[str, TrackedRequest] = {}
        self._loads: list[LoadTask] = []
        self._loading_tokens: dict[str, int] = {}
        self._epoch = b""
        self._updates = 0
        """Updates of the workers' weights after which the names of blocks were changed."""
        self._has_pages = self._has_stale_pages = False
        """Whether vLLM's own cache may have pages, and whether they may be of earlier weights."""
        self._moving = False

    def watch_pages(self, pool: Any, context_tokens: int) -> None:
        """Make it possible to save blocks before vLLM uses their pages again; see `BlockSaves`."""
        self._saves.watch_pages(pool, self._setting.step_tokens_max, context_tokens)

    def on_new_request(self, request: Any) -> None:
        """Start to track a request, and ask the node which of its blocks are held."""
        request_id = request.request_id
        self._live[request_id] = request
        is_first = self._ledger.arrived(request_id)
        hint, is_valid = hint_of(request)
        if is_first and not is_valid:
            self.counts.add("bad_hints")
        declined = "bypass" if hint.bypass else why_declined(request)
        identity = NO_IDENTITY
        try:
            # Of every request: vLLM's own cache keeps pages of those declined, too.
            identity = identity_of(request, self._epoch, self._adapters, self._media)
        except UnnamedInputError as error:
            declined = declined or error.reason
        reason = declined or why_not_read(request)
        if is_first and reason:
            self.counts.add("declined_requests", reason)
        if declined:
            return
        clients = self._clients()
        if not reason:
            tokens, connected = request.num_tokens, clients is not None
            self._ledger.opened(self._member, request_id, tokens, connected=connected)
        if clients is None:
            if not reason:
                self.counts.add("calls", "lookup", self._why_no_client())
            return
        chains, *more = [
            [
                Chain(
                    client.welcome.domain_key,
                    groups[number].fingerprint,
                    shape.rule.block_tokens,
                    extras_of(identity, shape.rule.block_tokens, lookahead=shape.lookahead),
                    client.welcome.segment_blocks,
                    shape.lookahead,
                )
                for client, groups in zip(clients, self._groups, strict=True)
            ]
            for number, shape in enumerate(self._shapes)
        ]
        size = self._shapes[0].rule.block_tokens
        common = [
            Chain(
                client.welcome.common_key,
                groups[0].fingerprint,
                size,
                extras_of(identity, size, salted=False),
            )
            for client, groups in zip(clients, self._groups, strict=True)
            if client.welcome.common_key and self._tasks.is_plain
        ]
        tracked = TrackedRequest(request, chains, common, hint, more)
        self._tracked[request_id] = tracked
        self._ask(tracked, clients)
        if tracked.question is not None and self._setting.prestages:
            self._queued.arrived(request_id)

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens after the local ones can be loaded; None: not known yet."""
        self._ledger.restarted(request.request_id)
        tracked = self._tracked.get(request.request_id)
        if tracked is None or request.skip_reading_prefix_cache:
            return 0, False
        if local_tokens and (self._has_stale_pages or not self._setting.trusts_pages):
            tracked.stop_saving()
        if request.num_preemptions != tracked.restarts:
            # The request restarts; its own blocks may have been saved since.
            self._lookups.end_plan(tracked, NotFollowed.PREEMPTED)
            tracked.restart(request.num_preemptions)
            self._ask(tracked, self._clients())
        if not self._is_answered(tracked):
            return None, False
        if tracked.load_failed:  # the plan is not ended, because the load's time was spent on it
            tracked.local_tokens = local_tokens
            return 0, False
        # Ask again if the engine's own cache has blocks that the node's plan did not assume, if
        # blocks that were too slow to fetch may be in the node's memory now, or, once, if the
        # engine's queue has changed.
        size = self._unit
        known = local_tokens // size == tracked.planned_local_tokens // size
        is_slow = tracked.planned_blocks < tracked.covered
        faster = is_slow and self._queued.take_announced(request.request_id)
        known = known or bool(tracked.planned_local_tokens)
        renews = faster or not known or not self._queue_is_same(tracked)
        if renews and tracked.covered * size > local_tokens:
            self._ask(tracked, self._clients(), local_tokens)
            tracked.planned_queue = None  # a queue moves all the time
            if not self._is_answered(tracked):
                return None, False
        # At least one token is computed, because sampling needs its output.
        full = (request.num_tokens - 1) // self._tasks.step_tokens * self._tasks.step_tokens
        wanted = range(local_tokens, min(tracked.planned_blocks * size, full))
        shares, now_s = bool(wanted) and self._setting.shares_loads, self._now()
        if shares and self._shared_loads.must_wait(tracked, wanted, now_s):
            return None, False
        tracked.local_tokens, tracked.decided_at = local_tokens, now_s
        return len(wanted), bool(wanted)

    def allocated(self, request: Any, lists: PageLists, external_tokens: int) -> None:
        """Plan the load of `external_tokens`; `lists` have all pages of the request."""
        self._queued.left(request.request_id)
        self._shared_loads.left(request.request_id)
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not external_tokens:
            return
        start = tracked.local_tokens
        groups = self._tasks.loads(tracked, lists, start, start + external_tokens)
        tracked.loading = PendingLoad(start, groups[0].pages)
        self._shared_loads.begun(tracked, range(start, start + external_tokens))
        self._loading_tokens[request.request_id] = external_tokens
        self._ledger.loading(self._member, request.request_id, start)
        self._loads.append(
            LoadTask(request.request_id, groups, external_tokens, tracked.plan, tracked.deadline_s)
        )

    def sources(self, request: Any, external_tokens: int) -> dict[str, int]:
        """Split the tokens of a planned load by tier, in the proportions of the node's answer."""
        tracked = self._tracked.get(request.request_id)
        held = tracked.sources if tracked is not None else {}
        return by_tier(external_tokens, self._tokens_of(held))

    def build_work(self, output: Any) -> StepWork:
        """Return the loads and saves of this step for the workers."""
        self._lookups.next_step()
        self._prestage_queued()
        self._count_durable(self._tracked.values())
        tokens = output.total_num_scheduled_tokens
        work = StepWork(self._loads, tokens=tokens, updates=self._updates)
        self._loads = []
        if output.total_num_scheduled_tokens:
            chunks = []
            for request_id, new in output.num_scheduled_tokens.items():
                if request_id in self._ledger:
                    context = self._live[request_id].num_computed_tokens
                    self._ledger.scheduled(request_id, context, new)
                tracked = self._tracked.get(request_id)
                if tracked is not None:
                    context = tracked.request.num_computed_tokens
                    last = context < tracked.prompt_tokens <= context + new
                    end = tracked.end_plan() if last else None
                    chunks.append(PrefillChunk(new, context, end))
            loading = any(tracked.loading for tracked in self._tracked.values())
            all_known = len(chunks) == len(output.num_scheduled_tokens)
            self._timer.begin(chunks, sound=all_known and not loading)
            self._computing = set(output.num_scheduled_tokens)
            self._count_prompts()
        if self._setting.saves:
            work.saves += self._saves.of_step(output, self._tracked)
            self._saves.count_lost(self.counts)
        return work

    def on_worker_output(self, output: Any) -> None:
        """Apply the workers' output: ended loads, pages that failed, and step timing."""
        for tracked in self._tracked.values() if output.invalid_block_ids else ():
            pages = tracked.loading.pages if tracked.loading else ()
            bad = [at for at, page in enumerate(pages) if page in output.invalid_block_ids]
            if bad:
                tracked.fail(bad[0], self._tasks.step_tokens)
        for request_id in output.failed_recving or ():
            if (failed := self._tracked.get(request_id)) is not None:
                failed.fail_all()
        for request_id in output.finished_recving or ():
            loaded = self._tracked.get(request_id)
            if loaded is not None:
                loaded.loading = None
                self._shared_loads.ended(request_id, landed=not loaded.load_failed)
                loaded.loaded_s = 0.0 if loaded.load_failed else self._now() - loaded.decided_at
        # A report comes every step; only steps with a forward are timed.
        worker_report = output.kv_connector_worker_meta
        for request_id, blocks in worker_report.landed.items() if worker_report else ():
            tokens = self._loading_tokens.pop(request_id, 0)
            # Blocks of several groups are of the same tokens.
            landed = self._tokens_of(blocks) if self._tasks.is_plain else by_tier(tokens, blocks)
            self._ledger.landed(request_id, landed)
        if worker_report is not None and worker_report.computed:
            self._timer.end()
        self._moving = worker_report is not None and worker_report.moving
        if worker_report is not None and worker_report.passive:
            self._become_passive()
        if worker_report is not None and worker_report.updates > self._updates:
            self._updates = worker_report.updates
            self._note_new_weights()
        if worker_report is not None and worker_report.computed:
            self._has_pages = True
        self._report()

    def moving(self) -> bool:
        """Whether a later step publishes blocks, or reads acknowledgements of durable ones."""
        return self._moving or self._durable.is_awaited(self._now())

    def on_finished(self, request: Any) -> dict[str, Any] | None:
        """Stop tracking a request, and send its hints to the node.

        Returns what a proxy of prefill and decode gets, from a producer and for requests that ask.
        """
        self._live.pop(request.request_id, None)
        self._computing.discard(request.request_id)
        self._loading_tokens.pop(request.request_id, None)
        self._queued.left(request.request_id)
        self._shared_loads.left(request.request_id)
        self._shared_loads.ended(request.request_id, landed=False)
        self._ledger.finished(request.request_id)
        self._count_prompts()
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is not None:
            tracked.forget()
            self._lookups.end_plan(tracked, NotFollowed.ENDED)
        if not self._live:  # there may be no later step that would report
            self._report()
        clients = self._clients()
        if tracked is not None and clients is not None and tracked.hint != NO_HINT:
            for client, keys in zip(clients, tracked.keys(0, tracked.saved), strict=True):
                with contextlib.suppress(NodeGoneError):
                    for message in at_end(tracked.hint, keys):
                        client.forget(client.send(message))
        durable = None
        if tracked is not None and tracked.hint.retention == DURABLE:
            self._count_durable([tracked])
            durable = self._durable.kept(request.request_id)
            self._durable.ended(request.request_id, self._now())
            self._count_durable()
        if self._member or (self._setting.loads and durable is None and not is_asked(request)):
            return None  # of several nodes behind MultiConnector the first one returns them
        return transfer_params(tracked if clients is not None else None, durable)

    def reset(self) -> None:
        """Stop using all blocks stored so far; requests under way are no longer tracked."""
        if not self._live:  # else vLLM may keep pages, and call this nevertheless
            self._has_pages = self._has_stale_pages = False
        self._change_names()

    def _note_new_weights(self) -> None:
        """Stop using all blocks stored so far, and distrust the pages that vLLM keeps."""
        self._change_names()
        self._has_stale_pages = self._has_stale_pages or self._has_pages
        advice = (
            "; until reset_prefix_cache(reset_connector=True) without requests under way, requests "
            "that begin with pages of vLLM's own cache are not saved, because those may be of "
            "earlier weights"
        )
        _log.info(
            "weights were updated: earlier blocks are not used again by this engine%s",
            advice if self._has_stale_pages else "",
        )

    def _change_names(self) -> None:
        self._epoch = secrets.token_bytes(16)
        self._untrack_all(NotFollowed.RESET)

    def _become_passive(self) -> None:
        """End the sessions: from now on every request is computed, and counted as without a node.

        Loads under way end as failed ones.
        """
        self._untrack_all(NotFollowed.GONE)
        for connection in self._connections:
            connection.close()

    def _untrack_all(self, why: NotFollowed) -> None:
        """Stop tracking all requests; their plans end for this reason."""
        for request_id, tracked in self._tracked.items():
            self._queued.left(request_id)
            self._durable.forget(request_id)
            tracked.forget()
            self._lookups.end_plan(tracked, why)
        self._tracked.clear()
        self._shared_loads.clear()
        self._saves.clear()

    def close(self) -> None:
        """End the sessions."""
        self._reporter.close()
        for connection in self._connections:
            connection.close()

    def _clients(self) -> list[Client] | None:
        clients = [client for each in self._connections if (client := each.client()) is not None]
        return clients if len(clients) == len(self._connections) else None

    def _why_no_client(self) -> str:
        return REFUSED if any(each.refused for each in self._connections) else Outcome.GONE

    def _tokens_of(self, blocks: Mapping[str, int]) -> dict[str, int]:
        return {tier: number * self._unit for tier, number in blocks.items()}

    def _count_prompts(self) -> None:
        """Count the prompts that are complete for vLLM, and in the next report for the node."""
        for prompt in self._ledger.take(self._member):
            self.counts.add_prompt(prompt)
            self._timer.prompt_counted(prompt)
            self._saves.counted(prompt)

    def _ask(
        self, tracked: TrackedRequest, clients: Sequence[Client] | None, local_tokens: int = 0
    ) -> None:
        """Ask how much of a request is held, unless vLLM would not load it."""
        tracked.forget()
        tracked.planned_local_tokens = local_tokens
        tracked.extend()
        if self._setting.loads and not tracked.request.skip_reading_prefix_cache:
            self._lookups.ask(tracked, clients, self._queue_ahead(tracked), local_tokens)

    def _is_answered(self, tracked: TrackedRequest) -> bool:
        """Return whether it is known what the node holds of a request, or that it is too late."""
        return self._lookups.answered(tracked, computing=bool(self._computing))

    def _prestage_queued(self) -> None:
        """Announce to the node which contexts of waiting requests to read into memory.

        No step waits for an answer here: a lookup without one is read at a later step.
        """
        now_s, clients, contexts = self._now(), self._clients(), dict[str, bytes]()
        for request_id in self._queued.due(now_s):
            tracked = self._tracked[request_id]
            if not self._lookups.polled(tracked):
                continue
            left_out = tracked.planned_blocks < tracked.covered
            below = left_out or not tracked.sources.keys() <= {_MEMORY}
            if clients is None or not tracked.covered or not below:
                self._queued.left(request_id)
                continue
            last = tracked.covered * self._unit // self._shapes[0].rule.block_tokens - 1
            contexts[request_id] = tracked.keys(last, last + 1)[0]  # names all blocks before it
        chosen = self._queued.announce(contexts, now_s) if contexts else []
        ahead = queues_ahead(self._prefills(), set(chosen)) if chosen else {}
        for request_id in chosen:
            turn = ahead[request_id].before_step(self._setting.step_tokens_max)
            self._send_prestage(self._tracked[request_id], turn, clients or ())
            self.counts.add("prestaged_requests")

    def _send_prestage(
        self, tracked: TrackedRequest, turn: EngineQueue, clients: Sequence[Client]
    ) -> None:
        """Announce what the node holds of a request, whose turn comes after the queue `turn`."""
        needed = self._tasks.resume_keys(tracked, tracked.covered * self._unit)
        for group, every_rank in needed.items():
            for client, keys in zip(clients, every_rank, strict=True):
                prestage = Prestage(
                    keys,
                    0.0,
                    group=group,
                    queued=True,
                    queued_tokens=turn.tokens,
                    queued_pairs=turn.pairs,
                )
                with contextlib.suppress(NodeGoneError):
                    client.forget(client.send(prestage))

    def _note_durable(self, tracked: TrackedRequest) -> None:
        """Have the node acknowledge what a resume of a durable request needs, in every group."""
        if tracked.hint.retention != DURABLE or not self._setting.saves:
            return
        request_id, clients = tracked.request.request_id, self._clients()
        blocks = tracked.resumable_blocks
        if clients is not None and blocks > self._durable.blocks(request_id):
            needed = self._tasks.resume_keys(tracked, blocks * self._unit)
            self._durable.saved(request_id, clients, blocks, needed)

    def _count_durable(self, running: Iterable[TrackedRequest] = ()) -> None:
        """Ask about blocks of durable requests, and count those that the node has acknowledged."""
        for tracked in running:
            self._note_durable(tracked)
        for outcome, blocks in self._durable.poll(self._now()):
            self.counts.add("durable_blocks", outcome, number=blocks)

    def _queue_ahead(self, tracked: TrackedRequest) -> EngineQueue:
        """Return what the engine computes and loads before this request, in order of arrival."""
        own = tracked.request.request_id
        before = takewhile(lambda each: each[0] != own, self._prefills())
        prefills = [prefill for _, prefill in before]
        tasks = (self._tracked.get(load.request) for load in self._loads)
        return queue_ahead(prefills, [task.sources for task in tasks if task is not None])

    def _prefills(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield the prompt of each request, in order of arrival: its tokens, and those ready."""
        for request_id, request in self._live.items():
            other = self._tracked.get(request_id)
            if other is not None:
                yield request_id, (other.prompt_tokens, other.ready_tokens)
            else:
                yield request_id, (request.num_tokens, request.num_computed_tokens)

    def _queue_is_same(self, tracked: TrackedRequest) -> bool:
        """Return whether the queue ahead is that of the plan, which is renewed once only."""
        planned = tracked.planned_queue
        return planned is None or not self._queue_ahead(tracked).has_moved(planned)

    def _report(self) -> None:
        report = self._timer.report(idle=not self._live)
        if report is not None:
            self._reporter.put(report)
