"""The ladder file: what tiers and engine a simulated worker has, read from YAML and checked.

Every error starts with the file and the key's path and names the value, the limit and the remedy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from holdfast.config.options import Size
from holdfast.errors import ConfigError
from holdfast.prepared import prepared
from holdfast.yaml_file import read_mapping

Kind: TypeAlias = Literal["device", "host", "cxl", "disk", "pool", "object"]

KINDS: tuple[Kind, ...] = ("device", "host", "cxl", "disk", "pool", "object")
SHARED: tuple[Kind, ...] = ("pool", "object")

_CHOICES: dict[str, tuple[str, ...]] = {
    "kind": KINDS,
    "write": ("behind", "on_eviction"),
    "admit": ("always", "second_touch", "reuse", "reuse_interval"),
}
SECONDS_MAX = 1e6
"""No latency and no cost of computing a token is longer; what is, is a mistake."""

TOKEN_BYTES_MAX = 1e12
"""No token of any model takes more."""

_AT = re.compile(r" - at `\$?\.?(.*)`$")


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class TierModel(_Section, frozen=True):
    """One modelled tier: a worker has its own device, host, cxl, disk; pool and object are shared.

    `medium` and `units` name what it is made of in the hardware profile; what is said beside them
    is as said. Speeds are bytes a second, shared fairly by all that is under way;
    `request_bytes_per_s` bounds what one request gets of it, `worker_bytes_per_s` what one worker
    gets of a shared tier. Writes that would wait longer than `write_wait_s` are refused.
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
    """None: as a node would, `reuse_interval` for cxl and `always` for the others."""
    thrash_guard: bool | None = None
    """None: as a node would, for cxl only."""
    writes_per_day: float | None = None
    """Times its capacity that may be written a day."""

    @property
    def shared(self) -> bool:
        """Whether all workers use this one tier."""
        return self.kind in SHARED


class Prefill(_Section, frozen=True):
    """Seconds to compute `new` tokens behind `context`: a + b new + c new (context + new / 2)."""

    a: float = 0.0
    b: float = 0.0
    c: float = 0.0


class EngineModel(_Section, frozen=True):
    """One modelled engine: what it runs on, prefill cost, and decoding as a plain rate.

    `prefill` is said, or follows from model, GPU and `utilisation` of its peak, with `step_s` for
    each prefill beside. `decode_tokens_per_s` is what one request sees; `decodes_at_once` requests
    share the GPU time of a decoded token.
    """

    gpu: str | None = None
    utilisation: float | None = None
    step_s: float = 0.02
    prefill: Prefill | None = None
    prefills_at_once: int = 1
    fetch_ahead: int = 4
    """Requests that are looked up and fetched ahead of the engine; the others wait in line."""
    decode_tokens_per_s: float = 40.0
    decodes_at_once: int = 64
    fetch_limit_s: float = 60.0
    """Most that a fetch may take, whatever it saves."""


@prepared
class Ladder(_Section, frozen=True):
    """What every simulated worker has, and what all share, as the file says it."""

    tiers: list[TierModel]
    engine: EngineModel = EngineModel()
    token_bytes: float | None = None
    """Bytes of KV state per token where no model is named."""
    name: str = ""


def read_ladder(file: str) -> Ladder:
    """Read and check a ladder file. Raises ConfigError."""
    return parse_ladder(read_mapping(file), file)


def parse_ladder(data: object, file: str = "ladder") -> Ladder:
    """Turn plain data into a checked ladder. Raises ConfigError."""
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: holds {type(data).__name__}, not key: value lines; add tiers:")
    try:
        ladder = msgspec.convert(data, Ladder, strict=False, dec_hook=_size)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {_explain(str(error), data)}") from error
    for wrong in _wrong(ladder):
        raise ConfigError(f"{file}: {wrong}")
    return msgspec.structs.replace(ladder, name=ladder.name or Path(file).stem)


def _size(kind: type, value: object) -> object:
    if kind is Size:
        return Size.of(value)
    raise NotImplementedError(f"no reader for {kind.__name__}")


def _wrong(ladder: Ladder) -> Iterator[str]:
    """Say what is wrong with a ladder as a whole, key path first."""
    if not ladder.tiers:
        yield "tiers: is empty; name at least one of " + ", ".join(KINDS)
    order = [KINDS.index(tier.kind) for tier in ladder.tiers]
    for number, tier in enumerate(ladder.tiers):
        if number and order[number] < order[number - 1]:
            yield (
                f"tiers.{number}.kind: {tier.kind!r} stands behind "
                f"{ladder.tiers[number - 1].kind!r}; put the fastest first: {', '.join(KINDS)}"
            )
        if order.count(order[number]) > 1 and tier.kind in ("device", *SHARED):
            yield f"tiers.{number}.kind: a second {tier.kind!r}; a ladder has one, remove it"
        yield from (f"tiers.{number}.{what}" for what in _wrong_tier(tier))
    yield from (f"engine.{what}" for what in _wrong_engine(ladder.engine))
    if ladder.token_bytes is not None and not 0 < ladder.token_bytes <= TOKEN_BYTES_MAX:
        yield (
            f"token_bytes: {ladder.token_bytes:g} must be above 0, at most {TOKEN_BYTES_MAX:g}, or "
            "remove it and name a model"
        )


def _wrong_tier(tier: TierModel) -> Iterator[str]:
    if tier.capacity is not None and tier.capacity_tokens is not None:
        yield f"capacity: {tier.capacity}, and capacity_tokens are both given; remove one"
    if tier.capacity_tokens is not None and not math.isfinite(tier.capacity_tokens):
        yield f"capacity_tokens: {tier.capacity_tokens:g} is no number of tokens; correct it"
    if tier.units < 1:
        yield f"units: {tier.units} holds nothing; at least 1"
    for key in ("read", "write", "request", "worker"):
        name = f"{key}_bytes_per_s"
        value = getattr(tier, name)
        if value is not None and not value > 0:
            yield f"{name}: {value:g} moves nothing; it must be above 0, or remove it"
    if tier.latency_s is not None and not (0 <= tier.latency_s <= SECONDS_MAX):
        yield f"latency_s: {tier.latency_s:g} must be 0 or more seconds, at most {SECONDS_MAX:g}"
    if not tier.write_wait_s > 0:
        yield f"write_wait_s: {tier.write_wait_s:g} refuses every write; it must be above 0"
    if tier.writes_per_day is not None and not tier.writes_per_day > 0:
        yield f"writes_per_day: {tier.writes_per_day:g} allows none; it must be above 0"
    if tier.worker_bytes_per_s < math.inf and not tier.shared:
        yield f"worker_bytes_per_s: a {tier.kind} belongs to one worker; remove it"


def _wrong_engine(engine: EngineModel) -> Iterator[str]:
    for key in ("a", "b", "c"):
        value = getattr(engine.prefill, key, 0.0)
        if not (0 <= value <= SECONDS_MAX):
            yield f"prefill.{key}: {value:g} must be 0 or more, at most {SECONDS_MAX:g}"
    positive = ("prefills_at_once", "fetch_ahead", "decode_tokens_per_s", "decodes_at_once")
    for key in (*positive, "fetch_limit_s"):
        if not getattr(engine, key) > 0:
            yield f"{key}: {getattr(engine, key):g} must be above 0"
    if engine.utilisation is not None and not (0 < engine.utilisation <= 1):
        yield f"utilisation: {engine.utilisation:g} must be above 0 and at most 1"
    if not (0 <= engine.step_s <= SECONDS_MAX):
        yield f"step_s: {engine.step_s:g} must be 0 or more seconds, at most {SECONDS_MAX:g}"


def _explain(what: str, data: dict[str, Any]) -> str:
    """Put the key's path first, then the value, what is wrong with it, and the remedy."""
    found = _AT.search(what)
    keys = re.findall(r"[A-Za-z0-9_-]+", found[1]) if found else []
    value: Any = data
    for key in keys:
        value = value[int(key)] if isinstance(value, list) else dict(value or {}).get(key)
    text = _AT.sub("", what).replace("`", "'").replace("Object ", "")
    path = ".".join(keys) or "ladder"
    shown = f"{value!r}: " if isinstance(value, str | int | float) else ""
    return f"{path}: {shown}{text}; {_remedy(text, keys)}"


def _remedy(what: str, keys: list[str]) -> str:
    if "unknown field" in what:
        section: type[msgspec.Struct] = Ladder
        if keys[:1] == ["tiers"]:
            section = TierModel
        elif keys[:1] == ["engine"]:
            section = Prefill if "prefill" in keys else EngineModel
        return f"remove it; known here: {', '.join(section.__struct_fields__)}"
    if "Invalid enum value" in what:
        return "use one of: " + ", ".join(_CHOICES[keys[-1]])
    return "add it" if "missing" in what else "correct it"
