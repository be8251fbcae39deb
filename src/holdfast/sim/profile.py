"""The hardware profile: what tiers and GPUs give and cost, dated, with ranges and sources.

The shipped file is `data/profile.yaml`; a user's own file of the same shape is laid over it key by
key. docs/reference/profile.md describes every key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import date
from functools import cache
from importlib import resources
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from holdfast.errors import ConfigError
from holdfast.yaml_file import read_mapping

FIGURE_MIN, FIGURE_MAX = 1e-6, 1e24
"""No figure that must be above 0 is smaller, and none is larger; what is, is a mistake."""

GPUS_MAX = 99_999
"""Most GPUs under one engine; more is a mistake."""

_Amount = Annotated[float, msgspec.Meta(ge=0)]
_GPU = re.compile(r"([A-Za-z0-9_.-]+?)(?:x([0-9]+))?")
_AT = re.compile(r" - at `\$?\.?(.*)`$")
_PLAIN = ("tier", "about", "unit")
_SHOWN_MAX = 40
"""Characters of a user's text that a message repeats."""
_BOUNDS = {
    "site.prefill_utilisation": (FIGURE_MIN, 1.0, "a share of a GPU's peak is at most 1"),
    "site.power_overhead": (1.0, FIGURE_MAX, "a building draws at least what its machines draw, 1"),
}
"""Figures with limits of their own, and why."""
_S = TypeVar("_S", bound=msgspec.Struct)


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Range(_Section, frozen=True):
    """One figure: lowest, usual and highest, none below 0, and where it comes from."""

    low: _Amount
    mid: _Amount
    high: _Amount
    source: str


class Medium(_Section, frozen=True):
    """What a tier can be made of, per `unit` (a channel, a drive, a stream).

    `unit_bytes` is None for a medium that is bought by the byte: an object store. What is None
    costs nothing, or does not apply.
    """

    tier: Literal["device", "host", "disk", "pool", "object"]
    about: str
    unit: str
    latency_s: Range
    read_bytes_per_s: Range
    write_bytes_per_s: Range
    unit_bytes: Range | None = None
    units_per_node: Range | None = None
    dollars_per_gb: Range | None = None
    dollars_per_gb_month: Range | None = None
    dollars_per_million_puts: Range | None = None
    dollars_per_million_gets: Range | None = None
    dollars_per_gb_in: Range | None = None
    dollars_per_gb_out: Range | None = None
    active_watts: Range | None = None
    idle_watts: Range | None = None
    drive_writes_per_day: Range | None = None


class Gpu(_Section, frozen=True):
    """One accelerator, with its link to host memory and its share of the machine's network.

    `flop_per_s` is bf16, dense.
    """

    about: str
    flop_per_s: Range
    memory_bytes: Range
    memory_bytes_per_s: Range
    host_bytes_per_s: Range
    network_bytes_per_s: Range
    dollars_per_hour: Range
    watts: Range


class Site(_Section, frozen=True):
    """What is the same for all hardware of a place."""

    amortised_years: Range
    dollars_per_kwh: Range
    power_overhead: Range
    request_s: Range
    """What an engine needs for a first token beside loading and computing context."""
    prefill_utilisation: Range


class Profile(_Section, frozen=True):
    """Everything that planning knows about hardware, as of `date`."""

    date: date
    site: Site
    media: dict[str, Medium]
    gpus: dict[str, Gpu]

    def medium(self, name: str) -> Medium:
        """Return a medium by name. Raises ConfigError for one that is not listed."""
        if name not in self.media:
            raise ConfigError(f"medium {name!r}: not known; one of {', '.join(self.media)}")
        return self.media[name]

    def gpu(self, text: str) -> tuple[Gpu, int]:
        """Return the GPU and the number of it that a text such as "H200x8" means.

        Raises ConfigError for a name that is not listed, or a number below 1 or above `GPUS_MAX`.
        """
        shown = repr(text if len(text) <= _SHOWN_MAX else text[:_SHOWN_MAX] + "...")
        names = {name.lower(): name for name in self.gpus}
        if text.lower() in names:  # a user's own name may end as a number does, or have a space
            return self.gpus[names[text.lower()]], 1
        found = _GPU.fullmatch(text)
        if found is None or found[1].lower() not in names:
            raise ConfigError(
                f"gpu {shown}: not a known one, with its number, such as H200x8; known: "
                f"{', '.join(self.gpus)}; others go into a file for --prices"
            )
        digits = (found[2] or "1").lstrip("0") or "0"
        # Python does not read a number of thousands of digits; six are too many already.
        number = int(digits) if len(digits) <= len(str(GPUS_MAX)) else GPUS_MAX + 1
        if not 1 <= number <= GPUS_MAX:
            raise ConfigError(
                f"gpu {shown}: an engine has 1 to {GPUS_MAX:,} of them; give such a number, as in "
                "H200x8"
            )
        return self.gpus[names[found[1].lower()]], number


_NAMED: dict[str, type[msgspec.Struct]] = {"media": Medium, "gpus": Gpu}
"""Sections in which a user may add names of their own."""


@cache
def shipped() -> Profile:
    """Return the profile that comes with Holdfast."""
    return _convert(_shipped_data(), "profile.yaml")


def load_profile(file: str = "") -> Profile:
    """Return the shipped profile, with a user's file laid over it.

    A plain number stands for a range without width. Raises ConfigError, with the path of the key,
    for unknown keys, negative figures, zero bandwidths, ranges out of order and new media or GPUs
    that lack figures.
    """
    if not file:
        return shipped()
    overrides = read_mapping(file)
    return _convert(_over(_shipped_data(), overrides, "", file), file)


def _shipped_data() -> dict[str, Any]:
    import yaml

    text = (resources.files("holdfast.sim") / "data" / "profile.yaml").read_text(encoding="utf-8")
    loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader  # ten times as fast
    data: dict[str, Any] = loader(text).get_single_data()
    return data


def _over(base: Mapping[str, Any], over: Mapping[str, Any], path: str, file: str) -> dict[str, Any]:
    """Lay one mapping over another; a plain number in place of a figure is a range."""
    merged = dict(base)
    for key, value in over.items():
        where = f"{path}.{key}" if path else str(key)
        below = base.get(key)
        if isinstance(value, Mapping):
            merged[key] = _over(below if isinstance(below, dict) else {}, value, where, file)
            if _is_figure(merged[key]):
                merged[key] = _ordered(merged[key], value, file)
        elif (number := _number(value)) is not None and _is_place_of_figure(where):
            merged[key] = {"low": number, "mid": number, "high": number, "source": file}
        elif number is not None and key in ("low", "mid", "high"):
            merged[key] = number
        else:
            merged[key] = value
    return merged


def _number(value: object) -> float | None:
    """Return a number, also one that YAML 1.1 takes for text, such as 4e8."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _is_place_of_figure(path: str) -> bool:
    section, *names = path.split(".")
    plain = names[-1:] and names[-1] in _PLAIN
    return not plain and len(names) == (2 if section in _NAMED else 1)


def _is_figure(value: Mapping[str, Any]) -> bool:
    return bool({"low", "mid", "high"} & set(value))


def _ordered(figure: dict[str, Any], said: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Stretch a range to what was said of it; what is said is taken as it is."""
    figure = {"source": file, **figure, **({} if "source" in said else {"source": file})}
    if "mid" in said and isinstance(said["mid"], int | float):
        for end, wider in (("low", min), ("high", max)):
            if end not in said:
                known = figure.get(end, said["mid"])
                figure[end] = wider(known, said["mid"])
    return figure


def _convert(data: Mapping[str, Any], file: str) -> Profile:
    """Convert section by section, so that an error can name the place by its full path."""
    sections: dict[str, Any] = dict(data)
    for section, kind in _NAMED.items():
        if not isinstance(data[section], Mapping):
            raise ConfigError(f"{file}: {section}: not name: figures lines; correct it")
        named = data[section].items()
        sections[section] = {k: _struct(v, kind, f"{section}.{k}", file) for k, v in named}
    sections["site"] = _struct(data["site"], Site, "site", file)
    profile = _struct(sections, Profile, "", file)
    _check(profile, file)
    return profile


def _struct(data: object, kind: type[_S], path: str, file: str) -> _S:
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {_explain(error, data, kind, path)}") from error


def _check(profile: Profile, file: str) -> None:
    sections: dict[str, msgspec.Struct] = {"site": profile.site}
    sections |= {f"media.{name}": medium for name, medium in profile.media.items()}
    sections |= {f"gpus.{name}": gpu for name, gpu in profile.gpus.items()}
    for path, section in sections.items():
        for name in section.__struct_fields__:
            figure = getattr(section, name)
            if not isinstance(figure, Range):
                continue
            here = f"{file}: {path}.{name}"
            if not figure.low <= figure.mid <= figure.high < math.inf:
                raise ConfigError(
                    f"{here}: low {figure.low:g}, mid {figure.mid:g}, high {figure.high:g}: not in "
                    "order; give all three, or one plain number"
                )
            may_be_0 = name.startswith(("dollars", "idle", "latency"))
            if figure.low <= 0 and not may_be_0:
                raise ConfigError(f"{here}: {figure.low:g}: must be above 0; leave the part out")
            small = figure.low < FIGURE_MIN and not may_be_0
            if small or figure.high > FIGURE_MAX:
                raise ConfigError(
                    f"{here}: {figure.low if small else figure.high:g}: not within "
                    f"{FIGURE_MIN:g} and {FIGURE_MAX:g}; correct it"
                )
            least, most, why = _BOUNDS.get(f"{path}.{name}", (0.0, FIGURE_MAX, ""))
            if figure.low < least or figure.high > most:
                wrong = figure.low if figure.low < least else figure.high
                raise ConfigError(f"{here}: {wrong:g}: {why}; correct it")


def _explain(
    error: msgspec.ValidationError, data: object, kind: type[msgspec.Struct], path: str
) -> str:
    """Put the key's path first, then the value, what is wrong with it, and the remedy."""
    found = _AT.search(str(error))
    keys = found[1].split(".") if found and found[1] else []
    value: Any = data
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    what = _AT.sub("", str(error)).replace("`", "'").replace("Object ", "")
    shown = f"{value!r}: " if isinstance(value, str | int | float) else ""
    remedy = "correct it"
    if "unknown field" in what:
        known = (Range if keys else kind).__struct_fields__
        remedy = f"remove it; known here: {', '.join(known)}"
    elif "missing" in what:
        remedy = "add it"
    elif ">= 0.0" in what:
        remedy = "give 0 or more"
    where = ".".join(filter(None, [path, *keys])) or "profile"
    return f"{where}: {shown}{what}; {remedy}"
