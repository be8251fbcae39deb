"""Run a trace through a simulated fleet: a discrete-event simulation on a virtual clock.

A request arrives, is routed to a worker, looked up (`index`) and planned (`plan`). Its blocks move
over the links of their tiers. It then queues for the engine, which computes the remaining tokens.
At the first token the whole chain is saved. Coverage, plan and eviction run the store's own code.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from holdfast.blocks.key import KEY_BYTES
from holdfast.plan.planner import Planner, PlanQuestion
from holdfast.plan.prestage import PrestageTimes, begin_in_s
from holdfast.policy.base import NEVER
from holdfast.sim.fleet import NOT_LOOKED_UP, Fleet, FleetCoverage, SimulatedWorker
from holdfast.sim.prestages import WorkerPrestages
from holdfast.sim.route import RouteQuestion, Router
from holdfast.sim.runs import MAX_RUN_BLOCKS, runs_of
from holdfast.sim.served import Ledger, ServedRequests
from holdfast.sim.trace import Bools, Floats, Trace

_MOVED, _FETCHED, _COMPUTED, _DEADLINE, _ARRIVED, _DUE = range(6)

_PROGRESS_REQUESTS = 256

_TICK_S = 1e-3
"""Resolution of times in a trace."""


class SimulationSettings(NamedTuple):
    """How a trace is run: planner, router, closed or open loop, and hints."""

    planner: Planner
    router: Router
    closed_loop: bool = False
    returns_s: Floats | None = None
    """[n] When the chain of each request is needed again, in seconds of trace time: hints."""
    durable: Bools | None = None
    """[n] Whether the context of each request is saved as durable; None: none is."""
    prestage: bool = True
    """Whether chains with a hint are also prestaged into the worker's host memory."""
    longest_run: int = MAX_RUN_BLOCKS
    """Maximum blocks per run; blocks of a run move together. 1 simulates each block."""


@dataclass
class InflightRequest:
    """One request between its arrival and its first token."""

    worker: SimulatedWorker
    keys: list[bytes]
    lengths: list[int]
    """Number of blocks in each run of the chain."""
    covered: FleetCoverage
    tokens: int = 0
    blocks: int = 0
    """Number of leading blocks to fetch."""
    moving: int = 0
    """Number of running transfers."""
    ready_s: float = 0.0
    deadline_s: float = math.inf
    """When the fetch is cancelled."""
    compute_s: float = 0.0

    def counts(self, tiers: int) -> list[int]:
        """Return the number of blocks fetched from each of `tiers` tiers."""
        taken = self.covered.tiers[: self.blocks]
        return [taken.count(tier) for tier in range(tiers)] if taken else [0] * tiers

    def sources(self) -> list[int]:
        """Return, for each run that was fetched whole, the tier its last block came from."""
        tiers, blocks, end, sources = self.covered.tiers, self.blocks, 0, []
        for length in self.lengths:
            end += length
            if end > blocks:
                break
            sources.append(tiers[end - 1])
        return sources


@dataclass
class InflightPrestage(InflightRequest):
    """A chain being prestaged into its worker's host memory for a later request."""

    needed_s: float = math.inf

    def arrived(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Return (row, number of blocks) for each row of the chain that arrived."""
        left, arrived = self.blocks, []
        for row, length in zip(rows, self.lengths, strict=True):
            if left <= 0:
                break
            arrived.append((row, min(left, length)))
            left -= length
        return arrived


class Simulation:
    """One run of one trace through one fleet; the caller may inspect both afterwards.

    `progress` gets the count of arrivals every `_PROGRESS_REQUESTS` arrivals.
    """

    def __init__(
        self,
        trace: Trace,
        fleet: Fleet,
        setting: SimulationSettings,
        progress: Callable[[int], object] | None = None,
    ) -> None:
        self.trace = trace
        self.fleet = fleet
        self._setting = setting
        self._progress = progress
        self._ledger = Ledger(trace.requests, len(fleet.names))
        self._times_s: list[float] = trace.time_s.tolist()
        self._tokens: list[int] = trace.input_tokens.tolist()
        self._events: list[tuple[float, int, int, int, int]] = []
        self._event_count = 0
        self._inflights: dict[int, InflightRequest] = {}
        self._runs = runs_of(trace, setting.longest_run)
        self._lengths: list[int] = self._runs.lengths.tolist()
        fleet.expect_at_most(sum(self._lengths))
        self._keys = [
            hashlib.blake2b(run.to_bytes(4, "little"), digest_size=KEY_BYTES).digest()
            for run in range(len(self._lengths))
        ]
        if setting.returns_s is None:  # with hints, row order breaks ties
            fleet.create_rows(self._keys, self._runs.parents().tolist(), self._lengths)
        self._followers = _followers(trace) if setting.closed_loop else {}
        self._arrivals = 0
        hardware, names = fleet.hardware, fleet.names
        self._tier_specs, self._engine, self._prefill = (
            hardware.tier_specs,
            hardware.engine,
            hardware.prefill,
        )
        self._block_tokens, self._block_bytes = trace.block_tokens, hardware.namespace.slot_bytes
        self._device = names[:1] == ["device"]
        self._host = names.index("host") if "host" in names[:-1] else None
        """The tier that prestaging fills: host memory, if there are tiers below it."""
        self._hinted: dict[int, tuple[int, PrestageTimes]] = {}
        """Prestage number to (request whose chain it reads, times of the prestage)."""
        self._prestages = [WorkerPrestages() for _ in fleet.workers]

    def run(self) -> ServedRequests:
        """Run until every request has its first token."""
        waits = {number for numbers in self._followers.values() for number in numbers}
        heads = (n for n in range(self.trace.requests) if n not in waits)
        for number in heads:
            at_s = self._times_s[number]
            self._advance(at_s)
            self._arrive(at_s, number)
        self._advance(math.inf)
        return self._ledger.served()

    def _advance(self, until_s: float) -> None:
        """Process all events up to and including `until_s`."""
        events = self._events
        while events and events[0][0] <= until_s:
            at_s, _, kind, number, version = heappop(events)
            if kind == _COMPUTED:
                self._computed(at_s, number)
            elif kind == _MOVED:
                self._moved(at_s, number, version)
            elif kind == _FETCHED:
                self._fetched(at_s, number)
            elif kind == _DEADLINE:
                self._cancel_fetch(at_s, number)
            elif kind == _DUE:
                request, times = self._hinted[number]
                worker = self._ledger.worker[request]
                self._prestages[worker].add(number, times)
                self._start_prestages(at_s, worker)
            else:
                self._arrive(at_s, number)

    def _schedule(self, at_s: float, kind: int, number: int, version: int = 0) -> None:
        self._event_count += 1
        heappush(self._events, (at_s, self._event_count, kind, number, version))

    def _arrive(self, now_s: float, request: int) -> None:
        """Choose a worker and join its queue; the binding lookup happens in `_look_up`."""
        keys, lengths = self._chain(request)
        tokens = self._tokens[request]
        number = 0
        covered = NOT_LOOKED_UP  # one worker: nothing to route, so no lookup yet
        if len(self.fleet.workers) > 1:
            number, covered = self._setting.router(
                self.fleet, RouteQuestion(self._arrivals, keys, tokens)
            )
        self._arrivals += 1
        if self._progress and self._arrivals % _PROGRESS_REQUESTS == 0:
            self._progress(self._arrivals)
        worker = self.fleet.workers[number]
        worker.requests += 1
        inflight = InflightRequest(worker, keys, lengths, covered, tokens, len(covered.tiers))
        self._inflights[request] = inflight
        if covered is not NOT_LOOKED_UP:
            self._update_prefill(inflight)
        self._ledger.arrived_s[request] = now_s
        self._ledger.worker[request] = number
        worker.queue.append(request)
        self._look_up(now_s, worker)

    def _look_up(self, now_s: float, worker: SimulatedWorker) -> None:
        """Look up, plan and start to fetch queued requests, at most `fetch_ahead` of them."""
        while worker.queue and worker.ahead < self._engine.fetch_ahead:
            request = worker.queue.popleft()
            inflight = self._inflights[request]
            worker.ahead += 1
            if inflight.covered is NOT_LOOKED_UP or now_s > self._ledger.arrived_s[request]:
                inflight.covered = self.fleet.cover(worker, inflight.keys)
            covered, tokens = inflight.covered, inflight.tokens
            # Leading blocks in device memory need no fetch; at least one token is computed.
            device_tokens = 0
            if self._device:
                size = self._block_tokens
                device_tokens = (len(covered.tiers) - len(covered.tiers.lstrip(b"\0"))) * size
                if device_tokens >= tokens:
                    device_tokens = max(0, tokens - 1) // size * size
            inflight.blocks = device_tokens // self._block_tokens
            if len(covered.tiers) > inflight.blocks:  # otherwise there is nothing to fetch
                plan = self._setting.planner.plan(
                    PlanQuestion(
                        tiers=covered.tiers,
                        block_bytes=self._block_bytes,
                        block_tokens=self._block_tokens,
                        estimates=self.fleet.estimates(worker, covered.tiers, now_s),
                        names=self.fleet.names,
                        limit_s=self._engine.fetch_limit_s,
                        cost=self._prefill,
                        prompt_tokens=tokens,
                        have_tokens=device_tokens,
                    )
                )
                inflight.blocks, inflight.deadline_s = plan.blocks, now_s + plan.deadline_s
            self._update_prefill(inflight)
            self.fleet.pin(worker, covered)
            self._ledger.looked_s[request] = now_s
            self._ledger.held[request] = len(covered.tiers)
            inflight.ready_s = now_s
            if inflight.blocks:
                counts = inflight.counts(len(self.fleet.names))
                self._ledger.fetch(request, counts)
                self._start_transfers(now_s, request, inflight, counts)
                if inflight.moving and inflight.deadline_s < math.inf:
                    self._schedule(inflight.deadline_s, _DEADLINE, request)
            self._complete_fetch(now_s, request, inflight)

    def _update_prefill(self, inflight: InflightRequest) -> None:
        """Update the remaining prefill of a request and the engine's backlog.

        At least one token is computed: its output is the first token.
        """
        cost, tokens = self._prefill, inflight.tokens
        reused = inflight.blocks * self._block_tokens
        if reused >= tokens:
            reused = max(0, tokens - 1)
        before_s = inflight.compute_s
        inflight.compute_s = cost.seconds(tokens - reused, reused)
        inflight.worker.engine.expect(inflight.compute_s - before_s)

    def _start_transfers(
        self, now_s: float, request: int, inflight: InflightRequest, counts: list[int]
    ) -> None:
        """Start transfers of `counts[tier]` blocks over every link on the path from each tier."""
        fleet = self.fleet
        tier_specs, nbytes = self._tier_specs, self._block_bytes
        for tier, count in enumerate(counts):
            if not count:
                continue
            ready_s = now_s + tier_specs[tier].latency_s
            if ready_s > inflight.ready_s:  # noqa: PLR1730  # a call takes longer
                inflight.ready_s = ready_s
            for number in inflight.worker.links[tier]:
                link = fleet.links[number]
                link.start(now_s, count * nbytes, request * len(tier_specs) + tier)
                self._schedule_transfer_end(number)
                inflight.moving += 1

    def _schedule_transfer_end(self, number: int) -> None:
        """Schedule the next end of a transfer on this link at its present rate."""
        link = self.fleet.links[number]
        if len(link):
            self._schedule(link.next_end(), _MOVED, number, link.version)

    def _moved(self, now_s: float, number: int, version: int) -> None:
        """End a transfer, unless the link's rate changed after the event was scheduled."""
        link, tier_specs = self.fleet.links[number], self._tier_specs
        if link.version != version:
            return
        request, tier = divmod(link.finish(now_s), len(tier_specs))
        self._schedule_transfer_end(number)
        inflight = self._inflights[request]
        inflight.moving -= 1
        ready_s = now_s + tier_specs[tier].latency_s
        if ready_s > inflight.ready_s:  # noqa: PLR1730  # a call takes longer
            inflight.ready_s = ready_s
        self._complete_fetch(now_s, request, inflight)

    def _cancel_fetch(self, now_s: float, request: int) -> None:
        """Cancel a fetch at its deadline: use the blocks that arrived, compute the rest."""
        inflight = self._inflights.get(request)
        if inflight is None or not inflight.moving:
            return
        landed = inflight.counts(len(self.fleet.names))
        for tier, count in enumerate(list(landed)):
            for number in inflight.worker.links[tier] if count else ():
                link = self.fleet.links[number]
                left = link.cancel(now_s, request * len(landed) + tier)
                landed[tier] = min(landed[tier], count - math.ceil(left / self._block_bytes))
                self._schedule_transfer_end(number)
        whole = 0
        for tier in inflight.covered.tiers[: inflight.blocks]:
            landed[tier] -= 1
            if landed[tier] < 0:
                break
            whole += 1
        inflight.blocks, inflight.moving, inflight.ready_s = whole, 0, now_s
        self._ledger.late[request] = 1
        self._ledger.fetch(request, inflight.counts(len(landed)))
        self._update_prefill(inflight)
        self._complete_fetch(now_s, request, inflight)

    def _complete_fetch(self, now_s: float, request: int, inflight: InflightRequest) -> None:
        """Complete the fetch once no transfer is running and the latency has passed."""
        if inflight.moving:
            return
        if inflight.ready_s > now_s:
            self._schedule(inflight.ready_s, _FETCHED, request)
        else:
            self._fetched(now_s, request)

    def _fetched(self, now_s: float, request: int) -> None:
        inflight = self._inflights[request]
        worker = inflight.worker
        if isinstance(inflight, InflightPrestage):
            # Put the blocks in host memory; this is no use, so their hint stays.
            del self._inflights[request]
            covered, memory = inflight.covered, worker.memory
            self.fleet.unpin(worker, covered)
            rows = memory.rows(inflight.keys, inflight.lengths, covered.own)
            arrived = inflight.arrived(rows)
            memory.promote(now_s, self._host or 0, arrived)
            if inflight.needed_s > now_s:
                memory.expect([row for row, _ in arrived], inflight.needed_s)
            number = self._ledger.worker[request - self.trace.requests]
            self._prestages[number].done(request)
            self._start_prestages(now_s, number)
            return
        self._ledger.fetched_s[request] = now_s
        self._start_prefills(now_s, worker, worker.engine.arrive(request, inflight.compute_s))

    def _start_prefills(
        self, now_s: float, worker: SimulatedWorker, started: list[tuple[int, float]]
    ) -> None:
        for request, seconds in started:
            self._ledger.started_s[request] = now_s
            self._schedule(now_s + seconds, _COMPUTED, request)
            worker.ahead -= 1
        if started:
            self._look_up(now_s, worker)

    def _computed(self, now_s: float, request: int) -> None:
        """Emit the first token: save the chain and start the next prefill.

        The whole chain is saved in the worker's tiers, and in shared tiers what those lacked, or
        the whole chain if it is durable.
        """
        inflight, ledger, fleet = self._inflights.pop(request), self._ledger, self.fleet
        worker, covered, sources = inflight.worker, inflight.covered, inflight.sources()
        memory = worker.memory
        rows = memory.rows(inflight.keys, inflight.lengths, covered.own)
        is_durable = self._setting.durable is not None and bool(self._setting.durable[request])
        memory.save(now_s, rows, sources, is_durable=is_durable)
        fleet.unpin(worker, covered)
        again_s = math.nan
        if self._setting.returns_s is not None:
            # A hint moves later with the arrival of its request, and is never before now.
            again_s = float(self._setting.returns_s[request])
            again_s += ledger.arrived_s[request] - self._times_s[request]
        hinted = not math.isnan(again_s)
        if hinted:
            again_s = max(again_s, now_s)
            memory.expect(rows, again_s)
            self._schedule_prestage(now_s, request, inflight, again_s)
        if fleet.shared:
            at, known = (0, []) if is_durable else (covered.whole, covered.shared)
            rows = fleet.shared.rows(inflight.keys, inflight.lengths, known, at)
            below = [source - fleet.own for source in sources[at:]]
            fleet.shared.save(now_s, rows, below, is_durable=is_durable)
            if hinted:
                fleet.shared.expect(rows, again_s)
        worker.requests -= 1
        ledger.first_s[request] = now_s
        saved_s = self._prefill.seconds(inflight.tokens) - inflight.compute_s
        ledger.saved_s[request] = saved_s
        self._start_prefills(now_s, worker, worker.engine.leave(inflight.compute_s))
        for after in self._followers.get(request, ()):
            rate = self._engine.decode_tokens_per_s
            answered_s = now_s + float(self.trace.output_tokens[request]) / rate
            self._schedule(answered_s + float(self.trace.think_s[after]), _ARRIVED, after)

    def _schedule_prestage(
        self, now_s: float, request: int, inflight: InflightRequest, again_s: float
    ) -> None:
        """Schedule a prestage so that the chain is in host memory at `again_s`.

        The read time assumes that all blocks lie on the tier below host memory.
        """
        host = self._host
        if host is None or again_s == NEVER or not self._setting.prestage:
            return
        tiers = bytes([host + 1]) * sum(inflight.lengths)
        question = PlanQuestion(
            tiers=tiers,
            block_bytes=self._block_bytes,
            block_tokens=self._block_tokens,
            estimates=self.fleet.estimates(inflight.worker, tiers[:1], now_s),
            names=self.fleet.names,
            limit_s=math.inf,
        )
        fetch_s = self._setting.planner.plan(question).fetch_s
        number = self.trace.requests + request
        self._hinted[number] = request, PrestageTimes(again_s, fetch_s, host + 1)
        self._schedule(now_s + begin_in_s(again_s - now_s, fetch_s), _DUE, number)

    def _start_prestages(self, now_s: float, worker: int) -> None:
        """Start the prestages of a worker that begin now."""
        while numbers := self._prestages[worker].take(now_s):
            for number in numbers:
                if not self._start_prestage(now_s, number):
                    self._prestages[worker].done(number)

    def _start_prestage(self, now_s: float, number: int) -> bool:
        """Start reading the blocks of a chain that lie below host memory; False without any."""
        request, times = self._hinted.pop(number)
        worker = self.fleet.workers[self._ledger.worker[request]]
        keys, lengths = self._chain(request)
        covered = self.fleet.cover(worker, keys)
        inflight = InflightPrestage(worker, keys, lengths, covered)
        inflight.needed_s, inflight.blocks = times.needed_s, len(covered.tiers)
        inflight.ready_s = now_s
        counts = inflight.counts(len(self.fleet.names))
        host = self._host or 0
        if not any(counts[host + 1 :]):
            return False
        self._inflights[number] = inflight
        self.fleet.pin(worker, covered)
        self._start_transfers(now_s, number, inflight, [0] * (host + 1) + counts[host + 1 :])
        self._complete_fetch(now_s, number, inflight)
        return True

    def _chain(self, request: int) -> tuple[list[bytes], list[int]]:
        """Return the keys of a request's runs, and the number of blocks of each."""
        keys, lengths, chain = self._keys, self._lengths, self._runs.chain(request)
        return [keys[run] for run in chain], [lengths[run] for run in chain]


def _followers(trace: Trace) -> dict[int, list[int]]:
    """Map each request to the requests of its session that wait for its answer.

    A request waits for the last request that had arrived when the client's think time began. This
    is not always the previous request, because agents send several requests at once.
    """
    sessions: dict[int, tuple[list[float], list[int]]] = {}
    after: dict[int, list[int]] = {}
    for number, session in enumerate(trace.session.tolist()):
        if session < 0:
            continue
        times, numbers = sessions.setdefault(session, ([], []))
        at_s, think_s = float(trace.time_s[number]), float(trace.think_s[number])
        if not math.isnan(think_s):
            before = bisect_right(times, at_s - think_s + _TICK_S)
            if before:
                after.setdefault(numbers[before - 1], []).append(number)
        times.append(at_s)
        numbers.append(number)
    return after
