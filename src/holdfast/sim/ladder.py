"""The ladder file: the tiers and the engine of a simulated worker, read from YAML and checked.

Every error starts with the file and the path of the key, and names value, limit and remedy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import msgspec

from holdfast.byte_size import Size
from holdfast.errors import ConfigError
from holdfast.prepared import prepared
from holdfast.sim.file_errors import describe
from holdfast.yaml_file import read_mapping

Kind: TypeAlias = Literal["device", "host", "cxl", "disk", "pool", "object"]

KINDS: tuple[Kind, ...] = get_args(Kind)
SHARED: tuple[Kind, ...] = ("pool", "object")

SECONDS_MAX = 1e6
"""Maximum latency and maximum coefficient of a prefill cost; a larger one is a mistake."""

TOKEN_BYTES_MAX = 1e12
"""Maximum bytes of KV state per token."""


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class TierModel(_Section, frozen=True):
    """One modelled tier. Each worker has its own device, host, cxl and disk; others are shared.

    `medium` and `units` select hardware of the profile; other fields override its figures. Running
    transfers share the bandwidth fairly; `request_bytes_per_s` limits one request's part of it,
    `worker_bytes_per_s` one worker's part of a shared tier. Writes that would wait longer than
    `write_wait_s` are refused.
    """

    kind: Kind
    medium: str | None = None
    units: int = 1
    capacity: Size | None = None
    capacity_tokens: float | None = None
    latency_s: float | None = None
    read_bytes_per_s: float | None = None
    write_bytes_per_s: float | None = None
    request_bytes_per_s: float = math.inf
    worker_bytes_per_s: float = math.inf
    write: Literal["behind", "on_eviction"] = "behind"
    write_wait_s: float = 10.0
    policy: str | None = None
    admit: Literal["always", "second_touch", "reuse", "reuse_interval"] | None = None
    """None: a node's default, `reuse_interval` for cxl and `always` for other kinds."""
    thrash_guard: bool | None = None
    """None: a node's default, on for cxl only."""
    writes_per_day: float | None = None
    """Maximum writes per day, in multiples of the capacity."""

    @property
    def shared(self) -> bool:
        """Whether all workers share the tier."""
        return self.kind in SHARED


class Prefill(_Section, frozen=True):
    """Seconds to compute `new` tokens after `context`: a + b new + c new (context + new / 2)."""

    a: float = 0.0
    b: float = 0.0
    c: float = 0.0


class EngineModel(_Section, frozen=True):
    """One modelled engine: its GPUs, prefill cost and decode rate.

    Without `prefill`, the cost follows from model, GPU and `utilisation` of its peak FLOP/s, plus
    `step_s` per prefill. `decode_tokens_per_s` is the rate of one request; `decodes_at_once`
    requests share the GPU time.
    """

    gpu: str | None = None
    utilisation: float | None = None
    step_s: float = 0.02
    prefill: Prefill | None = None
    prefills_at_once: int = 1
    fetch_ahead: int = 4
    """Maximum requests looked up and fetched before their prefill; others wait in the queue."""
    decode_tokens_per_s: float = 40.0
    decodes_at_once: int = 64
    fetch_limit_s: float = 60.0
    """Maximum duration of a fetch."""


@prepared
class LadderModel(_Section, frozen=True):
    """The content of a ladder file: tiers and engine of each worker, and shared tiers."""

    tiers: list[TierModel]
    engine: EngineModel = EngineModel()
    token_bytes: float | None = None
    """Bytes of KV state per token, if no model is named."""
    name: str = ""


def read_ladder(file: str) -> LadderModel:
    """Read and check a ladder file. Raises ConfigError."""
    return parse_ladder(read_mapping(file), file)


def parse_ladder(data: object, file: str = "ladder") -> LadderModel:
    """Convert plain data to a checked ladder. Raises ConfigError."""
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: holds {type(data).__name__}, not key: value lines; add tiers:")
    try:
        ladder = msgspec.convert(data, LadderModel, strict=False, dec_hook=_size)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {describe(error, data, 'ladder', _section)}") from error
    for fault in _faults(ladder):
        raise ConfigError(f"{file}: {fault}")
    return msgspec.structs.replace(ladder, name=ladder.name or Path(file).stem)


def _section(keys: Sequence[str]) -> type[msgspec.Struct]:
    """Return the struct that these keys lead to."""
    if keys[:1] == ["tiers"]:
        return TierModel
    if keys[:1] == ["engine"]:
        return Prefill if "prefill" in keys else EngineModel
    return LadderModel


def _size(kind: type, value: object) -> object:
    if kind is Size:
        return Size.of(value)
    raise NotImplementedError(f"no reader for {kind.__name__}")


def _faults(ladder: LadderModel) -> Iterator[str]:
    """Yield what is wrong with a ladder, key path first."""
    if not ladder.tiers:
        yield "tiers: is empty; name at least one of " + ", ".join(KINDS)
    order = [KINDS.index(tier.kind) for tier in ladder.tiers]
    for number, tier in enumerate(ladder.tiers):
        if number and order[number] < order[number - 1]:
            yield (
                f"tiers.{number}.kind: {tier.kind!r} is after "
                f"{ladder.tiers[number - 1].kind!r}; put the fastest first: {', '.join(KINDS)}"
            )
        if order.count(order[number]) > 1 and tier.kind in ("device", *SHARED):
            yield f"tiers.{number}.kind: a second {tier.kind!r}; a ladder has one, remove it"
        yield from (f"tiers.{number}.{what}" for what in _tier_faults(tier))
    engine = ladder.engine
    for key in ("a", "b", "c"):
        value = getattr(engine.prefill, key, 0.0)
        if not (0 <= value <= SECONDS_MAX):
            yield f"engine.prefill.{key}: {value:g} must be 0 or more, at most {SECONDS_MAX:g}"
    positive = ("prefills_at_once", "fetch_ahead", "decode_tokens_per_s", "decodes_at_once")
    for key in (*positive, "fetch_limit_s"):
        if not getattr(engine, key) > 0:
            yield f"engine.{key}: {getattr(engine, key):g} must be above 0"
    if engine.utilisation is not None and not (0 < engine.utilisation <= 1):
        yield f"engine.utilisation: {engine.utilisation:g} must be above 0 and at most 1"
    if not (0 <= engine.step_s <= SECONDS_MAX):
        yield f"engine.step_s: {engine.step_s:g} must be 0 or more seconds, at most {SECONDS_MAX:g}"
    if ladder.token_bytes is not None and not 0 < ladder.token_bytes <= TOKEN_BYTES_MAX:
        yield (
            f"token_bytes: {ladder.token_bytes:g} must be above 0, at most {TOKEN_BYTES_MAX:g}, or "
            "remove it and name a model"
        )


def _tier_faults(tier: TierModel) -> Iterator[str]:
    if tier.capacity is not None and tier.capacity_tokens is not None:
        yield f"capacity: {tier.capacity}, and capacity_tokens are both given; remove one"
    if tier.capacity_tokens is not None and not math.isfinite(tier.capacity_tokens):
        yield f"capacity_tokens: {tier.capacity_tokens:g} is not a number of tokens; correct it"
    if tier.units < 1:
        yield f"units: {tier.units} must be at least 1"
    for key in ("read", "write", "request", "worker"):
        name = f"{key}_bytes_per_s"
        value = getattr(tier, name)
        if value is not None and not value > 0:
            yield f"{name}: {value:g} must be above 0, or remove it"
    if tier.latency_s is not None and not (0 <= tier.latency_s <= SECONDS_MAX):
        yield f"latency_s: {tier.latency_s:g} must be 0 or more seconds, at most {SECONDS_MAX:g}"
    if not tier.write_wait_s > 0:
        yield f"write_wait_s: {tier.write_wait_s:g} must be above 0 seconds"
    if tier.writes_per_day is not None and not tier.writes_per_day > 0:
        yield f"writes_per_day: {tier.writes_per_day:g} must be above 0"
    if tier.worker_bytes_per_s < math.inf and not tier.shared:
        yield f"worker_bytes_per_s: a {tier.kind} belongs to one worker; remove it"
