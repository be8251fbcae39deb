"""What computing costs, and what fetching costs: measured, never configured.

Prefill takes `a + b*new + c*new*(context + new/2)` seconds: a step's own cost, the layers' (linear)
and the attention's (every new token looks at the context and at half of the new ones). A tier takes
`latency + bytes / bandwidth`. Both are fitted online from what was observed (`holdfast.plan.fit`).
Plain data in and out: no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Self

from holdfast.plan.fit import Belief, Fit

PREFILL_OBSERVATIONS_MIN = 3
"""Steps it takes before a fit is believed."""

PREFILL_HALF_LIFE = 512
TIER_HALF_LIFE = 12
"""A disk that becomes slow must be noticed within a few reads; an engine hardly changes."""

PREFILL_KEPT = 192
TIER_KEPT = 32
"""Observations kept: a tier's fit is made anew between one fetch and the next."""

BYTES_PER_S_MAX = 1e15


class PrefillCost(NamedTuple):
    """Seconds of prefill: `a` per step, `b` per new token, `c` per pair of tokens."""

    a: float
    b: float
    c: float

    def seconds(self, new: float, context: float = 0.0) -> float:
        """Return the time to compute `new` tokens behind `context` tokens that are there."""
        return self.a + new * (self.b + self.c * (context + new / 2)) if new > 0 else 0.0


class TierEstimate(NamedTuple):
    """A tier as it is now: seconds before the first byte, bytes per second, bytes in line."""

    latency_s: float
    bytes_per_s: float
    queued_bytes: float = 0.0

    def seconds(self, nbytes: float) -> float:
        """Return the time until `nbytes` more have arrived, behind what is in line."""
        if nbytes <= 0:
            return 0.0
        if self.bytes_per_s <= 0:
            return float("inf")
        return self.latency_s + (self.queued_bytes + nbytes) / self.bytes_per_s


HOST_DEFAULT = TierEstimate(0.0, 6e9)
LOWER_DEFAULT = TierEstimate(2e-4, 1e9)


class PrefillFit:
    """The prefill cost of one engine and fingerprint, from its steps.

    `default` is believed until steps were observed; without it there is no cost until then.
    """

    def __init__(self, default: PrefillCost | None = None) -> None:
        self._default = default
        # What is not known is put down to the tokens: the part that every engine has.
        self._fit = Fit(Belief((0.0, 0.0, 0.0), (1e-3, 0.0, 1e-3)), PREFILL_HALF_LIFE, PREFILL_KEPT)

    @property
    def cost(self) -> PrefillCost | None:
        """The cost as far as it is known."""
        if self._fit.count < PREFILL_OBSERVATIONS_MIN:
            return self._default
        return PrefillCost(*self._fit.coefficients())

    def settle(self) -> None:
        """Fit what was observed now, so that who asks for the cost need not wait for it."""
        self._fit.coefficients()

    @property
    def steps(self) -> int:
        """How many steps were observed."""
        return self._fit.count

    def observe(self, new: float, context: float, seconds: float) -> None:
        """Take in one step. Several prompts in a step count as one of all their new tokens.

        `context` is then the number that makes `new * (context + new/2)` the sum of theirs, and
        may be negative. What can not be is ignored.
        """
        if new > 0:
            self._fit.observe((1.0, new, new * (context + new / 2)), seconds)

    def as_data(self) -> dict[str, Any]:
        """Return what was learnt as plain data."""
        return self._fit.as_data()

    @classmethod
    def from_data(cls, data: Mapping[str, Any], default: PrefillCost | None = None) -> Self:
        """Return the fit that `as_data` described; raise ValueError if it described none."""
        made = cls(default)
        made._fit.restore(data)
        return made


class TierFit:
    """Latency and bandwidth of one tier, from its reads; `default` counts like one of them.

    Reads of one size can not tell latency from bandwidth: `FIRM` says what stays as believed.
    """

    FIRM: ClassVar = (1.0, 1e-3)

    def __init__(self, default: TierEstimate = LOWER_DEFAULT) -> None:
        self.default = default
        per_byte = 1.0 / min(max(default.bytes_per_s, 1.0), BYTES_PER_S_MAX)
        belief = Belief((default.latency_s, per_byte), self.FIRM)
        self._fit = Fit(belief, TIER_HALF_LIFE, TIER_KEPT)

    @property
    def reads(self) -> int:
        """How many reads were observed."""
        return self._fit.count

    def observe(self, nbytes: float, seconds: float, *, starts: float = 1.0) -> None:
        """Take in that `nbytes` arrived within `seconds` of which the tier was busy throughout.

        `starts` 0: the tier was busy before, so that nobody waited for a first byte. What can not
        be is ignored.
        """
        if nbytes > 0:
            self._fit.observe((starts, nbytes), seconds)

    def estimate(self, queued_bytes: float = 0.0) -> TierEstimate:
        """Return the tier as it is, with so many bytes in line."""
        latency_s, per_byte = self._fit.coefficients()
        return TierEstimate(latency_s, 1.0 / max(per_byte, 1.0 / BYTES_PER_S_MAX), queued_bytes)

    def settle(self) -> None:
        """Fit what was observed now, so that who asks for the estimate need not wait for it."""
        self._fit.coefficients()

    def as_data(self) -> dict[str, Any]:
        """Return what was learnt as plain data."""
        return self._fit.as_data()

    @classmethod
    def from_data(cls, data: Mapping[str, Any], default: TierEstimate = LOWER_DEFAULT) -> Self:
        """Return the fit that `as_data` described; raise ValueError if it described none."""
        made = cls(default)
        made._fit.restore(data)
        return made


class DeliveryFit(TierFit):
    """The hand-over from memory into an engine's pages: copies, and steps that were waited for.

    Of reads of one size the bandwidth stays as believed. A block that waited for a busy step would
    else make long contexts look slower than computing, and what is never fetched is never learnt.
    """

    FIRM: ClassVar = (1e-3, 0.1)
