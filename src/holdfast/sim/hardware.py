"""Resolve a ladder file, a model and a hardware profile into the plain figures of a simulation.

Figures of the ladder file override those of its media. From the profile's ranges come the middle
values.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from holdfast.blocks.namespace import Namespace
from holdfast.byte_size import Size
from holdfast.errors import ConfigError
from holdfast.plan.cost import PrefillCost
from holdfast.sim.amounts import GB
from holdfast.sim.codec import RAW, tier_encoding
from holdfast.sim.ladder import EngineModel, LadderModel, TierModel
from holdfast.sim.model.shape import ModelShape
from holdfast.sim.profile import Gpu, Medium, Profile
from holdfast.sim.trace import Trace

UNBOUNDED = 1 << 48
"""Capacity in blocks of a tier without a limit, which is paid by the byte."""

_SHORT, _LONG = 2_048, 65_536
"""Prompt lengths at which a prefill cost equals the model's FLOP."""


class TierSpec(NamedTuple):
    """One tier in plain figures: seconds, bytes/s, blocks.

    `nbytes` are stored bytes. The bandwidths count raw bytes: those that the engine gets.
    """

    model: TierModel
    medium: Medium | None
    blocks: int
    nbytes: float
    latency_s: float
    read_bytes_per_s: float
    write_bytes_per_s: float
    ratio: float = 1.0
    """Raw bytes of a block per stored byte."""

    @property
    def kind(self) -> str:
        """The tier's kind on the ladder."""
        return self.model.kind

    @property
    def units_bought(self) -> int:
        """Number of units of its medium that its speed and its capacity need; 0 without units."""
        unit = self._unit_bytes
        return max(self.model.units, math.ceil(self.nbytes / unit)) if unit else 0

    @property
    def bytes_bought(self) -> float:
        """Bytes of the units bought; the capacity if the medium is bought by the byte."""
        return self.units_bought * self._unit_bytes or self.nbytes

    @property
    def _unit_bytes(self) -> float:
        """Bytes of one unit of the medium; 0 if it has no units."""
        return self.medium.unit_bytes.mid if self.medium and self.medium.unit_bytes else 0.0


class SimulatedHardware(NamedTuple):
    """The hardware of one simulation: tiers, block sizes, engine and prefill cost."""

    name: str
    tier_specs: list[TierSpec]
    namespace: Namespace
    engine: EngineModel
    prefill: PrefillCost
    gpu: Gpu | None
    gpus: int
    profile: Profile


def resolve(
    ladder: LadderModel, profile: Profile, block_tokens: int, model: ModelShape | None = None
) -> SimulatedHardware:
    """Return the hardware for blocks of `block_tokens` tokens. Raises ConfigError."""
    where, gpu, gpus = ladder.name, None, 1
    if ladder.engine.gpu is not None:
        try:
            gpu, gpus = profile.gpu(ladder.engine.gpu)
        except ConfigError as error:
            raise ConfigError(f"{where}: engine.gpu: {error}") from error
    memory_bytes = gpu.memory_bytes.mid * gpus if gpu else math.inf
    weights = model.weights_bytes if model else 0.0
    if model and weights > memory_bytes:
        raise ConfigError(
            f"{where}: engine.gpu: {ladder.engine.gpu}: {memory_bytes / GB:,.1f} GB, but the "
            f"weights of {model.name} take {weights / GB:,.1f} GB; use more GPUs, or "
            "name another model"
        )
    if model is not None:
        token_bytes = model.kv_bytes_per_token()
        if not token_bytes:
            raise ConfigError(
                f"--model {model.name}: 0 bytes a token: all its layers have windows or states, so "
                "no block of a context is kept; use `holdfast size`, or name another model"
            )
    elif ladder.token_bytes is not None:
        token_bytes = ladder.token_bytes
    elif all(tier.capacity_tokens is not None for tier in ladder.tiers):
        token_bytes = 1.0
    else:
        raise ConfigError(f"{where}: token_bytes: is missing; add it, or name a model with --model")
    payload = max(1, math.ceil(token_bytes * block_tokens))
    # The sizes of this namespace are real, its fingerprint is made up.
    namespace = Namespace(b"simulated blocks", b"simulated domain", payload, block_tokens)
    tier_specs = []
    for number, tier in enumerate(ladder.tiers):
        try:
            spec = _tier_spec(tier, profile, namespace, (gpu, gpus))
            tier_specs.append(_encoded(spec, profile, namespace, model.kv_dtype if model else ""))
        except ConfigError as error:
            raise ConfigError(f"{where}: tiers.{number}.{error}") from error
    for number, tier_spec in enumerate(tier_specs):
        if tier_spec.kind == "device" and tier_spec.nbytes + weights > memory_bytes:
            taken = f", {weights / GB:,.1f} GB of them for {model.name}" if model else ""
            raise ConfigError(
                f"{where}: tiers.{number}.capacity: {tier_spec.nbytes / GB:,.1f} GB: engine.gpu "
                f"has {memory_bytes / GB:,.1f} GB{taken}; lower the capacity, or use more GPUs"
            )
    engine = ladder.engine
    if engine.prefill is not None:
        prefill = PrefillCost(engine.prefill.a, engine.prefill.b, engine.prefill.c)
    elif model is None or gpu is None:
        raise ConfigError(
            f"{where}: engine.prefill: is missing; add its a, b and c, or name a GPU with "
            "engine.gpu and a model with --model"
        )
    else:
        share = engine.utilisation or profile.site.prefill_utilisation.mid
        prefill = prefill_cost(model, gpu.flop_per_s.mid * gpus * share, engine.step_s)
    return SimulatedHardware(where, tier_specs, namespace, engine, prefill, gpu, gpus, profile)


def capacity_text(blocks: object) -> str:
    """Return the capacity of a tier in blocks as text; one without a bound is "unlimited"."""
    return f"{blocks:,}" if isinstance(blocks, int) and blocks < UNBOUNDED else "unlimited"


def check_contexts(trace: Trace, model: ModelShape) -> None:
    """Raise ConfigError if requests of a trace exceed the model's maximum context."""
    longer = int((trace.input_tokens > model.context_max).sum()) if model.context_max else 0
    if longer:
        raise ConfigError(
            f"--model {model.name}: takes at most {model.context_max:,} tokens "
            f"(max_position_embeddings), but {longer:,} of the {trace.requests:,} requests of "
            f"{trace.name} are longer, the longest {int(trace.input_tokens.max()):,}; name another "
            "model, drop them with --drop-longer, or give a config.json with its rope scaling "
            "applied"
        )


def prefill_cost(model: ModelShape, flop_per_s: float, step_s: float) -> PrefillCost:
    """Return the prefill cost that matches the model's FLOP for 2K and 64K tokens at this speed."""
    short, long = (model.prefill_flop(n) / n for n in (_SHORT, _LONG))
    slope = max(0.0, (long - short) / ((_LONG - _SHORT) / 2))
    return PrefillCost(step_s, (short - slope * _SHORT / 2) / flop_per_s, slope / flop_per_s)


def _tier_spec(
    tier: TierModel, profile: Profile, namespace: Namespace, gpus: tuple[Gpu | None, int]
) -> TierSpec:
    read, write, latency = tier.read_bytes_per_s, tier.write_bytes_per_s, tier.latency_s
    medium = None
    if tier.medium is not None:
        medium = profile.medium(tier.medium)
        wanted = "host" if tier.kind == "cxl" else tier.kind  # CXL memory uses media of host memory
        if medium.tier != wanted:
            fit = ", ".join(name for name, one in profile.media.items() if one.tier == wanted)
            raise ConfigError(
                f"medium: {tier.medium!r} is for a {medium.tier} tier, not for {tier.kind}; "
                f"use one of: {fit}"
            )
        latency = medium.latency_s.mid if latency is None else latency
        read = tier.units * medium.read_bytes_per_s.mid if read is None else read
        write = tier.units * medium.write_bytes_per_s.mid if write is None else write
    read, write = read or math.inf, write or math.inf
    if gpus[0] and tier.kind == "host":  # the engine reads it over the GPUs' bus
        bus = gpus[0].host_bytes_per_s.mid * gpus[1]
        read, write = min(read, bus), min(write, bus)
    if tier.kind == "device":
        read, write, latency = math.inf, math.inf, 0.0
    key, shown = "capacity", str(tier.capacity)
    if tier.capacity_tokens is not None:
        key, shown = "capacity_tokens", f"{tier.capacity_tokens:g}"
        blocks = int(min(tier.capacity_tokens // namespace.block_tokens, UNBOUNDED))
    elif tier.capacity is not None:
        blocks = int(tier.capacity) // namespace.slot_bytes
    elif medium and medium.unit_bytes:
        shown = str(Size(medium.unit_bytes.mid * tier.units))
        blocks = int(medium.unit_bytes.mid * tier.units) // namespace.slot_bytes
    elif tier.kind == "object":
        blocks = UNBOUNDED
    else:
        raise ConfigError("capacity: is missing; add it, such as 512 GiB, or name a medium")
    if blocks < 1:
        raise ConfigError(
            f"{key}: {shown} is less than one block of {namespace.block_tokens} tokens, "
            f"{Size(namespace.slot_bytes)}; raise it"
        )
    nbytes = float(blocks * namespace.slot_bytes)
    return TierSpec(tier, medium, blocks, nbytes, latency or 0.0, read, write)


def _encoded(spec: TierSpec, profile: Profile, namespace: Namespace, dtype: str) -> TierSpec:
    """Return a tier as its codec makes it: more blocks in the same bytes, other bandwidths.

    A limit of a shared tier's bandwidth per worker becomes one of what the worker decodes.
    """
    tier = spec.model
    reader = min(spec.read_bytes_per_s, tier.worker_bytes_per_s, tier.request_bytes_per_s)
    encoding = tier_encoding(profile, tier.kind, dtype, reader, tier.codec)
    if encoding is RAW:
        return spec
    ratio = encoding.ratio
    faster = msgspec.structs.replace(
        tier,
        request_bytes_per_s=encoding.delivered(tier.request_bytes_per_s),
        worker_bytes_per_s=encoding.delivered(tier.worker_bytes_per_s),
    )
    read = spec.read_bytes_per_s
    read = read * ratio if tier.shared else encoding.delivered(read)
    blocks = spec.blocks
    if blocks < UNBOUNDED and tier.capacity_tokens is None:
        blocks = int(spec.nbytes * ratio) // namespace.slot_bytes
    return spec._replace(
        model=faster,
        blocks=blocks,
        nbytes=blocks * namespace.slot_bytes / ratio,
        read_bytes_per_s=read,
        write_bytes_per_s=spec.write_bytes_per_s * ratio,
        ratio=ratio,
    )
