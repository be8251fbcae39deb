"""Cost models of prefill and of tier reads, fitted online from measurements.

Prefill takes `a + b*new + c*new*(context + new/2)` seconds: a fixed cost per step, the layers
(linear), and the attention (each new token attends to the context and, on average, to half of the
new tokens). A tier read takes `latency + bytes / bandwidth`. Both are fitted online from
observations (`holdfast.plan.fit`). Pure: no clock, no I/O.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from holdfast.plan.fit import Belief, OnlineFit

PREFILL_OBSERVATIONS_MIN = 3
"""Steps observed before there is a fit."""

PREFILL_HALF_LIFE = 512
TIER_HALF_LIFE = 12
"""Half-lives, in observations. A few reads must show that a disk is slow; an engine is steady."""

PREFILL_KEPT = 192
TIER_KEPT = 32
"""Observations kept. Few for a tier, because it is fitted again between two fetches."""

BYTES_PER_S_MAX = 1e15


class PrefillCost(NamedTuple):
    """Coefficients of prefill time, in seconds: `a` a step, `b` a new token, `c` a token pair."""

    a: float
    b: float
    c: float

    def seconds(self, new: float, context: float = 0.0) -> float:
        """Return the time to compute `new` tokens after `context` tokens that are present."""
        return self.a + new * (self.b + self.c * (context + new / 2)) if new > 0 else 0.0

    def queue_s(self, queued: QueuedPrefill) -> float:
        """Return the time until queued prefill is computed; several prompts may share a step."""
        return self.b * queued.tokens + self.c * queued.pairs if queued.tokens > 0 else 0.0


class QueuedPrefill(NamedTuple):
    """Prefill that an engine does before a prompt: tokens to compute, and their token pairs.

    `pairs` is the sum of `new * (context + new/2)` over the prompts.
    """

    tokens: int = 0
    pairs: float = 0.0


NO_QUEUE = QueuedPrefill()


class TierEstimate(NamedTuple):
    """The current speed of a tier: latency to the first byte, bandwidth, and bytes queued."""

    latency_s: float
    bytes_per_s: float
    queued_bytes: float = 0.0

    def seconds(self, nbytes: float) -> float:
        """Return the time until `nbytes` more have arrived, after the queued bytes."""
        if nbytes <= 0:
            return 0.0
        if self.bytes_per_s <= 0:
            return float("inf")
        return self.latency_s + (self.queued_bytes + nbytes) / self.bytes_per_s


HOST_DEFAULT = TierEstimate(0.0, 6e9)
LOWER_DEFAULT = TierEstimate(2e-4, 1e9)


class PrefillFit(OnlineFit):
    """Fits the prefill cost of one engine and fingerprint to its observed steps."""

    def __init__(self) -> None:
        # The prior favours the cost per token (weight 0), the term that every engine has.
        belief = Belief((0.0, 0.0, 0.0), (1e-3, 0.0, 1e-3))
        super().__init__(belief, PREFILL_HALF_LIFE, PREFILL_KEPT)

    @property
    def cost(self) -> PrefillCost | None:
        """The fitted cost; None until PREFILL_OBSERVATIONS_MIN steps are observed."""
        if self.count < PREFILL_OBSERVATIONS_MIN:
            return None
        return PrefillCost(*self.coefficients())

    def observe(self, new: float, context: float, seconds: float) -> None:
        """Add one step. Several prompts in a step count as one prompt with all their new tokens.

        `context` is then the number that makes `new * (context + new/2)` equal to the sum over the
        prompts, and may be negative. An impossible observation is ignored.
        """
        if new > 0:
            self.add((1.0, new, new * (context + new / 2)), seconds)


class TierFit(OnlineFit):
    """Fits latency and bandwidth of one tier to its reads; `default` is the prior.

    Reads of one size cannot separate latency from bandwidth. `FIRM` has the prior's weights of
    latency and of seconds per byte, in observations: the heavier one stays near the default.
    """

    FIRM: ClassVar = (1.0, 1e-3)

    def __init__(self, default: TierEstimate = LOWER_DEFAULT) -> None:
        self.default = default
        belief = Belief((default.latency_s, 1.0 / default.bytes_per_s), self.FIRM)
        super().__init__(belief, TIER_HALF_LIFE, TIER_KEPT)

    def observe(self, nbytes: float, seconds: float, *, starts: float = 1.0) -> None:
        """Add one observation: `nbytes` arrived within `seconds`, and the tier was never idle.

        `starts` is the number of latencies within `seconds`: 0 if the tier was already busy. An
        impossible observation is ignored.
        """
        if nbytes > 0:
            self.add((starts, nbytes), seconds)

    def estimate(self, queued_bytes: float = 0.0) -> TierEstimate:
        """Return the estimate of the tier with `queued_bytes` in its queue."""
        latency_s, per_byte = self.coefficients()
        return TierEstimate(latency_s, 1.0 / max(per_byte, 1.0 / BYTES_PER_S_MAX), queued_bytes)


class DeliveryFit(TierFit):
    """Fits the delivery from host memory into an engine's pages: copies, and waits for steps.

    If all deliveries have one size, the bandwidth stays at the default and the latency is fitted.
    Otherwise a wait for a busy step would lower the bandwidth, long contexts would look slower
    than computing, and without fetches the estimate would never be corrected.
    """

    FIRM: ClassVar = (1e-3, 0.1)
