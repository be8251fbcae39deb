"""Estimates of tiers and engines, and the plan log: the input of the planner.

The planner (`holdfast.plan.planner`) decides; this module measures. It has its own lock, because
the threads that move bytes report here while others serve. No I/O.
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from holdfast.clock import Clock
from holdfast.errors import NotFollowed
from holdfast.fairness.fair_queue import MIN_SHARE
from holdfast.limits import MIB
from holdfast.plan.cost import (
    HOST_DEFAULT,
    DeliveryFit,
    PrefillCost,
    PrefillFit,
    TierEstimate,
    TierFit,
)
from holdfast.plan.meter import QueueMeter
from holdfast.plan.planner import Plan
from holdfast.store.activity import Activity

PLANS_KEPT = 256
PLAN_NUMBER_BITS = 53
"""Random bits of a plan's number: what a JSON number holds exactly."""

ENGINES_MAX = 64
"""Engines whose speed is remembered; of the domain with most the one not seen for longest goes."""

DELIVERY_DEFAULT = TierEstimate(1e-3, 5e9)
"""From the node's memory into an engine's pages, until it told."""

PROBE_S = 5.0
"""A tier that no plan wants is read this often all the same: it may have recovered."""

_READS_MIN = 4
_UNKNOWN_S = 1e-9

USUAL_BYTES = 64 * MIB
"""What a fetch is taken to read, where it has to be known what holds it up."""

_ROUGHLY_RIGHT = 0.25


class EngineCosts(NamedTuple):
    """Identity of an engine in the estimates: its name, its fingerprint and its domain (both hex).

    An empty domain, from an earlier version's file, stands for every domain that has no own data.
    """

    name: str
    fingerprint: str
    domain: str = ""


class EngineStep(NamedTuple):
    """One step of an engine: tokens computed, the context in front of them, seconds."""

    new: float
    context: float
    seconds: float


class PlanEnding(NamedTuple):
    """How a plan ended: seconds until all was loaded and until the first token; 0: not known."""

    plan: int
    loaded_s: float
    first_token_s: float


@dataclass
class PlanRecord:
    """One plan: its question, its expectation and its outcome. Times in seconds.

    `first_block`: the first block that the engine does not have. `not_followed`: why the plan was
    not carried out; None if it was, or if its end is not known yet.
    """

    engine: EngineCosts
    prompt_tokens: int
    have_tokens: int
    held: int
    plan: Plan
    block_bytes: int
    number: int = 0
    at: float = 0.0
    landed: int | None = None
    fetched_s: float | None = None
    outcome: str = ""
    first_token_s: float | None = None
    first_block: int = 0
    not_followed: NotFollowed | None = None


class _EngineFits:
    """Fits of one engine: prefill time, and the time of handing blocks over."""

    def __init__(self) -> None:
        self.prefill = PrefillFit()
        self.delivery = DeliveryFit(DELIVERY_DEFAULT)


class Estimates:
    """Estimates of `names` (tiers, fastest first) and of engines, and the last plans.

    `activity` counts how plans end.
    `share` returns a domain's weight on every tier relative to other domains that wait there.
    `credit` returns how many bytes of a tier a domain may read before other domains.
    """

    def __init__(
        self,
        names: Sequence[str],
        clock: Clock,
        activity: Activity | None = None,
        *,
        share: Callable[[bytes], float] = lambda _: 1.0,
        credit: Callable[[int, bytes], float] = lambda *_: 0.0,
    ) -> None:
        self._clock = clock
        self._activity = activity or Activity()
        self._lock = threading.Lock()
        self._names = list(names)
        self._meters = [QueueMeter(HOST_DEFAULT), *(QueueMeter() for _ in self._names[1:])]
        self._engines: OrderedDict[EngineCosts, _EngineFits] = OrderedDict()
        self._plans: OrderedDict[int, PlanRecord] = OrderedDict()
        self._probed = [0.0 for _ in self._names]
        self._queued_bytes = [Counter[bytes]() for _ in self._names]
        self._share = share
        self._credit = credit
        self.changes = 0

    # Tiers

    def estimates(self, domain: bytes) -> list[TierEstimate]:
        """Return each tier's current estimate for a domain, its queue included."""
        ahead_bytes = [self._credit(tier, domain) for tier in range(len(self._names))]
        with self._lock:
            now, found = self._clock.now(), list[TierEstimate]()
            tiers = zip(self._meters, self._queued_bytes, ahead_bytes, strict=True)
            for meter, queued, credit in tiers:
                estimate = meter.estimate(now)
                if queued and queued.keys() != {domain}:
                    # The domain waits behind its own reads at its share of the speed, or behind
                    # all reads, if that is sooner. With credit for one more fetch it has nearly all
                    # of the speed.
                    own = self._share(domain)
                    others = sum(self._share(other) for other in queued if other != domain)
                    part = own / (own + others)
                    if credit >= queued[domain] + USUAL_BYTES:
                        part = max(part, 1.0 - MIN_SHARE)
                    alone = estimate._replace(
                        bytes_per_s=estimate.bytes_per_s * part, queued_bytes=queued[domain]
                    )
                    estimate = min(estimate, alone, key=lambda each: each.seconds(USUAL_BYTES))
                found.append(estimate)
            return found

    def speed(self, tier: int) -> float:
        """Return a tier's bandwidth in bytes a second, without its queue."""
        with self._lock:
            return self._meters[tier].fit.estimate(0).bytes_per_s

    def reads(self, tier: int) -> int:
        """Return how many reads a tier's estimate is made from."""
        with self._lock:
            return self._meters[tier].fit.count

    def saved_s(self, tier: int, nbytes: int) -> float:
        """Return how much sooner so many bytes come from a tier than from the next lower one.

        From measurements, without queues; until both tiers were read, the same for every byte.
        """
        with self._lock:
            both = self._meters[tier : tier + 2]
            if len(both) == 1 or min(meter.fit.count for meter in both) < _READS_MIN:
                return _UNKNOWN_S * nbytes
            here, next_s = (meter.fit.estimate().seconds(nbytes) for meter in both)
            return next_s - here

    def asked(self, tier: int, nbytes: int, domain: bytes) -> None:
        """Record bytes queued for reading from a tier."""
        with self._lock:
            self._queued_bytes[tier][domain] += nbytes
            self._meters[tier].asked(nbytes, self._clock.now())

    def arrived(self, tier: int, nbytes: int, domain: bytes, *, of: int) -> None:
        """Record that this many of the queued bytes arrived and were verified."""
        with self._lock:
            self.changes += 1
            self._leave(tier, of, domain)
            self._meters[tier].arrived(nbytes, of, self._clock.now())

    def dropped(self, tier: int, nbytes: int, domain: bytes) -> None:
        """Record that queued bytes were cancelled before their read began."""
        with self._lock:
            self._leave(tier, nbytes, domain)
            self._meters[tier].dropped(nbytes, self._clock.now())

    def verified(self, nbytes: int, seconds: float) -> None:
        """Record how long verifying bytes in host memory took."""
        with self._lock:
            self._meters[0].fit.observe(nbytes, seconds)

    def update_fits(self) -> None:
        """Update the fits of tiers now, so that the next estimate need not."""
        with self._lock:
            for meter in self._meters:
                meter.fit.coefficients()

    def wants_probe(self, tier: int) -> bool:
        """Return whether a tier was not read or probed for a while; the call counts as a probe."""
        with self._lock:
            meter, now = self._meters[tier], self._clock.now()
            last = max(self._probed[tier], meter.read_at or 0.0)
            if meter.queued_bytes or now - last < PROBE_S:
                return False
            self._probed[tier] = now
            return True

    # Engines

    def cost(self, engine: EngineCosts) -> tuple[PrefillCost | None, TierEstimate]:
        """Return an engine's costs of computing (if it reported any) and of being handed bytes."""
        with self._lock:
            fits = self._engines.get(engine) or self._engines.get(engine._replace(domain=""))
            if fits is None:
                return None, DELIVERY_DEFAULT
            return fits.prefill.cost, fits.delivery.estimate()

    def token_s(self, fingerprint: str, domain: str = "") -> float | None:
        """Return the compute time of a token of a domain's engines; None if none reported."""
        with self._lock:
            costs = [
                fits.prefill.cost
                for engine, fits in self._engines.items()
                if engine.fingerprint == fingerprint and engine.domain in ("", domain)
            ]
        told = [cost.b for cost in costs if cost is not None and cost.b > 0]
        return sum(told) / len(told) if told else None

    def computed(self, engine: EngineCosts, steps: Sequence[EngineStep]) -> None:
        """Learn from an engine's steps."""
        with self._lock:
            fits = self._fits_of(engine)
            for step in steps:
                fits.prefill.observe(*step)
            fits.prefill.coefficients()
            self.changes += len(steps)

    # Plans

    def planned(self, record: PlanRecord, instead_of: int = 0) -> int:
        """Record a plan and return its number. `instead_of`: the plan that it replaces."""
        with self._lock:
            if self._own(instead_of, record.engine):
                del self._plans[instead_of]
            # A random number: a counter would reveal to a session how much others plan.
            number = 0
            while not number or number in self._plans:
                number = secrets.randbits(PLAN_NUMBER_BITS)
            record.number, record.at = number, self._clock.now()
            self._plans[number] = record
            while len(self._plans) > PLANS_KEPT:
                self._plans.popitem(last=False)
            return number

    def fetched(
        self, engine: EngineCosts, number: int, blocks: int, seconds: float, outcome: str
    ) -> None:
        """Record the result of a plan's fetch; of several ranks the slowest counts."""
        with self._lock:
            record = self._own(number, engine)
            if record is not None and seconds >= (record.fetched_s or 0.0):
                if record.not_followed is NotFollowed.NOT_FETCHED:
                    record.not_followed = None  # the engine had stopped waiting for it
                record.landed, record.fetched_s, record.outcome = blocks, seconds, outcome

    def ended(self, engine: EngineCosts, ending: PlanEnding) -> None:
        """Record what the engine saw of a plan, and fit the hand-over time.

        A plan to fetch without a fetch is not used for fitting.
        """
        with self._lock:
            record = self._own(ending.plan, engine)
            if record is None:
                return
            if record.not_followed is NotFollowed.GONE:
                record.not_followed = None  # it has come back over another connection
            is_first = record.first_token_s is None
            if ending.first_token_s > 0:
                record.first_token_s = ending.first_token_s
            if record.landed is None and record.plan.blocks > record.first_block:
                record.not_followed = record.not_followed or NotFollowed.NOT_FETCHED
            if is_first and record.first_token_s is not None:
                if record.not_followed is not None:
                    self._activity.plan_not_followed(str(record.not_followed))
                elif record.plan.blocks > record.first_block:
                    self._activity.plan_ended(
                        record.plan.expected_s, record.first_token_s, record.plan.recompute_s
                    )
            if record.not_followed is not None:
                return
            whole = record.landed is not None and record.landed * record.block_bytes
            if whole and ending.loaded_s > (record.fetched_s or 0.0):
                handed_s = ending.loaded_s - (record.fetched_s or 0.0)
                delivery = self._fits_of(engine).delivery
                delivery.observe(whole, handed_s)
                delivery.coefficients()

    def not_followed(
        self, engine: EngineCosts, number: int, why: NotFollowed, first_token_s: float = 0.0
    ) -> None:
        """Note that an engine did not carry out a plan; `first_token_s` 0: there was no token."""
        with self._lock:
            record = self._own(number, engine)
            if record is not None:
                if record.not_followed is None and record.first_token_s is None:
                    self._activity.plan_not_followed(str(why))
                record.not_followed = why
                record.first_token_s = first_token_s if first_token_s > 0 else None

    def engine_gone(self, engine: EngineCosts, numbers: Iterable[int]) -> None:
        """Record that the connection of these plans ended; plans with a first token stay."""
        with self._lock:
            for number in numbers:
                record = self._own(number, engine)
                if record is not None and record.first_token_s is None:
                    record.not_followed = record.not_followed or NotFollowed.GONE

    def plans(self) -> dict[str, Any]:
        """Return the last plans, newest first, and the estimates behind them, as plain data."""
        with self._lock:
            now = self._clock.now()
            records = [
                {
                    "plan": record.number,
                    "age_s": now - record.at,
                    "engine": record.engine.name,
                    "fingerprint": record.engine.fingerprint,
                    "prompt_tokens": record.prompt_tokens,
                    "have_tokens": record.have_tokens,
                    "held_blocks": record.held,
                    "blocks": record.plan.blocks,
                    "reason": record.plan.reason,
                    "expected": {
                        "fetched_s": record.plan.fetch_s,
                        "first_token_s": record.plan.expected_s,
                    },
                    "recompute_s": record.plan.recompute_s,
                    "deadline_s": record.plan.deadline_s,
                    "actual": {
                        "fetched_s": record.fetched_s,
                        "first_token_s": record.first_token_s,
                    },
                    "landed_blocks": record.landed,
                    "outcome": record.outcome,
                    "not_followed": record.not_followed and str(record.not_followed),
                }
                for record in reversed(self._plans.values())
            ]
            accuracy = plan_accuracy(self._plans.values())
            tiers = [
                {"tier": name, "reads": meter.fit.count, **meter.estimate(now)._asdict()}
                for name, meter in zip(self._names, self._meters, strict=True)
            ]
            engines = [
                {
                    "engine": engine.name,
                    "fingerprint": engine.fingerprint,
                    "steps": fits.prefill.count,
                    "cost": fits.prefill.cost and fits.prefill.cost._asdict(),
                    "delivery": fits.delivery.estimate()._asdict(),
                }
                for engine, fits in self._engines.items()
            ]
        return {"plans": records, "right": accuracy, "tiers": tiers, "engines": engines}

    # Between one process and the next

    def as_data(self) -> dict[str, Any]:
        """Return the fits of tiers and engines as plain data."""
        with self._lock:
            return {
                "tiers": {
                    name: meter.fit.as_data()
                    for name, meter in zip(self._names, self._meters, strict=True)
                },
                "engines": [
                    {
                        "engine": engine.name,
                        "fingerprint": engine.fingerprint,
                        "domain": engine.domain,
                        "prefill": fits.prefill.as_data(),
                        "delivery": fits.delivery.as_data(),
                    }
                    for engine, fits in self._engines.items()
                ],
            }

    def restore(self, data: Mapping[str, Any]) -> None:
        """Restore what `as_data` returned; raises ValueError, changing nothing, for other data."""
        try:
            tiers = {
                name: TierFit(meter.fit.default)
                for name, meter in zip(self._names, self._meters, strict=True)
                if name in data["tiers"]
            }
            for name, fit in tiers.items():
                fit.restore(data["tiers"][name])
            engines = OrderedDict[EngineCosts, _EngineFits]()
            for one in data["engines"][-ENGINES_MAX:]:
                whose = str(one["engine"]), str(one["fingerprint"]), str(one.get("domain", ""))
                fits = engines[EngineCosts(*whose)] = _EngineFits()
                fits.prefill.restore(one["prefill"])
                fits.delivery.restore(one["delivery"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a store's estimates: {error!r}") from error
        with self._lock:
            self._engines = engines
            for name, meter in zip(self._names, self._meters, strict=True):
                meter.fit = tiers.get(name, meter.fit)

    def _leave(self, tier: int, nbytes: int, domain: bytes) -> None:
        queued = self._queued_bytes[tier]
        queued[domain] -= nbytes
        if not queued[domain]:
            del queued[domain]

    def _fits_of(self, engine: EngineCosts) -> _EngineFits:
        fits = self._engines.setdefault(engine, _EngineFits())
        self._engines.move_to_end(engine)
        if len(self._engines) > ENGINES_MAX:  # of the domain with the most, or one forgets for all
            (domain, _), *_ = Counter(each.domain for each in self._engines).most_common(1)
            del self._engines[next(each for each in self._engines if each.domain == domain)]
        return fits

    def _own(self, number: int, engine: EngineCosts) -> PlanRecord | None:
        """Return a plan if it is that engine's; a peer may send any number."""
        record = self._plans.get(number)
        if record is None or record.engine._replace(fingerprint=engine.fingerprint) != engine:
            return None  # each rank has a fingerprint of its own
        return record


def plan_accuracy(records: Iterable[PlanRecord]) -> dict[str, Any]:
    """Return how many plans ended, and how far their first tokens were from the expected time.

    All figures but the last count only plans that were carried out, whose first token came, and
    whose time was expected: not plans for engines that have not reported their speed.
    """
    not_followed, late, errors = 0, 0, list[float]()
    for record in records:
        if record.not_followed is not None:
            not_followed += 1
        elif record.first_token_s and record.plan.expected_s:
            errors.append(abs(record.first_token_s / record.plan.expected_s - 1.0))
            late += record.outcome == "late"
    return {
        "ended": len(errors),
        "within_25_percent": sum(error <= _ROUGHLY_RIGHT for error in errors),
        "median_error": median(errors) if errors else None,
        "late": late,
        "not_followed": not_followed,
    }
