"""The input of a sizing: model, load, GPUs, media, prices and the goal for time to first token."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np

from holdfast.codec.codec import CodecMode
from holdfast.errors import ConfigError
from holdfast.sim.amounts import GB
from holdfast.sim.codec import RAW, TierEncoding, tier_encoding
from holdfast.sim.model.shape import ModelShape
from holdfast.sim.profile import Gpu, Profile, ProfileRange
from holdfast.sim.size.demand import Demand
from holdfast.sim.trace import Floats

GPU_BUSY = 0.7
"""Mean share of its time that a GPU computes prefill; the idle rest keeps queues short."""

_GPU_MEMORY_USED = 0.9
"""Share of GPU memory that an engine uses for weights and KV cache; vLLM's default."""

_PREFILL_POINTS = 4096
"""Prompt lengths at which prefill time is computed; between them it is interpolated."""

REMOTE = ("pool", "files", "object")
"""Kinds of tiers that engines reach over the network."""


class SizingGoal(NamedTuple):
    """The first token of `share` of the requests arrives within `ttft_s`; None: no limit."""

    ttft_s: float | None = None
    share: float = 0.95


class SizingQuestion(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What to size. `price_level` selects the profile's low, mid or high prices.

    `codec`: whether tiers store encoded records.
    """

    shape: ModelShape
    dtype: str
    demand: Demand
    gpu: Gpu
    gpus: int
    profile: Profile
    goal: SizingGoal = SizingGoal()
    nodes: int = 0
    """Number of GPU machines, one engine each; 0: as many as prefill and links need."""
    price_level: str = "mid"
    codec: CodecMode = "auto"
    media: tuple[str, ...] = ("ddr5", "nvme-tlc", "nvme-qlc", "pool-flash", "s3-express")

    def check(self) -> None:
        """Raise ConfigError if no hardware can answer the question."""
        longest = int(self.demand.input_tokens.max())
        self.shape.check_context(longest)
        for name in self.media:
            if self.profile.medium(name).tier == "device":
                raise ConfigError(
                    f"medium {name!r}: device memory belongs to the engine and cannot be bought "
                    "separately; remove it"
                )
        memory = self.gpus * self.gpu.memory_bytes.mid
        if self.shape.weights_bytes > memory:
            raise ConfigError(
                f"gpu: {self.gpus} x {self.gpu.about}: {memory / GB:,.0f} GB, but the weights of "
                f"{self.shape.name} take {self.shape.weights_bytes / GB:,.0f} GB; use more GPUs"
            )
        if self.goal.ttft_s is not None and not 0 < self.goal.ttft_s < np.inf:
            raise ConfigError(f"--slo-ttft: {self.goal.ttft_s:g} s: give seconds above 0")
        if self.nodes < 0:
            raise ConfigError(f"--nodes: {self.nodes}: give 1 or more")
        if not 0 < self.goal.share <= 1:
            raise ConfigError(f"--slo-share: {self.goal.share:g}: give a share above 0, at most 1")

    @property
    def device_tokens(self) -> float:
        """Tokens of context that fit into one engine's GPU memory, beside the weights."""
        free = self.gpus * self.gpu.memory_bytes.mid * _GPU_MEMORY_USED - self.shape.weights_bytes
        return max(0.0, free) / self.stored_token_bytes

    @property
    def flop_per_s(self) -> float:
        """Sustained prefill FLOP/s of one engine, all its GPUs."""
        return self.gpus * self.gpu.flop_per_s.mid * self.profile.site.prefill_utilisation.mid

    @property
    def link_bytes_per_s(self) -> float:
        """Bandwidth into one engine, over the links between its GPUs and host memory."""
        return self.gpus * self.gpu.host_bytes_per_s.mid

    @property
    def network_bytes_per_s(self) -> float:
        """Network bandwidth into one engine."""
        return min(self.gpus * self.gpu.network_bytes_per_s.mid, self.link_bytes_per_s)

    def encoding(self, medium: str) -> TierEncoding:
        """Return how a tier of a medium stores the KV state: as the node of one reader chooses."""
        figures = self.profile.medium(medium)
        return tier_encoding(
            self.profile, figures.tier, self.dtype, figures.read_bytes_per_s.mid, self.codec
        )

    def ingest_bytes_per_s(self, medium: str, encoding: TierEncoding) -> float:
        """Return the raw bandwidth into one engine from a tier; remote tiers use the network."""
        is_remote = self.profile.medium(medium).tier in REMOTE
        into = self.network_bytes_per_s if is_remote else math.inf
        return min(encoding.delivered(into), self.link_bytes_per_s)

    def ingest_bytes_per_s_max(self, media: Iterable[str]) -> float:
        """Return the highest of the raw bandwidths from media, whether they encode or not."""
        return max(
            (
                self.ingest_bytes_per_s(medium, encoding)
                for medium in media
                for encoding in (RAW, self.encoding(medium))
            ),
            default=math.inf,
        )

    @property
    def overhead_s(self) -> float:
        """Time before the first token that is spent neither on loading nor on computing."""
        return self.profile.site.request_s.mid

    @property
    def token_bytes(self) -> float:
        """Bytes by which a held context grows with each token."""
        return self.shape.kv_bytes_per_token(self.dtype)

    def fixed_bytes(self, tokens: Floats) -> Floats:
        """Return the bytes per context that are not per token: windows and recurrent states.

        `tokens` are the context lengths. A context shorter than a window fills only part of it; an
        empty context has neither window nor state.
        """
        fixed: Floats = self._window_bytes(tokens) + self.shape.state_bytes() * (tokens > 0)
        return fixed

    def _window_bytes(self, tokens: Floats) -> Floats:
        held = (
            np.minimum(tokens, span) * token_bytes
            for span, token_bytes in self.shape.windows(self.dtype)
        )
        return sum(held, np.zeros(len(tokens)))

    @cached_property
    def stored_token_bytes(self) -> float:
        """Bytes per stored token, with its share of windows and recurrent states.

        A context keeps one set of windows: as it grows, new windows replace the old ones. It keeps
        a state for every request end, because a later request may continue from there.
        """
        demand = self.demand
        windows = float(self._window_bytes(demand.input_tokens).mean())
        fixed = windows * demand.contexts + self.shape.state_bytes() * demand.checkpoints
        return self.token_bytes + fixed / demand.unique_tokens

    def price(self, figure: ProfileRange) -> float:
        """Return the price at `price_level`."""
        value: float = getattr(figure, self.price_level)
        return value

    def prefill_s(self, first: Floats, last: Floats) -> Floats:
        """Return the seconds to compute the tokens from `first` to `last` of each request."""
        lengths, seconds = self._prefill
        between: Floats = np.interp(last, lengths, seconds) - np.interp(first, lengths, seconds)
        return between

    def busy_engines(self, compute_s: Floats) -> float:
        """Return the mean number of busy engines; `compute_s` are the seconds of each request."""
        return self.demand.requests_per_s * float(compute_s.mean())

    def needed_engines(self, compute_s: Floats) -> float:
        """Return the number of engines that `compute_s` seconds for each request need.

        They are at most `GPU_BUSY` busy on average, and at most all busy in the busiest minute:
        with more work in that minute a queue would grow and delay first tokens.
        """
        return self.busy_engines(compute_s) * max(1 / GPU_BUSY, self.demand.peak)

    @cached_property
    def _prefill(self) -> tuple[Floats, Floats]:
        """Prompt lengths, and the seconds to compute a prompt of each."""
        lengths = np.linspace(0.0, float(self.demand.input_tokens.max()), _PREFILL_POINTS)
        flop = np.array([self.shape.prefill_flop(int(tokens)) for tokens in lengths])
        return np.floor(lengths), flop / self.flop_per_s
