"""The ladder file: the tiers and the engine of a simulated worker, read from YAML and checked.

Every error starts with the file and the path of the key, and names value, limit and remedy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, get_args

import msgspec
from msgspec import Meta

from holdfast.byte_size import Size
from holdfast.codec.codec import CodecMode
from holdfast.config.sections import FileSection, convert
from holdfast.errors import ConfigError
from holdfast.policy.movement import Take
from holdfast.prepared import prepared
from holdfast.tiers.kind import Admit
from holdfast.yaml_file import read_mapping

Kind: TypeAlias = Literal["device", "host", "cxl", "disk", "pool", "files", "object"]

KINDS: tuple[Kind, ...] = get_args(Kind)
SHARED: tuple[Kind, ...] = ("pool", "files", "object")

_BELOW_MEMORY = ("admit_evicted", "admit_fetched", "move_limit")
"""Keys of tiers below memory only."""

SECONDS_MAX = 1e6
"""Maximum latency and maximum coefficient of a prefill cost; a larger one is a mistake."""

TOKEN_BYTES_MAX = 1e12
"""Maximum bytes of KV state per token."""

_Positive = Annotated[float, Meta(gt=0)]
_Seconds = Annotated[float, Meta(ge=0, le=SECONDS_MAX)]
_Count = Annotated[int, Meta(ge=1)]


class TierModel(FileSection, frozen=True):
    """One modelled tier. Each worker has its own device, host, cxl and disk; others are shared.

    `medium` and `units` select hardware of the profile; other fields override its figures. Running
    transfers share the bandwidth fairly; `request_bytes_per_s` limits one request's part of it,
    `worker_bytes_per_s` one worker's part of a shared tier. Writes that would wait longer than
    `write_wait_s` are refused. `write`, `admit_evicted`, `admit_fetched` and `move_limit` are those
    of a node's tier below memory.
    """

    kind: Kind
    medium: str | None = None
    units: _Count = 1
    capacity: Size | None = None
    capacity_tokens: float | None = None
    latency_s: _Seconds | None = None
    read_bytes_per_s: _Positive | None = None
    write_bytes_per_s: _Positive | None = None
    request_bytes_per_s: _Positive = math.inf
    worker_bytes_per_s: _Positive = math.inf
    write: Literal["behind", "on_eviction"] = "behind"
    admit_evicted: Take | None = None
    admit_fetched: Take | None = None
    """None: a node's default, `reused`, as for `admit_evicted`."""
    move_limit: Size | None = None
    write_wait_s: _Positive = 10.0
    codec: CodecMode = "auto"
    """As of a node's tier; `auto` encodes if a model with a bf16 KV state is named."""
    policy: str | None = None
    admit: Admit | None = None
    """None: a node's default, `reuse_interval` for cxl and `always` for other kinds."""
    thrash_guard: bool | None = None
    """None: a node's default, on for cxl only."""
    writes_per_day: _Positive | None = None
    """Maximum writes per day, in multiples of the capacity."""

    @property
    def shared(self) -> bool:
        """Whether all workers share the tier."""
        return self.kind in SHARED


class Prefill(FileSection, frozen=True):
    """Seconds to compute `new` tokens after `context`: a + b new + c new (context + new / 2)."""

    a: _Seconds = 0.0
    b: _Seconds = 0.0
    c: _Seconds = 0.0


class EngineModel(FileSection, frozen=True):
    """One modelled engine: its GPUs, prefill cost and decode rate.

    Without `prefill`, the cost follows from model, GPU and `utilisation` of its peak FLOP/s, plus
    `step_s` per prefill. `decode_tokens_per_s` is the rate of one request; `decodes_at_once`
    requests share the GPU time.
    """

    gpu: str | None = None
    utilisation: Annotated[float, Meta(gt=0, le=1)] | None = None
    step_s: _Seconds = 0.02
    prefill: Prefill | None = None
    prefills_at_once: _Count = 1
    fetch_ahead: _Count = 4
    """Maximum requests looked up and fetched before their prefill; others wait in the queue."""
    decode_tokens_per_s: _Positive = 40.0
    decodes_at_once: _Count = 64
    fetch_limit_s: _Positive = 60.0
    """Maximum duration of a fetch."""


@prepared
class LadderModel(FileSection, frozen=True):
    """The content of a ladder file: tiers and engine of each worker, and shared tiers."""

    tiers: list[TierModel]
    engine: EngineModel = EngineModel()
    token_bytes: Annotated[float, Meta(gt=0, le=TOKEN_BYTES_MAX)] | None = None
    """Bytes of KV state per token, if no model is named."""
    name: str = ""


def read_ladder(file: str) -> LadderModel:
    """Read and check a ladder file. Raises ConfigError."""
    return parse_ladder(read_mapping(file), file)


def parse_ladder(data: object, file: str = "ladder") -> LadderModel:
    """Convert plain data to a checked ladder. Raises ConfigError."""
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: holds {type(data).__name__}, not key: value lines; add tiers:")
    ladder = convert(data, LadderModel, f"{file}: ")
    for fault in _faults(ladder):
        raise ConfigError(f"{file}: {fault}")
    return msgspec.structs.replace(ladder, name=ladder.name or Path(file).stem)


def _faults(ladder: LadderModel) -> Iterator[str]:
    """Yield what is wrong with a ladder, key path first."""
    if not ladder.tiers:
        yield "tiers: is empty; name at least one of " + ", ".join(KINDS)
    order = [KINDS.index(tier.kind) for tier in ladder.tiers]
    for number, tier in enumerate(ladder.tiers):
        at = f"tiers.{number}"
        if number and order[number] < order[number - 1]:
            yield (
                f"{at}.kind: {tier.kind!r} is after {ladder.tiers[number - 1].kind!r}; put the "
                f"fastest first: {', '.join(KINDS)}"
            )
        if order.count(order[number]) > 1 and tier.kind in ("device", *SHARED):
            yield f"{at}.kind: a second {tier.kind!r}; a ladder has one, remove it"
        if tier.capacity is not None and tier.capacity_tokens is not None:
            yield f"{at}.capacity: {tier.capacity}, and capacity_tokens are both given; remove one"
        if tier.capacity_tokens is not None and not math.isfinite(tier.capacity_tokens):
            shown = f"{tier.capacity_tokens:g} is not a number of tokens"
            yield f"{at}.capacity_tokens: {shown}; correct it"
        if tier.move_limit is not None and tier.move_limit < 1:
            yield f"{at}.move_limit: {tier.move_limit} moves nothing; raise it, or remove it"
        for key in _BELOW_MEMORY if tier.kind in ("device", "host") else ():
            if (given := getattr(tier, key)) is not None:
                yield f"{at}.{key}: {given!r}: {tier.kind} memory gets all blocks; remove it"
        if tier.worker_bytes_per_s < math.inf and not tier.shared:
            yield f"{at}.worker_bytes_per_s: a {tier.kind} belongs to one worker; remove it"
