"""From a ladder file, a model and a hardware profile to the figures that a simulation runs on.

What the ladder file says goes before what its media say. Every figure comes out as a plain number:
the middle of the profile's range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.blocks.world import World
from holdfast.config.options import Size
from holdfast.errors import ConfigError
from holdfast.plan.cost import PrefillCost
from holdfast.sim.formulas import GB
from holdfast.sim.ladder import EngineModel, Ladder, TierModel
from holdfast.sim.model import ModelShape
from holdfast.sim.profile import Gpu, Medium, Profile
from holdfast.sim.trace import Trace

UNBOUNDED = 1 << 48
"""Blocks of a tier that is paid by the byte and ends nowhere."""

_SHORT, _LONG = 2_048, 65_536
"""Prompt lengths at which a model's FLOP are taken to fit a prefill cost."""


class Rung(NamedTuple):
    """One tier in plain figures: seconds, bytes a second, blocks."""

    model: TierModel
    medium: Medium | None
    blocks: int
    nbytes: float
    latency_s: float
    read_bytes_per_s: float
    write_bytes_per_s: float

    @property
    def kind(self) -> str:
        """What the tier is called on the ladder."""
        return self.model.kind

    @property
    def units_bought(self) -> int:
        """How many units of its medium it takes: for its speed, and for its size."""
        unit = self.medium.unit_bytes.mid if self.medium and self.medium.unit_bytes else 0.0
        return max(self.model.units, math.ceil(self.nbytes / unit)) if unit else 0

    @property
    def bytes_bought(self) -> float:
        """Bytes of whole units; its own where it is bought by the byte."""
        unit = self.medium.unit_bytes.mid if self.medium and self.medium.unit_bytes else 0.0
        return self.units_bought * unit if unit else self.nbytes


class Hardware(NamedTuple):
    """What one simulation runs on: the ladder in plain figures, the blocks, the engine's cost."""

    name: str
    rungs: list[Rung]
    world: World
    engine: EngineModel
    prefill: PrefillCost
    gpu: Gpu | None
    gpus: int
    profile: Profile


def resolve(
    ladder: Ladder, profile: Profile, block_tokens: int, model: ModelShape | None = None
) -> Hardware:
    """Return the figures for blocks of so many tokens. Raises ConfigError."""
    where = ladder.name
    gpu, gpus = _gpu(ladder, profile)
    if gpu and model:
        _check_weights(ladder, model, gpu.memory_bytes.mid * gpus)
    world = _world(ladder, block_tokens, model)
    rungs = []
    for number, tier in enumerate(ladder.tiers):
        try:
            rungs.append(_rung(tier, profile, world, (gpu, gpus)))
        except ConfigError as error:
            raise ConfigError(f"{where}: tiers.{number}.{error}") from error
    if gpu:
        _check_room(where, rungs, gpu.memory_bytes.mid * gpus, model)
    prefill = _prefill(ladder, profile, model, (gpu, gpus))
    return Hardware(where, rungs, world, ladder.engine, prefill, gpu, gpus, profile)


def check_contexts(trace: Trace, model: ModelShape) -> None:
    """Raise ConfigError if requests of a trace are longer than the model takes."""
    longer = int((trace.input_tokens > model.context_max).sum()) if model.context_max else 0
    if longer:
        raise ConfigError(
            f"--model {model.name}: takes at most {model.context_max:,} tokens "
            f"(max_position_embeddings), and {longer:,} of the {trace.requests:,} requests of "
            f"{trace.name} are longer, the longest {int(trace.input_tokens.max()):,}; name another "
            "model, or give a config.json with its rope scaling applied"
        )


def prefill_cost(model: ModelShape, flop_per_s: float, step_s: float) -> PrefillCost:
    """Return the cost that takes a model's FLOP for 2K and 64K tokens at this speed."""
    short, long = (model.prefill_flop(n) / n for n in (_SHORT, _LONG))
    bend = max(0.0, (long - short) / ((_LONG - _SHORT) / 2))
    return PrefillCost(step_s, (short - bend * _SHORT / 2) / flop_per_s, bend / flop_per_s)


def _gpu(ladder: Ladder, profile: Profile) -> tuple[Gpu | None, int]:
    if ladder.engine.gpu is None:
        return None, 1
    try:
        return profile.gpu(ladder.engine.gpu)
    except ConfigError as error:
        raise ConfigError(f"{ladder.name}: engine.gpu: {error}") from error


def _check_weights(ladder: Ladder, model: ModelShape, memory_bytes: float) -> None:
    """Raise ConfigError if the model does not fit into the memory of one engine's GPUs."""
    if model.weights_bytes > memory_bytes:
        raise ConfigError(
            f"{ladder.name}: engine.gpu: {ladder.engine.gpu}: {memory_bytes / GB:,.1f} GB, but the "
            f"weights of {model.name} take {model.weights_bytes / GB:,.1f} GB; use more GPUs, or "
            "name another model"
        )


def _check_room(
    where: str, rungs: Sequence[Rung], memory_bytes: float, model: ModelShape | None
) -> None:
    """Raise ConfigError if a device tier takes what one engine's GPUs have not beside the model."""
    weights = model.weights_bytes if model else 0.0
    for number, rung in enumerate(rungs):
        if rung.model.kind == "device" and rung.nbytes + weights > memory_bytes:
            beside = f", {weights / GB:,.1f} GB of them for {model.name}" if model else ""
            raise ConfigError(
                f"{where}: tiers.{number}.capacity: {rung.nbytes / GB:,.1f} GB: engine.gpu has "
                f"{memory_bytes / GB:,.1f} GB{beside}; lower the capacity, or use more GPUs"
            )


def _world(ladder: Ladder, block_tokens: int, model: ModelShape | None) -> World:
    """Return what all blocks have in common; only their size is not made up."""
    if model is not None:
        token_bytes = model.kv_bytes_per_token()
        if not token_bytes:
            raise ConfigError(
                f"--model {model.name}: 0 bytes a token: all its layers have windows or states, so "
                "no block of a context stays; `holdfast size` sizes those, or name another model"
            )
    elif ladder.token_bytes is not None:
        token_bytes = ladder.token_bytes
    elif all(tier.capacity_tokens is not None for tier in ladder.tiers):
        token_bytes = 1.0
    else:
        raise ConfigError(
            f"{ladder.name}: token_bytes: is missing; add it, or name a model with --model"
        )
    payload = max(1, math.ceil(token_bytes * block_tokens))
    return World(b"simulated blocks", b"simulated domain", payload, block_tokens)


def _rung(tier: TierModel, profile: Profile, world: World, gpus: tuple[Gpu | None, int]) -> Rung:
    medium = None
    if tier.medium is not None:
        medium = _medium(tier, profile)
    read, write, latency = tier.read_bytes_per_s, tier.write_bytes_per_s, tier.latency_s
    if medium:
        latency = medium.latency_s.mid if latency is None else latency
        read = tier.units * medium.read_bytes_per_s.mid if read is None else read
        write = tier.units * medium.write_bytes_per_s.mid if write is None else write
    read, write = read or math.inf, write or math.inf
    if gpus[0] and tier.kind == "host":  # what the engine gets of it comes over its own bus
        bus = gpus[0].host_bytes_per_s.mid * gpus[1]
        read, write = min(read, bus), min(write, bus)
    if tier.kind == "device":
        read, write, latency = math.inf, math.inf, 0.0
    blocks = _blocks(tier, medium, world)
    nbytes = float(blocks * world.record_bytes)
    return Rung(tier, medium, blocks, nbytes, latency or 0.0, read, write)


def _medium(tier: TierModel, profile: Profile) -> Medium:
    medium = profile.medium(tier.medium or "")
    wanted = "host" if tier.kind == "cxl" else tier.kind  # a tier of memory, both of them
    if medium.tier != wanted:
        raise ConfigError(
            f"medium: {tier.medium!r} is for a {medium.tier} tier, not for {tier.kind}; "
            f"use one of: {', '.join(n for n, m in profile.media.items() if m.tier == wanted)}"
        )
    return medium


def _blocks(tier: TierModel, medium: Medium | None, world: World) -> int:
    """Return how many blocks a tier holds. Raises ConfigError if it is not one."""
    key, said = "capacity", str(tier.capacity)
    if tier.capacity_tokens is not None:
        key, said = "capacity_tokens", f"{tier.capacity_tokens:g}"
        blocks = int(min(tier.capacity_tokens // world.block_tokens, UNBOUNDED))
    elif tier.capacity is not None:
        blocks = int(tier.capacity) // world.record_bytes
    elif medium and medium.unit_bytes:
        said = str(Size(medium.unit_bytes.mid * tier.units))
        blocks = int(medium.unit_bytes.mid * tier.units) // world.record_bytes
    elif tier.kind == "object":
        return UNBOUNDED
    else:
        raise ConfigError("capacity: is missing; add it, such as 512 GiB, or name a medium")
    if blocks < 1:
        raise ConfigError(
            f"{key}: {said} is less than one block of {world.block_tokens} tokens, "
            f"{Size(world.record_bytes)}; raise it"
        )
    return blocks


def _prefill(
    ladder: Ladder, profile: Profile, model: ModelShape | None, gpus: tuple[Gpu | None, int]
) -> PrefillCost:
    engine = ladder.engine
    if engine.prefill is not None:
        return PrefillCost(engine.prefill.a, engine.prefill.b, engine.prefill.c)
    if model is None or gpus[0] is None:
        raise ConfigError(
            f"{ladder.name}: engine.prefill: is missing; add its a, b and c, or name a GPU with "
            "engine.gpu and a model with --model"
        )
    share = engine.utilisation or profile.site.prefill_utilisation.mid
    return prefill_cost(model, gpus[0].flop_per_s.mid * gpus[1] * share, engine.step_s)
