"""Health of each target as seen by this process, and which targets to avoid.

Two mechanisms. A circuit breaker per target reacts to failures and silence. The review compares
targets: one whose answers take several times the median, or that fails more often than most, is
*ejected* for a while. Ejections are capped, because if every target is slow the network is the
cause. State in memory, driven by the clock and random numbers passed in: no I/O, no threads.
"""

from __future__ import annotations

import math
import random
import statistics
import threading
from collections.abc import Collection, Sequence

import msgspec

from holdfast.clock import Clock
from holdfast.status import MemberStatus
from holdfast.tiers.breaker import (
    BreakerOptions,
    BreakerPhase,
    CallEnding,
    CallTicket,
    CircuitBreaker,
)
from holdfast.tiers.pool.target_statistics import CallKind, TargetStatistics

EJECTED_SHARE_MAX = 0.3
COMPARED_MIN = 3
"""Least number of targets that the review compares: of two, neither can be called the outlier."""

MUCH_WORSE_FACTOR = 3.0
"""At the cap on ejections, a target replaces an ejected one only if its answers take this many
times as long."""


class HealthOptions(msgspec.Struct, frozen=True, kw_only=True):
    """When a target counts as an outlier; times in seconds.

    The review runs every `review_s` over targets with at least `samples` new answers. It ejects a
    target that is slower than `slow_factor` times the median and `slow_margin_s` above it (reads:
    `read_margin_s`), or that failed in more than `failure_share_max` of its last answers. An
    ejection lasts `ejection_s`, twice as long each time the target comes back no better.

    Before users' requests go to an ejected target again, `samples` probes must succeed. The margins
    are wide because an ejected target's blocks are recomputed, and a slow hit beats that. The
    margin for reads is wider, because one target may have in memory what another has on busy flash.
    For `substitutes_s` after an ejection the members that stood in for the target are asked too. An
    outage that the breaker handled counts against a target only if another happened less than
    `ejection_max_s` before.
    """

    breaker: BreakerOptions = BreakerOptions()
    review_s: float = 1.0
    samples: int = 8
    slow_factor: float = 3.0
    slow_margin_s: float = 0.02
    read_margin_s: float = 0.08
    failure_share_max: float = 0.1
    ejection_s: float = 30.0
    ejection_max_s: float = 300.0
    substitutes_s: float = 120.0


class BegunCall(msgspec.Struct):
    """A request in progress, to be passed to `end` once. Times in seconds of the clock."""

    target: str
    ticket: CallTicket
    generation: int
    began_s: float
    nbytes: int
    kind: CallKind = CallKind.QUESTION
    first_byte_at_s: float | None = None


def ejected_max(targets: int) -> int:
    """Return how many of a number of targets may be ejected at once: 30 %, but one of three."""
    return max(1, int(EJECTED_SHARE_MAX * targets)) if targets >= COMPARED_MIN else 0


class PoolHealth:
    """Health of all targets. Thread-safe; no method blocks.

    `keep` sets the targets, because the cap on ejections depends on their number. Latency is the
    time from sending a request to the first byte of its answer, so that sizes do not matter. Reads
    that found something are compared with such reads, questions with questions.
    """

    def __init__(self, clock: Clock, options: HealthOptions, chance: random.Random) -> None:
        self._clock = clock
        self._options = options
        self._chance = chance
        self._targets: dict[str, TargetStatistics] = {}
        self._listed: set[str] = set()
        self._reviewed_s = clock.now()
        self._lock = threading.Lock()

    def keep(self, targets: Collection[str], listed: Collection[str] | None = None) -> None:
        """Set the known targets and forget all others.

        `listed`: the targets that are members, which the review compares and the cap counts; by
        default all. The others are former members, asked for blocks that they may still hold.
        """
        with self._lock:
            wanted = set(targets)
            self._listed = wanted if listed is None else wanted & set(listed)
            for gone in self._targets.keys() - wanted:
                del self._targets[gone]
            for name in sorted(wanted):
                self._know(name)
            self._stay_below_cap()

    def trusted(self, target: str) -> bool:
        """Return whether users' requests may go to a target: not while it is being probed."""
        with self._lock:
            self._review()
            return self._is_well(self._know(target))

    def unsure(self, target: str) -> bool:
        """Return whether other members may hold a target's blocks: it is or was unhealthy."""
        with self._lock:
            known = self._know(target)
            if not self._is_well(known):
                known.last_unhealthy_s = self._clock.now()
            return self._clock.now() < known.last_unhealthy_s + self._options.substitutes_s

    def due_for_probe(self) -> list[str]:
        """Return the targets whose pause is over and that must be probed before users' requests."""
        with self._lock:
            return [
                name
                for name, target in self._targets.items()
                if self._needs_probe(target) and not self._ejected(target)
            ]

    def idle(self, for_s: float) -> list[str]:
        """Return healthy targets to which no call has ended for this long, to be probed."""
        with self._lock:
            now_s = self._clock.now()
            return [
                name
                for name, target in self._targets.items()
                if self._is_well(target) and now_s >= target.ended_s + for_s
            ]

    def down(self, for_s: float) -> set[str]:
        """Return the targets whose breaker has not been closed for this long."""
        with self._lock:
            now_s = self._clock.now()
            for target in self._targets.values():
                if target.breaker.phase() is BreakerPhase.CLOSED:
                    target.closed_s = now_s
            return {name for name, t in self._targets.items() if now_s > t.closed_s + for_s}

    def begin(
        self, target: str, nbytes: int, kind: CallKind = CallKind.QUESTION
    ) -> BegunCall | None:
        """Permit a request of `nbytes` (request and answer), or return None."""
        with self._lock:
            self._review()
            known = self._know(target)
            ticket = None if self._ejected(known) else known.breaker.begin()
            if ticket is None:
                return None
            known.in_flight_bytes += nbytes
            return BegunCall(target, ticket, known.generation, self._clock.now(), nbytes, kind)

    def on_progress(self, call: BegunCall, nbytes: int) -> None:
        """Record that bytes of an answer arrived, or bytes of a write were sent.

        0 bytes: the request was not sent until now, because too many of this host's were in flight.
        """
        with self._lock:
            if call.first_byte_at_s is None and nbytes:
                call.first_byte_at_s = self._clock.now()
            elif call.first_byte_at_s is None:
                call.began_s = self._clock.now()
            if known := self._targets.get(call.target):
                known.breaker.on_progress(call.ticket, nbytes)

    def end(self, call: BegunCall, ending: CallEnding) -> None:
        """Record how a call ended; its answer began at its first byte, or now."""
        with self._lock:
            known = self._targets.get(call.target)
            if known is None:
                return
            known.in_flight_bytes = max(0, known.in_flight_bytes - call.nbytes)
            before = known.breaker.phase()
            known.breaker.end(call.ticket, ending)
            now_s = known.ended_s = self._clock.now()
            if call.generation == known.generation:
                began_s = now_s if call.first_byte_at_s is None else call.first_byte_at_s
                known.learn(call.kind, ending, began_s - call.began_s, now_s - call.began_s)
            if before is BreakerPhase.HALF_OPEN and known.breaker.phase() is BreakerPhase.CLOSED:
                # The outage is over: forget it, unless another happened shortly before.
                if now_s >= known.recovered_s + self._options.ejection_max_s:
                    known.forget()
                known.recovered_s = now_s
            self._review()

    def choose(self, targets: Sequence[str]) -> str:
        """Return the one of two drawn at random that has fewer bytes in flight."""
        with self._lock:
            drawn = self._chance.sample(targets, min(2, len(targets)))
            known = self._targets
            return min(drawn, key=lambda name: known[name].in_flight_bytes if name in known else 0)

    def hedge_after_s(self) -> float | None:
        """Return when a request counts as late: the median over targets of their 95th percentiles.

        None until there is enough data. One slow target does not move it.
        """
        with self._lock:
            each = (t.delays.late_s for t in self._targets.values() if not self._ejected(t))
            known = [late_s for late_s in each if late_s is not None]
            return statistics.median_low(known) if known else None

    def reports(self) -> list[MemberStatus]:
        """Return the status of each target, by name."""
        with self._lock:
            self._review()
            return [
                MemberStatus(
                    target=name,
                    phase=target.breaker.phase(),
                    ejected=self._ejected(target),
                    in_flight_bytes=target.in_flight_bytes,
                    latency_s=target.answers[CallKind.QUESTION].latency_s,
                    first_byte_s=target.answers[CallKind.READ].latency_s,
                    late_s=target.delays.late_s,
                    failure_share=target.failure_share,
                    breaker_opened=target.breaker.opened,
                    ejections=target.ejections,
                )
                for name, target in sorted(self._targets.items())
            ]

    def _know(self, name: str) -> TargetStatistics:
        target = self._targets.get(name)
        if target is None:
            breaker = CircuitBreaker(self._clock, self._options.breaker, self._chance)
            target = self._targets[name] = TargetStatistics(breaker, self._clock.now())
        return target

    def _members(self) -> list[TargetStatistics]:
        return [target for name, target in self._targets.items() if name in self._listed]

    def _is_well(self, target: TargetStatistics) -> bool:
        return self._is_reviewable(target) and not target.on_probation

    def _needs_probe(self, target: TargetStatistics) -> bool:
        phase = target.breaker.phase()
        unverified = target.on_probation and target.fresh < self._options.samples
        return phase is BreakerPhase.HALF_OPEN or (unverified and phase is BreakerPhase.CLOSED)

    def _ejected(self, target: TargetStatistics) -> bool:
        return self._clock.now() < target.ejected_until_s

    def _review(self) -> None:
        """Eject outliers, the worst first, up to the cap."""
        now_s = self._clock.now()
        if now_s < self._reviewed_s + self._options.review_s:
            return
        self._reviewed_s = now_s
        members = self._members()
        out = sum(not self._is_reviewable(target) for target in members)
        room = ejected_max(len(members)) - out
        reviewable = filter(self._is_reviewable, self._targets.values())
        tried = [t for t in reviewable if t.on_probation and t.fresh >= self._options.samples]
        for target in self._outliers():
            if room <= 0 and not self._end_mildest_ejection(target):
                break
            self._eject(target, now_s)
            room = max(0, room - 1)
        for target in tried:
            target.on_probation = self._ejected(target)

    def _is_reviewable(self, target: TargetStatistics) -> bool:
        """Return whether the review covers a target: not ejected, and its breaker is closed."""
        return not self._ejected(target) and target.breaker.phase() is BreakerPhase.CLOSED

    def _end_mildest_ejection(self, worse: TargetStatistics) -> bool:
        """End the mildest ejection if `worse` is much slower; return whether one was ended."""
        ejected = [target for target in self._targets.values() if self._ejected(target)]
        mildest = min(ejected, key=lambda target: target.ejected_for_s, default=None)
        if mildest is None or worse.slowest_s() < MUCH_WORSE_FACTOR * mildest.ejected_for_s:
            return False
        mildest.ejected_until_s = self._clock.now()
        return True

    def _outliers(self) -> list[TargetStatistics]:
        """Return outliers among the targets with enough answers, the worst first."""
        members = [target for target in self._members() if self._is_reviewable(target)]
        found = dict.fromkeys(target for kind in CallKind for target in self._slow(members, kind))
        known = [target for target in members if target.fresh >= self._options.samples]
        if len(known) >= COMPARED_MIN:
            found |= dict.fromkeys(filter(self._failing, known))
        return sorted(found, key=lambda t: (t.failure_share, t.slowest_s()), reverse=True)

    def _slow(self, members: Sequence[TargetStatistics], kind: CallKind) -> list[TargetStatistics]:
        """Return the targets whose answers of a kind take much longer than the others'."""
        options = self._options
        margin_s = options.read_margin_s if kind is CallKind.READ else options.slow_margin_s
        seconds = {
            target: target.answers[kind].latency_s or 0.0
            for target in members
            if kind in target.answers and target.answers[kind].fresh >= options.samples
        }
        if len(seconds) < COMPARED_MIN:
            return []
        median_s = statistics.median_low(seconds.values())
        slow_s = max(options.slow_factor * median_s, median_s + margin_s)
        return [target for target, latency_s in seconds.items() if latency_s > slow_s]

    def _failing(self, target: TargetStatistics) -> bool:
        return target.failure_share > self._options.failure_share_max

    def _eject(self, target: TargetStatistics, now_s: float) -> None:
        longest_s = self._options.ejection_max_s
        relapsed = target.ejections and now_s < target.ejected_until_s + longest_s
        again_s = min(2 * target.ejection_s, longest_s)
        target.ejection_s = again_s if relapsed else self._options.ejection_s
        target.ejected_until_s = now_s + target.ejection_s
        target.on_probation = True
        target.ejections += 1
        target.ejected_for_s = math.inf if self._failing(target) else target.slowest_s()
        target.forget()

    def _stay_below_cap(self) -> None:
        """End the longest ejections if a smaller pool has a smaller cap."""
        ejected = [target for target in self._members() if self._ejected(target)]
        ejected.sort(key=lambda target: target.ejected_until_s)
        for target in ejected[: max(0, len(ejected) - ejected_max(len(self._listed)))]:
            target.ejected_until_s, target.on_probation = self._clock.now(), False
