"""What is to be sized: a model, a load, GPUs, prices and the time to first token that is wanted."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import NamedTuple

import msgspec
import numpy as np

from holdfast.errors import ConfigError
from holdfast.sim.formulas import GB
from holdfast.sim.model import ModelShape, dtype_bytes
from holdfast.sim.profile import Gpu, Profile, Range
from holdfast.sim.size.demand import Demand, Floats

GPU_BUSY = 0.7
"""Share of its time that a GPU computes prefill, on the average; the rest keeps queues short."""

_GPU_MEMORY_USED = 0.9
"""Share of a GPU's memory that engines take for weights and context; vLLM's default."""

_POINTS = 4096

REMOTE = ("pool", "object")
"""Kinds of tiers that engines reach by network."""


class Wish(NamedTuple):
    """`share` of requests shall have their first token within `ttft_s`; None: no wish."""

    ttft_s: float | None = None
    share: float = 0.95


class Question(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One sizing. `prices` chooses among the profile's low, mid and high figures for money."""

    shape: ModelShape
    dtype: str
    demand: Demand
    gpu: Gpu
    gpus: int
    profile: Profile
    wish: Wish = Wish()
    nodes: int = 0
    """Machines with GPUs that the load runs on; 0: as many as its prefill needs."""
    prices: str = "mid"
    media: tuple[str, ...] = ("ddr5", "nvme-tlc", "nvme-qlc", "pool-flash", "s3-express")

    def check(self) -> None:
        """Raise ConfigError where the question has no answer, whatever is bought."""
        longest = int(self.demand.input_tokens.max())
        self.shape.check_context(longest)
        for name in self.media:
            if self.profile.medium(name).tier == "device":
                raise ConfigError(
                    f"medium {name!r}: device memory comes with the GPUs and is the engine's; "
                    "leave it out"
                )
        memory = self.gpus * self.gpu.memory_bytes.mid
        if self.shape.weights_bytes > memory:
            raise ConfigError(
                f"gpu: {self.gpus} x {self.gpu.about}: {memory / GB:,.0f} GB, but the weights of "
                f"{self.shape.name} take {self.shape.weights_bytes / GB:,.0f} GB; use more GPUs"
            )
        if self.wish.ttft_s is not None and not 0 < self.wish.ttft_s < np.inf:
            raise ConfigError(f"--slo-ttft: {self.wish.ttft_s:g} s: give seconds above 0")
        if self.nodes < 0:
            raise ConfigError(f"--nodes: {self.nodes}: give 1 or more")
        if not 0 < self.wish.share <= 1:
            raise ConfigError(f"--slo-share: {self.wish.share:g}: give a share above 0, at most 1")

    @property
    def device_tokens(self) -> float:
        """Tokens of context that fit beside the weights of one engine, in its GPUs' memory."""
        room = self.gpus * self.gpu.memory_bytes.mid * _GPU_MEMORY_USED - self.shape.weights_bytes
        return max(0.0, room) / self.stored_token_bytes

    @property
    def flop_per_s(self) -> float:
        """What the GPUs of one engine sustain together in prefill."""
        return self.gpus * self.gpu.flop_per_s.mid * self.profile.site.prefill_utilisation.mid

    @property
    def link_bytes_per_s(self) -> float:
        """What one engine can take in, by the links of its GPUs to host memory."""
        return self.gpus * self.gpu.host_bytes_per_s.mid

    @property
    def network_bytes_per_s(self) -> float:
        """What one engine can take in by network."""
        return min(self.gpus * self.gpu.network_bytes_per_s.mid, self.link_bytes_per_s)

    def into_engine(self, tier: str) -> float:
        """Return what one engine can take in from a tier: what is not local comes by network."""
        return self.network_bytes_per_s if tier in REMOTE else self.link_bytes_per_s

    @property
    def overhead_s(self) -> float:
        """What passes before the first token beside loading and computing."""
        return self.profile.site.request_s.mid

    @property
    def token_bytes(self) -> float:
        """Bytes that a held context grows by with each token."""
        return self.shape.kv_bytes_per_token(self.dtype)

    def fixed_bytes(self, tokens: Floats) -> Floats:
        """Return the bytes that come once with contexts so long: windows and recurrent states.

        A context that is shorter than a window does not fill it; one of no token has neither.
        """
        fixed: Floats = self._window_bytes(tokens) + self.shape.state_bytes() * (tokens > 0)
        return fixed

    def _window_bytes(self, tokens: Floats) -> Floats:
        elements = sum(
            (np.minimum(tokens, span) * elements for span, elements in self.shape.windows),
            np.zeros(len(tokens)),
        )
        return elements * dtype_bytes(self.dtype)

    @cached_property
    def stored_token_bytes(self) -> float:
        """Bytes that a stored token takes, its share of what comes with its context included.

        The windows of a longer context take the place of those of its start; a state is kept at
        every end that a request may go on from.
        """
        demand = self.demand
        windows = float(self._window_bytes(demand.input_tokens.astype(np.float64)).mean())
        beside = windows * demand.contexts + self.shape.state_bytes() * demand.checkpoints
        return self.token_bytes + beside / demand.unique_tokens

    def price(self, figure: Range | None) -> float:
        """Return the figure that is asked for; 0 for what costs nothing."""
        value: float = 0.0 if figure is None else getattr(figure, self.prices)
        return value

    def prefill_s(self, first: Floats, last: Floats) -> Floats:
        """Return the seconds to compute the tokens from `first` to `last` of each request."""
        at, seconds = self._prefill
        done: Floats = np.interp(last, at, seconds) - np.interp(first, at, seconds)
        return done

    def busy(self, compute_s: Floats) -> float:
        """Return how many engines compute at a time, with so many seconds for each request."""
        return self.demand.requests_per_s * float(compute_s.mean())

    def engines(self, compute_s: Floats) -> float:
        """Return how many engines it takes to compute so many seconds for each request.

        They are `GPU_BUSY` on the average, and in the busiest minute all are busy at most: if that
        minute asked for more, a queue would grow in it, and first tokens would wait for it.
        """
        return self.busy(compute_s) * max(1 / GPU_BUSY, self.demand.peak)

    @cached_property
    def _prefill(self) -> tuple[Floats, Floats]:
        """Points of the time to compute a prompt from its start, to interpolate between."""
        at, flop = _prefill_flop(self.shape, int(self.demand.input_tokens.max()))
        return at, flop / self.flop_per_s


@lru_cache(maxsize=8)
def _prefill_flop(shape: ModelShape, longest: int) -> tuple[Floats, Floats]:
    """Return lengths up to the longest, and FLOP to compute prompts so long; the same for any wish.

    A search asks a question again for every wish it tries.
    """
    at = np.linspace(0.0, float(longest), _POINTS)
    points = np.floor(at), np.array([shape.prefill_flop(int(tokens)) for tokens in at])
    for each in points:
        each.setflags(write=False)
    return points
