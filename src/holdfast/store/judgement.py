"""What a store knows about cost: its tiers, the engines, and how its plans came out.

The planner decides (`holdfast.plan.planner`); here is what it decides from. A lock of its own: the
threads that move bytes report here while others serve. Nothing here does I/O.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from holdfast.clock import Clock
from holdfast.limits import MIB
from holdfast.plan.cost import (
    HOST_DEFAULT,
    DeliveryFit,
    PrefillCost,
    PrefillFit,
    TierEstimate,
    TierFit,
)
from holdfast.plan.meter import Meter
from holdfast.plan.planner import Plan
from holdfast.policy.fair_queue import LEAST
from holdfast.store.hindsight import right

PLANS_KEPT = 256
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


class Engine(NamedTuple):
    """Who computes: an engine's name, the fingerprint of what it computes, its domain (both hex).

    No domain: as an older version noted it, and then for all of them until they told themselves.
    """

    name: str
    fingerprint: str
    domain: str = ""


class Step(NamedTuple):
    """One step of an engine: tokens computed, the context in front of them, seconds."""

    new: float
    context: float
    seconds: float


class Ending(NamedTuple):
    """How a plan ended: seconds until all was loaded and until the first token; 0: not known."""

    plan: int
    loaded_s: float
    first_token_s: float


@dataclass
class Record:
    """One plan: what was asked, what was expected, and what came of it. Times in seconds."""

    engine: Engine
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


class _Learnt:
    """What is known about one engine: what it takes to compute, and to be handed blocks."""

    def __init__(self) -> None:
        self.prefill = PrefillFit()
        self.delivery = DeliveryFit(DELIVERY_DEFAULT)


class Judgement:
    """Estimates of `names` (tiers, fastest first) and engines, and the last plans."""

    def __init__(self, names: Sequence[str], clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._names = list(names)
        self._meters = [Meter(HOST_DEFAULT), *(Meter() for _ in self._names[1:])]
        self._engines: OrderedDict[Engine, _Learnt] = OrderedDict()
        self._plans: OrderedDict[int, Record] = OrderedDict()
        self._probed = [0.0 for _ in self._names]
        self._lines = [Counter[bytes]() for _ in self._names]
        self.share: Callable[[bytes], float] = lambda _: 1.0
        """What weight a domain has on every tier beside the others in line."""
        self.credit: Callable[[int, bytes], float] = _no_credit
        """How many bytes of a tier a domain would be served before others."""
        self._number = 0
        self.changes = 0

    # Tiers

    def estimates(self, domain: bytes) -> list[TierEstimate]:
        """Return each tier as it is now for a domain, with its line."""
        ahead = [self.credit(tier, domain) for tier in range(len(self._names))]
        with self._lock:
            now = self._clock.now()
            return [
                self._for(domain, meter.estimate(now), line, credit)
                for meter, line, credit in zip(self._meters, self._lines, ahead, strict=True)
            ]

    def speed(self, tier: int) -> float:
        """Return what a tier gives, in bytes a second, whoever waits for it."""
        with self._lock:
            return self._meters[tier].fit.estimate(0).bytes_per_s

    def reads(self, tier: int) -> int:
        """Return how many reads of a tier the estimate is made from."""
        with self._lock:
            return self._meters[tier].fit.reads

    def saved_s(self, tier: int, nbytes: int) -> float:
        """Return how much sooner so many bytes come from a tier than from the next one below it.

        As measured, without what is in line; until both were read, the same for every byte.
        """
        with self._lock:
            both = self._meters[tier : tier + 2]
            if len(both) == 1 or min(meter.fit.reads for meter in both) < _READS_MIN:
                return _UNKNOWN_S * nbytes
            here, next_s = (meter.fit.estimate().seconds(nbytes) for meter in both)
            return next_s - here

    def asked(self, tier: int, nbytes: int, domain: bytes) -> None:
        """Note bytes that a tier will be read for."""
        with self._lock:
            self._lines[tier][domain] += nbytes
            self._meters[tier].asked(nbytes, self._clock.now())

    def arrived(self, tier: int, nbytes: int, domain: bytes, *, of: int) -> None:
        """Note that of so many bytes asked for, this many are there, verified."""
        with self._lock:
            self.changes += 1
            self._leave(tier, of, domain)
            self._meters[tier].arrived(nbytes, of, self._clock.now())

    def dropped(self, tier: int, nbytes: int, domain: bytes) -> None:
        """Note bytes that nobody waits for any more, and that nobody began to read."""
        with self._lock:
            self._leave(tier, nbytes, domain)
            self._meters[tier].dropped(nbytes, self._clock.now())

    def verified(self, nbytes: int, seconds: float) -> None:
        """Note how long it took to check what lay in the host's memory."""
        with self._lock:
            self._meters[0].fit.observe(nbytes, seconds)

    def settle(self) -> None:
        """Fit what was observed of tiers now, so that who asks for an estimate need not wait."""
        with self._lock:
            for meter in self._meters:
                meter.fit.settle()

    def wants_probe(self, tier: int) -> bool:
        """Return whether a tier was neither read nor probed for a while; asking counts as one."""
        with self._lock:
            meter, now = self._meters[tier], self._clock.now()
            last = max(self._probed[tier], meter.read_at or 0.0)
            if meter.queued_bytes or now - last < PROBE_S:
                return False
            self._probed[tier] = now
            return True

    # Engines

    def cost(self, engine: Engine) -> tuple[PrefillCost | None, TierEstimate]:
        """Return what computing costs an engine, if it told, and what being handed bytes does."""
        with self._lock:
            learnt = self._engines.get(engine) or self._engines.get(engine._replace(domain=""))
            if learnt is None:
                return None, DELIVERY_DEFAULT
            return learnt.prefill.cost, learnt.delivery.estimate()

    def token_s(self, fingerprint: str, domain: str = "") -> float | None:
        """Return what computing a token takes a domain's engines; None if none of them told."""
        with self._lock:
            costs = [
                learnt.prefill.cost
                for engine, learnt in self._engines.items()
                if engine.fingerprint == fingerprint and engine.domain in ("", domain)
            ]
        told = [cost.b for cost in costs if cost is not None and cost.b > 0]
        return sum(told) / len(told) if told else None

    def computed(self, engine: Engine, steps: Sequence[Step]) -> None:
        """Learn from an engine's steps."""
        with self._lock:
            learnt = self._learnt(engine)
            for step in steps:
                learnt.prefill.observe(*step)
            learnt.prefill.settle()
            self.changes += len(steps)

    # Plans

    def planned(self, record: Record, instead_of: int = 0) -> int:
        """Keep a plan; return its number. `instead_of` was asked for the same prompt."""
        with self._lock:
            if self._own(instead_of, record.engine):
                del self._plans[instead_of]
            self._number += 1
            record.number, record.at = self._number, self._clock.now()
            self._plans[self._number] = record
            while len(self._plans) > PLANS_KEPT:
                self._plans.popitem(last=False)
            return self._number

    def fetched(
        self, engine: Engine, number: int, blocks: int, seconds: float, outcome: str
    ) -> None:
        """Note what a plan's fetch brought; the slowest of several ranks counts."""
        with self._lock:
            record = self._own(number, engine)
            if record is not None and seconds >= (record.fetched_s or 0.0):
                record.landed, record.fetched_s, record.outcome = blocks, seconds, outcome

    def ended(self, engine: Engine, ending: Ending) -> None:
        """Note what the engine saw of a plan, and learn how long the hand-over takes."""
        with self._lock:
            record = self._own(ending.plan, engine)
            if record is None:
                return
            if ending.first_token_s > 0:
                record.first_token_s = ending.first_token_s
            whole = record.landed is not None and record.landed * record.block_bytes
            if whole and ending.loaded_s > (record.fetched_s or 0.0):
                handed_s = ending.loaded_s - (record.fetched_s or 0.0)
                delivery = self._learnt(engine).delivery
                delivery.observe(whole, handed_s)
                delivery.settle()

    def plans(self) -> dict[str, Any]:
        """Return the last plans, newest first, and what they were made from, as plain data."""
        with self._lock:
            now = self._clock.now()
            records = [_told(record, now) for record in reversed(self._plans.values())]
            tiers = [
                {"tier": name, "reads": meter.fit.reads, **meter.estimate(now)._asdict()}
                for name, meter in zip(self._names, self._meters, strict=True)
            ]
            engines = [
                {
                    "engine": engine.name,
                    "fingerprint": engine.fingerprint,
                    "steps": learnt.prefill.steps,
                    "cost": learnt.prefill.cost and learnt.prefill.cost._asdict(),
                    "delivery": learnt.delivery.estimate()._asdict(),
                }
                for engine, learnt in self._engines.items()
            ]
        return {
            "plans": records,
            "right": right(records),
            "tiers": tiers,
            "engines": engines,
        }

    # Between one process and the next

    def as_data(self) -> dict[str, Any]:
        """Return what was learnt of tiers and engines as plain data."""
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
                        "prefill": learnt.prefill.as_data(),
                        "delivery": learnt.delivery.as_data(),
                    }
                    for engine, learnt in self._engines.items()
                ],
            }

    def restore(self, data: Mapping[str, Any]) -> None:
        """Know again what `as_data` returned; ValueError, and nothing changed, if it did not."""
        try:
            tiers = {
                name: TierFit.from_data(data["tiers"][name], meter.fit.default)
                for name, meter in zip(self._names, self._meters, strict=True)
                if name in data["tiers"]
            }
            engines = OrderedDict[Engine, _Learnt]()
            for one in data["engines"][-ENGINES_MAX:]:
                whose = str(one["engine"]), str(one["fingerprint"]), str(one.get("domain", ""))
                learnt = engines[Engine(*whose)] = _Learnt()
                learnt.prefill = PrefillFit.from_data(one["prefill"])
                learnt.delivery = DeliveryFit.from_data(one["delivery"], DELIVERY_DEFAULT)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not what a store learnt: {error!r}") from error
        with self._lock:
            self._engines = engines
            for name, meter in zip(self._names, self._meters, strict=True):
                meter.fit = tiers.get(name, meter.fit)

    def _leave(self, tier: int, nbytes: int, domain: bytes) -> None:
        line = self._lines[tier]
        line[domain] -= nbytes
        if not line[domain]:
            del line[domain]

    def _for(
        self, domain: bytes, estimate: TierEstimate, line: Counter[bytes], credit: float
    ) -> TierEstimate:
        """Return what a domain may expect of a tier that it shares by turns.

        It waits behind itself at its share of the speed, or behind everybody, if that is over
        sooner. With credit for one more fetch it has nearly all of the speed.
        """
        if not line or line.keys() == {domain}:
            return estimate
        own = self.share(domain)
        part = own / (own + sum(self.share(other) for other in line if other != domain))
        if credit >= line[domain] + USUAL_BYTES:
            part = max(part, 1.0 - LEAST)
        alone = estimate._replace(
            bytes_per_s=estimate.bytes_per_s * part, queued_bytes=line[domain]
        )
        return min(estimate, alone, key=lambda each: each.seconds(USUAL_BYTES))

    def _learnt(self, engine: Engine) -> _Learnt:
        learnt = self._engines.setdefault(engine, _Learnt())
        self._engines.move_to_end(engine)
        if len(self._engines) > ENGINES_MAX:  # of the domain with the most, or one forgets for all
            (domain, _), *_ = Counter(each.domain for each in self._engines).most_common(1)
            del self._engines[next(each for each in self._engines if each.domain == domain)]
        return learnt

    def _own(self, number: int, engine: Engine) -> Record | None:
        """Return a plan if it is that engine's: numbers can be guessed."""
        record = self._plans.get(number)
        if record is None or record.engine._replace(fingerprint=engine.fingerprint) != engine:
            return None  # each rank has a fingerprint of its own
        return record


def _no_credit(tier: int, domain: bytes) -> float:
    del tier, domain
    return 0.0


def _told(record: Record, now: float) -> dict[str, Any]:
    plan = record.plan
    return {
        "plan": record.number,
        "age_s": now - record.at,
        "engine": record.engine.name,
        "fingerprint": record.engine.fingerprint,
        "prompt_tokens": record.prompt_tokens,
        "have_tokens": record.have_tokens,
        "held_blocks": record.held,
        "blocks": plan.blocks,
        "reason": plan.reason,
        "expected": {"fetched_s": plan.fetch_s, "first_token_s": plan.expected_s},
        "recompute_s": plan.recompute_s,
        "deadline_s": plan.deadline_s,
        "actual": {"fetched_s": record.fetched_s, "first_token_s": record.first_token_s},
        "landed_blocks": record.landed,
        "outcome": record.outcome,
    }
