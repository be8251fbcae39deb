"""Run a trace through a fleet: a discrete-event simulation on a clock turned by hand.

A request arrives, is routed, covered (`index`), planned (`plan`); its blocks move over the links
of their tiers while it waits; then it queues for the engine, which computes the rest. At its first
token the whole chain is saved. Nothing here decides what the store decides: coverage, plan and
eviction are the code that serves.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import NamedTuple

from holdfast.blocks.key import KEY_BYTES
from holdfast.plan.planner import Planner, Question
from holdfast.plan.prestage import begin_in_s
from holdfast.policy.base import NEVER
from holdfast.sim.closed_loop import followers
from holdfast.sim.fleet import UNKNOWN, Covered, Fleet
from holdfast.sim.flight import Flight, Staging
from holdfast.sim.route import Ask, Router
from holdfast.sim.runs import LONGEST, runs_of
from holdfast.sim.served import Ledger, Served
from holdfast.sim.trace import Floats, Trace
from holdfast.sim.worker import Worker

_MOVED, _FETCHED, _COMPUTED, _LATE, _ARRIVED, _DUE = range(6)

_PROGRESS_REQUESTS = 256


class Setting(NamedTuple):
    """How a trace is run: who decides, and whether sessions wait for their answers."""

    planner: Planner
    router: Router
    closed_loop: bool = False
    returns_s: Floats | None = None
    """[n] when the chain of each request is expected again, in the trace's time: hints."""
    prestage: bool = True
    """Whether what is expected again is also brought to the worker's memory in time."""
    longest_run: int = LONGEST
    """Blocks that move as one, at most; 1 simulates every block for itself."""


class Simulation:
    """One run of one trace through one fleet; both may be looked at afterwards."""

    def __init__(self, trace: Trace, fleet: Fleet, setting: Setting) -> None:
        self.trace = trace
        self.fleet = fleet
        self._setting = setting
        self._ledger = Ledger(trace.requests, len(fleet.names))
        self._times_s: list[float] = trace.time_s.tolist()
        self._tokens: list[int] = trace.input_tokens.tolist()
        self._events: list[tuple[float, int, int, int, int]] = []
        self._events_ever = 0
        self._flights: dict[int, Flight] = {}
        self._runs = runs_of(trace, setting.longest_run)
        self._lengths: list[int] = self._runs.lengths.tolist()
        fleet.expect_at_most(sum(self._lengths))
        self._names = [_name(run) for run in range(len(self._lengths))]
        if setting.returns_s is None:  # among equal expectations the row that was made first counts
            fleet.make_all(self._names, self._runs.fronts().tolist(), self._lengths)
        self._after = followers(trace) if setting.closed_loop else {}
        self._arrivals = 0
        hardware, names = fleet.hardware, fleet.names
        self._rungs, self._engine, self._prefill = hardware.rungs, hardware.engine, hardware.prefill
        self._block_tokens, self._block_bytes = trace.block_tokens, hardware.world.record_bytes
        self._device = names[:1] == ["device"]
        self._host = names.index("host") if "host" in names[:-1] else None
        """The tier that is staged to, if there are tiers below it."""
        self._due: dict[int, tuple[int, float]] = {}
        """By number of a staging: the request whose chain it is, and when it is needed."""

    def run(self, progress: Callable[[int], object] | None = None) -> Served:
        """Run to the last first token; `progress` is told now and then how many have arrived."""
        waits = {number for numbers in self._after.values() for number in numbers}
        heads = (n for n in range(self.trace.requests) if n not in waits)
        for number in heads:
            at_s = self._times_s[number]
            self._turn(at_s)
            self._arrive(at_s, number)
            if progress and self._arrivals % _PROGRESS_REQUESTS == 0:
                progress(self._arrivals)
        self._turn(math.inf)
        return self._ledger.served()

    def _turn(self, until_s: float) -> None:
        """Turn the clock until then; what happens at the same moment happens first."""
        events = self._events
        while events and events[0][0] <= until_s:
            at_s, _, kind, number, version = heappop(events)
            if kind == _COMPUTED:
                self._computed(at_s, number)
            elif kind == _MOVED:
                self._moved(at_s, number, version)
            elif kind == _FETCHED:
                self._fetched(at_s, number)
            elif kind == _LATE:
                self._late(at_s, number)
            elif kind == _DUE:
                self._stage(at_s, number)
            else:
                self._arrive(at_s, number)

    def _at(self, at_s: float, kind: int, number: int, version: int = 0) -> None:
        self._events_ever += 1
        heappush(self._events, (at_s, self._events_ever, kind, number, version))

    def _arrive(self, now_s: float, request: int) -> None:
        """Choose a worker and stand in its line; nothing is looked up for sure before its turn."""
        keys, lengths = self._chain(request)
        tokens = self._tokens[request]
        number = 0
        covered = UNKNOWN  # until its turn: nobody looks at the length of the only line
        if len(self.fleet.workers) > 1:
            number, covered = self._setting.router(self.fleet, Ask(self._arrivals, keys, tokens))
        self._arrivals += 1
        worker = self.fleet.workers[number]
        worker.requests += 1
        flight = self._flights[request] = Flight(worker, keys, lengths, covered)
        flight.tokens, flight.blocks = tokens, len(covered.tiers)
        if covered is not UNKNOWN:
            self._expect(flight)
        self._ledger.arrived_s[request] = now_s
        self._ledger.worker[request] = number
        worker.line.append(request)
        self._look_up(now_s, worker)

    def _look_up(self, now_s: float, worker: Worker) -> None:
        """Cover and plan those whose turn it is, `fetch_ahead` of the engine at most."""
        while worker.line and worker.ahead < self._engine.fetch_ahead:
            request = worker.line.popleft()
            flight = self._flights[request]
            worker.ahead += 1
            if flight.covered is UNKNOWN or now_s > self._ledger.arrived_s[request]:
                flight.covered = self.fleet.cover(worker, flight.keys)
            self._plan(now_s, flight)
            worker.memory.pin(flight.covered.own)
            if self.fleet.shared:
                self.fleet.shared.pin(flight.covered.shared)
            self._ledger.looked_s[request] = now_s
            self._ledger.held[request] = len(flight.covered.tiers)
            self._fetch(now_s, request, flight)

    def _plan(self, now_s: float, flight: Flight) -> None:
        fleet, covered, tokens = self.fleet, flight.covered, flight.tokens
        had = self._had(covered, tokens)
        flight.blocks = had // self._block_tokens
        if len(covered.tiers) > flight.blocks:  # else there is nothing to bring
            plan = self._setting.planner.plan(
                Question(
                    tiers=covered.tiers,
                    block_bytes=self._block_bytes,
                    block_tokens=self._block_tokens,
                    estimates=fleet.estimates(flight.worker, covered.tiers, now_s),
                    names=fleet.names,
                    limit_s=self._engine.fetch_limit_s,
                    cost=self._prefill,
                    prompt_tokens=tokens,
                    have_tokens=had,
                )
            )
            flight.blocks, flight.late_s = plan.blocks, now_s + plan.deadline_s
        self._expect(flight)

    def _had(self, covered: Covered, tokens: int) -> int:
        """Return the tokens of leading blocks that the engine has, short of the whole prompt."""
        if not self._device:
            return 0
        blocks = len(covered.tiers) - len(covered.tiers.lstrip(b"\0"))
        size = self._block_tokens
        return blocks * size if blocks * size < tokens else (tokens - 1) // size * size

    def _expect(self, flight: Flight) -> None:
        """Work out what is left to compute, and let the engine's queue know.

        At least one token is computed: the one whose answer is the first token out.
        """
        cost, tokens = self._prefill, flight.tokens
        reused = flight.blocks * self._block_tokens
        if reused >= tokens:
            reused = max(0, tokens - 1)
        before_s = flight.compute_s
        flight.computed_tokens = tokens - reused
        flight.compute_s = cost.seconds(tokens - reused, reused)
        flight.worker.engine.expect(flight.compute_s - before_s)

    def _fetch(self, now_s: float, request: int, flight: Flight) -> None:
        """Set the planned blocks in motion."""
        flight.ready_s = now_s
        if flight.blocks:
            counts = flight.counts(len(self.fleet.names))
            self._ledger.fetch(request, counts)
            self._set_out(now_s, request, flight, counts)
            if flight.moving and flight.late_s < math.inf:
                self._at(flight.late_s, _LATE, request)
        self._settle(now_s, request, flight)

    def _set_out(self, now_s: float, request: int, flight: Flight, counts: list[int]) -> None:
        """Start so many blocks from each tier over every link on their way."""
        fleet = self.fleet
        rungs, nbytes = self._rungs, self._block_bytes
        for tier, count in enumerate(counts):
            if not count:
                continue
            ready_s = now_s + rungs[tier].latency_s
            if ready_s > flight.ready_s:  # noqa: PLR1730  # a call takes longer
                flight.ready_s = ready_s
            for number in flight.worker.links[tier]:
                link = fleet.links[number]
                link.start(now_s, count * nbytes, request * len(rungs) + tier)
                self._watch(number)
                flight.moving += 1

    def _watch(self, number: int) -> None:
        """Set an event for the next end of a transfer on this link, as things are."""
        link = self.fleet.links[number]
        if len(link):
            self._at(link.next_end(), _MOVED, number, link.version)

    def _moved(self, now_s: float, number: int, version: int) -> None:
        """End a transfer, unless the link's pace has changed since the event was set."""
        link, rungs = self.fleet.links[number], self._rungs
        if link.version != version:
            return
        request, tier = divmod(link.finish(now_s), len(rungs))
        self._watch(number)
        flight = self._flights[request]
        flight.moving -= 1
        ready_s = now_s + rungs[tier].latency_s
        if ready_s > flight.ready_s:  # noqa: PLR1730  # a call takes longer
            flight.ready_s = ready_s
        self._settle(now_s, request, flight)

    def _late(self, now_s: float, request: int) -> None:
        """Cancel a fetch that is late: what has come counts, the rest is computed."""
        flight = self._flights.get(request)
        if flight is None or not flight.moving:
            return
        landed = flight.counts(len(self.fleet.names))
        for tier, count in enumerate(list(landed)):
            for number in flight.worker.links[tier] if count else ():
                link = self.fleet.links[number]
                left = link.cancel(now_s, request * len(landed) + tier)
                landed[tier] = min(landed[tier], count - math.ceil(left / self._block_bytes))
                self._watch(number)
        whole = 0
        for tier in flight.covered.tiers[: flight.blocks]:
            landed[tier] -= 1
            if landed[tier] < 0:
                break
            whole += 1
        flight.blocks, flight.moving, flight.ready_s = whole, 0, now_s
        self._ledger.late[request] = 1
        self._ledger.fetch(request, flight.counts(len(landed)))
        self._expect(flight)
        self._settle(now_s, request, flight)

    def _settle(self, now_s: float, request: int, flight: Flight) -> None:
        """Go on once nothing moves any more."""
        if flight.moving:
            return
        if flight.ready_s > now_s:
            self._at(flight.ready_s, _FETCHED, request)
        else:
            self._fetched(now_s, request)

    def _fetched(self, now_s: float, request: int) -> None:
        flight = self._flights[request]
        if isinstance(flight, Staging):
            self._staged(now_s, request, flight)
            return
        worker = flight.worker
        self._ledger.fetched_s[request] = now_s
        self._begin(now_s, worker, worker.engine.arrive(request, flight.compute_s))

    def _begin(self, now_s: float, worker: Worker, started: list[tuple[int, float]]) -> None:
        for request, seconds in started:
            self._ledger.started_s[request] = now_s
            self._at(now_s + seconds, _COMPUTED, request)
            worker.ahead -= 1
        if started:
            self._look_up(now_s, worker)

    def _computed(self, now_s: float, request: int) -> None:
        """The first token is there: save the chain, let the next prefill begin."""
        flight, ledger = self._flights.pop(request), self._ledger
        self._save(now_s, request, flight)
        flight.worker.requests -= 1
        ledger.first_s[request] = now_s
        ledger.computed_tokens[request] = flight.computed_tokens
        ledger.computed_s[request] = flight.compute_s
        saved_s = self._prefill.seconds(flight.tokens) - flight.compute_s
        ledger.saved_s[request] = saved_s
        worker = flight.worker
        self._begin(now_s, worker, worker.engine.leave(flight.compute_s))
        for after in self._after.get(request, ()):
            rate = self._engine.decode_tokens_per_s
            answered_s = now_s + float(self.trace.output_tokens[request]) / rate
            self._at(answered_s + float(self.trace.think_s[after]), _ARRIVED, after)

    def _save(self, now_s: float, request: int, flight: Flight) -> None:
        """Save the whole chain: in the worker's memory, and behind it what that did not hold."""
        covered, keys, fleet = flight.covered, flight.keys, self.fleet
        lengths, sources = flight.lengths, flight.sources()
        memory = flight.worker.memory
        memory.unpin(covered.own)
        rows = memory.rows(keys, lengths, covered.own)
        memory.save(now_s, rows, sources)
        again_s = self._again_s(now_s, request)
        if again_s is not None:
            memory.expect(rows, again_s)
            self._wish(now_s, request, flight, again_s)
        if fleet.shared:
            fleet.shared.unpin(covered.shared)
            rows = fleet.shared.rows(keys, lengths, covered.shared, covered.whole)
            behind = [source - fleet.own for source in sources[covered.whole :]]
            fleet.shared.save(now_s, rows, behind)
            if again_s is not None:
                fleet.shared.expect(rows, again_s)

    def _wish(self, now_s: float, request: int, flight: Flight, again_s: float) -> None:
        """Have a chain in memory again by then: read from the next tier it could fall to."""
        host = self._host
        if host is None or again_s == NEVER or not self._setting.prestage:
            return
        tiers = bytes([host + 1]) * sum(flight.lengths)
        question = Question(
            tiers=tiers,
            block_bytes=self._block_bytes,
            block_tokens=self._block_tokens,
            estimates=self.fleet.estimates(flight.worker, tiers[:1], now_s),
            names=self.fleet.names,
            limit_s=math.inf,
        )
        fetch_s = self._setting.planner.plan(question).fetch_s
        number = self.trace.requests + request
        self._due[number] = request, again_s
        self._at(now_s + begin_in_s(again_s - now_s, fetch_s), _DUE, number)

    def _stage(self, now_s: float, number: int) -> None:
        """Bring up what lies below memory of a chain whose time comes."""
        request, needed_s = self._due.pop(number)
        worker = self.fleet.workers[self._ledger.worker[request]]
        keys, lengths = self._chain(request)
        covered = self.fleet.cover(worker, keys)
        flight = Staging(worker, keys, lengths, covered)
        flight.needed_s, flight.blocks, flight.ready_s = needed_s, covered.blocks, now_s
        counts = flight.counts(len(self.fleet.names))
        host = self._host or 0
        if not any(counts[host + 1 :]):
            return
        self._flights[number] = flight
        worker.memory.pin(covered.own)
        if self.fleet.shared:
            self.fleet.shared.pin(covered.shared)
        self._set_out(now_s, number, flight, [0] * (host + 1) + counts[host + 1 :])
        self._settle(now_s, number, flight)

    def _staged(self, now_s: float, number: int, flight: Staging) -> None:
        """Hold in memory what has come; that was no use of it, so it is expected as before."""
        del self._flights[number]
        covered, memory = flight.covered, flight.worker.memory
        memory.unpin(covered.own)
        if self.fleet.shared:
            self.fleet.shared.unpin(covered.shared)
        rows = memory.rows(flight.keys, flight.lengths, covered.own)
        brought = flight.brought(rows)
        memory.bring_up(now_s, self._host or 0, brought)
        if flight.needed_s > now_s:
            memory.expect([row for row, _ in brought], flight.needed_s)

    def _chain(self, request: int) -> tuple[list[bytes], list[int]]:
        """Return the keys of a request's runs, and their blocks."""
        names, lengths, chain = self._names, self._lengths, self._runs.chain(request)
        return [names[run] for run in chain], [lengths[run] for run in chain]

    def _again_s(self, now_s: float, request: int) -> float | None:
        """Return when the chain is expected again, if anybody says so.

        A session whose time has come while its answer was late waits already: now.
        """
        if self._setting.returns_s is None:
            return None
        again_s = float(self._setting.returns_s[request])
        late_s = self._ledger.arrived_s[request] - self._times_s[request]
        return None if math.isnan(again_s) else max(again_s + late_s, now_s)


def _name(run: int) -> bytes:
    """Return a key for a run: 16 bytes of a hash, as blocks have."""
    return hashlib.blake2b(run.to_bytes(4, "little"), digest_size=KEY_BYTES).digest()
