"""Estimates of tiers and engines: the input of the planner.

The planner (`holdfast.plan.planner`) decides; this module measures. It has its own lock, because
the threads that move bytes report here while others serve. No I/O.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from holdfast.clock import Clock
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
from holdfast.status import ComputeCost, DeliverySpeed, EngineSpeed, TierSpeed

ENGINES_MAX = 64
"""Most engines whose costs are kept; beyond it, the domain with most loses its least recent one."""

DELIVERY_DEFAULT = TierEstimate(1e-3, 5e9)
"""Loading from the node's memory into an engine's pages, until the engine has reported a load."""

PROBE_S = 5.0
"""A tier that no plan wants is read this often all the same: it may have recovered."""

_READS_MIN = 4
"""Reads of a tier from which on its estimate counts as measured."""

_UNKNOWN_S = 1e-9
"""Seconds that a tier saves per byte, if it or the next one was not measured."""

USUAL_BYTES = 64 * MIB
"""Bytes of a typical fetch: of two estimates, the one with the shorter time for them is taken."""


class EngineId(NamedTuple):
    """An engine in the estimates: its name, its fingerprint and its domain (both hex).

    An empty domain, from an earlier version's file, stands for every domain that has no own data.
    """

    name: str
    fingerprint: str
    domain: str = ""


class EngineProcess(NamedTuple):
    """One process of an engine, with a queue of its own; `process` is its id, 0 if not known."""

    engine: EngineId
    process: int = 0


class EngineStep(NamedTuple):
    """One step of an engine: tokens computed, the context in front of them, seconds."""

    new: float
    context: float
    seconds: float


class _EngineFits:
    """Fits of one engine: prefill time, and the time of handing blocks over."""

    def __init__(self) -> None:
        self.prefill = PrefillFit()
        self.delivery = DeliveryFit(DELIVERY_DEFAULT)


class Estimates:
    """Estimates of `names` (tiers, fastest first) and of engines.

    `share` returns a domain's weight on every tier relative to other domains that wait there.
    `credit` returns how many bytes of a tier a domain may read before other domains.
    """

    def __init__(
        self,
        names: Sequence[str],
        clock: Clock,
        *,
        share: Callable[[bytes], float] = lambda _: 1.0,
        credit: Callable[[int, bytes], float] = lambda *_: 0.0,
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._names = list(names)
        self._meters = [QueueMeter(HOST_DEFAULT), *(QueueMeter() for _ in self._names[1:])]
        self._engines: OrderedDict[EngineId, _EngineFits] = OrderedDict()
        self._probed = [0.0 for _ in self._names]
        self._queued_bytes = [Counter[bytes]() for _ in self._names]
        self._share = share
        self._credit = credit
        self.changes = 0
        """Number of observations so far; `EstimatesFile` saves if it has changed."""

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
        """Return the seconds saved by reading `nbytes` from a tier and not from the next lower one.

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

    def cost(self, engine: EngineId) -> tuple[PrefillCost | None, TierEstimate]:
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

    def computed(self, engine: EngineId, steps: Sequence[EngineStep]) -> None:
        """Learn from an engine's steps."""
        with self._lock:
            fits = self._fits_of(engine)
            for step in steps:
                fits.prefill.observe(*step)
            fits.prefill.coefficients()
            self.changes += len(steps)

    def delivered(self, engine: EngineId, nbytes: int, seconds: float) -> None:
        """Learn how long an engine took to load bytes of the node's memory into its pages."""
        with self._lock:
            delivery = self._fits_of(engine).delivery
            delivery.observe(nbytes, seconds)
            delivery.coefficients()
            self.changes += 1

    def tier_speeds(self) -> list[TierSpeed]:
        """Return the estimates of all tiers, fastest tier first."""
        with self._lock:
            now = self._clock.now()
            return [
                TierSpeed(name, meter.fit.count, **meter.estimate(now)._asdict())
                for name, meter in zip(self._names, self._meters, strict=True)
            ]

    def engine_speeds(self) -> list[EngineSpeed]:
        """Return the estimates of all engines."""
        with self._lock:
            return [
                EngineSpeed(
                    engine=engine.name,
                    fingerprint=engine.fingerprint,
                    steps=fits.prefill.count,
                    cost=fits.prefill.cost and ComputeCost(*fits.prefill.cost),
                    delivery=DeliverySpeed(*fits.delivery.estimate()),
                )
                for engine, fits in self._engines.items()
            ]

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
            engines = OrderedDict[EngineId, _EngineFits]()
            for one in data["engines"][-ENGINES_MAX:]:
                whose = str(one["engine"]), str(one["fingerprint"]), str(one.get("domain", ""))
                fits = engines[EngineId(*whose)] = _EngineFits()
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

    def _fits_of(self, engine: EngineId) -> _EngineFits:
        fits = self._engines.setdefault(engine, _EngineFits())
        self._engines.move_to_end(engine)
        if len(self._engines) > ENGINES_MAX:  # of the domain with the most, or one forgets for all
            (domain, _), *_ = Counter(each.domain for each in self._engines).most_common(1)
            del self._engines[next(each for each in self._engines if each.domain == domain)]
        return fits
