"""The hardware profile: speed, size and price of media and GPUs, with date, ranges and sources.

The shipped file is `data/profile.yaml`; a user's file of the same structure overrides it key by
key. docs/reference/profile.md describes every key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import date
from functools import cache
from typing import Annotated, Any, Literal

import msgspec

from holdfast.config.sections import FileSection, convert
from holdfast.errors import ConfigError
from holdfast.sim.shipped import DATA
from holdfast.yaml_file import read_mapping

FIGURE_MIN, FIGURE_MAX = 1e-6, 1e24
"""Bounds of figures that must be above 0; a figure beyond them is a mistake."""

GPUS_MAX = 99_999
"""Maximum number of GPUs of one engine."""

_Amount = Annotated[float, msgspec.Meta(ge=0)]
_GPU = re.compile(r"([A-Za-z0-9_.-]+?)(?:x([0-9]+))?")
_TEXT_FIELDS = ("tier", "about", "unit")
_SHOWN_MAX = 40
"""Maximum characters of a user's text in a message."""
_BOUNDS = {
    "site.prefill_utilisation": (FIGURE_MIN, 1.0, "a share of a GPU's peak is at most 1"),
    "codec.ratio": (1.0, 16.0, "a record is stored in at most its raw bytes, so it is at least 1"),
    "codec.decode_threads": (1.0, 1024.0, "a node decodes with at least one thread"),
    "site.power_overhead": (
        1.0,
        FIGURE_MAX,
        "the overhead includes the machines' own power, so it is at least 1",
    ),
}
"""Figures with bounds of their own: minimum, maximum and reason."""


class ProfileRange(FileSection, frozen=True):
    """One figure: low, usual and high value, none below 0, and its source."""

    low: _Amount
    mid: _Amount
    high: _Amount
    source: str


_FREE = ProfileRange(low=0.0, mid=0.0, high=0.0, source="not charged")


class Medium(FileSection, frozen=True):
    """Storage hardware for a tier; figures are per `unit` (a channel, a drive, a stream).

    `unit_bytes` is None for a medium that is paid by the byte, such as an object store. Other
    figures of None do not apply.
    """

    tier: Literal["device", "host", "disk", "pool", "files", "object"]
    about: str
    unit: str
    latency_s: ProfileRange
    read_bytes_per_s: ProfileRange
    write_bytes_per_s: ProfileRange
    unit_bytes: ProfileRange | None = None
    units_per_node: ProfileRange | None = None
    dollars_per_gb: ProfileRange = _FREE
    dollars_per_gb_month: ProfileRange = _FREE
    dollars_per_million_puts: ProfileRange = _FREE
    dollars_per_million_gets: ProfileRange = _FREE
    dollars_per_gb_in: ProfileRange = _FREE
    dollars_per_gb_out: ProfileRange = _FREE
    active_watts: ProfileRange | None = None
    idle_watts: ProfileRange | None = None
    drive_writes_per_day: ProfileRange | None = None

    @property
    def is_rented(self) -> bool:
        """Whether the medium is paid by the month."""
        return self.dollars_per_gb_month.mid > 0 or self.unit_bytes is None

    def watts(self, units: float, bytes_per_s: float) -> float:
        """Return the mean power of `units` units that move `bytes_per_s` together.

        A unit draws idle power, and active power while it moves bytes at its read bandwidth.
        """
        if self.active_watts is None or not units:
            return 0.0
        idle = self.idle_watts.mid if self.idle_watts is not None else 0.0
        busy = min(1.0, bytes_per_s / (units * self.read_bytes_per_s.mid))
        return units * (idle + busy * (self.active_watts.mid - idle))


class Gpu(FileSection, frozen=True):
    """One accelerator, its link to host memory and its share of the machine's network.

    `flop_per_s` is the dense bf16 peak.
    """

    about: str
    flop_per_s: ProfileRange
    memory_bytes: ProfileRange
    host_bytes_per_s: ProfileRange
    network_bytes_per_s: ProfileRange
    dollars_per_hour: ProfileRange
    watts: ProfileRange


class Site(FileSection, frozen=True):
    """Figures common to all hardware of a data centre."""

    amortised_years: ProfileRange
    dollars_per_kwh: ProfileRange
    power_overhead: ProfileRange
    request_s: ProfileRange
    """Time of an engine per request besides loading and computing context."""
    prefill_utilisation: ProfileRange


class CodecFigures(FileSection, frozen=True):
    """The lossless codec of records: raw bytes per stored byte of bf16 KV, and its decoders."""

    ratio: ProfileRange
    decode_bytes_per_s: ProfileRange
    decode_threads: ProfileRange


class Profile(FileSection, frozen=True):
    """All media and GPUs, with prices as of `date`."""

    date: date
    site: Site
    codec: CodecFigures
    media: dict[str, Medium]
    gpus: dict[str, Gpu]

    def medium(self, name: str) -> Medium:
        """Return a medium by name. Raises ConfigError for an unknown name."""
        if name not in self.media:
            raise ConfigError(f"medium {name!r}: not known; one of {', '.join(self.media)}")
        return self.media[name]

    def gpu(self, text: str) -> tuple[Gpu, int]:
        """Return the GPU and the number of GPUs of a text such as "H200x8".

        Raises ConfigError for an unknown name, or a number below 1 or above `GPUS_MAX`.
        """
        shown = repr(text if len(text) <= _SHOWN_MAX else text[:_SHOWN_MAX] + "...")
        names = {name.lower(): name for name in self.gpus}
        if text.lower() in names:  # a user's name may end in x8, or have a space
            return self.gpus[names[text.lower()]], 1
        found = _GPU.fullmatch(text)
        if found is None or found[1].lower() not in names:
            raise ConfigError(
                f"gpu {shown}: not a known GPU with a number, such as H200x8; known: "
                f"{', '.join(self.gpus)}; add others in a file for --prices"
            )
        digits = (found[2] or "1").lstrip("0") or "0"
        # int() refuses thousands of digits; more than five are out of range already.
        number = int(digits) if len(digits) <= len(str(GPUS_MAX)) else GPUS_MAX + 1
        if not 1 <= number <= GPUS_MAX:
            raise ConfigError(
                f"gpu {shown}: an engine has 1 to {GPUS_MAX:,} GPUs; give such a number, as in "
                "H200x8"
            )
        return self.gpus[names[found[1].lower()]], number


_NAMED = ("media", "gpus")
"""Sections to which a user's file may add entries."""


@cache
def shipped() -> Profile:
    """Return the shipped profile."""
    return _convert(_shipped_data(), "profile.yaml")


def load_profile(file: str = "") -> Profile:
    """Return the shipped profile, overridden by a user's file if one is given.

    A plain number is a range with equal ends. Raises ConfigError, with the path of the key, for
    unknown keys, negative figures, zero bandwidths, ranges out of order, and new media or GPUs that
    lack figures.
    """
    if not file:
        return shipped()
    overrides = read_mapping(file)
    return _convert(_merged(_shipped_data(), overrides, file), file)


def _shipped_data() -> dict[str, Any]:
    import yaml

    text = (DATA / "profile.yaml").read_text(encoding="utf-8")
    loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader  # ten times faster
    data: dict[str, Any] = loader(text).get_single_data()
    return data


def _merged(
    base: Mapping[str, Any], over: Mapping[str, Any], file: str, path: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return `base` overridden by `over`; a plain number in place of a figure becomes a range."""
    merged = dict(base)
    for key, value in over.items():
        keys = (*path, key)
        depth = 3 if keys[0] in _NAMED else 2
        is_figure = len(keys) == depth and key not in _TEXT_FIELDS
        below = base.get(key)
        if isinstance(value, Mapping):
            merged[key] = _merged(below if isinstance(below, dict) else {}, value, file, keys)
            if {"low", "mid", "high"} & set(merged[key]):
                merged[key] = _ordered(merged[key], value, file)
        elif (number := _number(value)) is not None and is_figure:
            merged[key] = {"low": number, "mid": number, "high": number, "source": file}
        elif number is not None and key in ("low", "mid", "high"):
            merged[key] = number
        else:
            merged[key] = value
    return merged


def _number(value: object) -> float | None:
    """Return a number, or None; YAML 1.1 reads some numbers, such as 4e8, as text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _ordered(figure: dict[str, Any], given: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Return a range whose ends include a given `mid`; ends that are given stay as they are."""
    figure = {"source": file, **figure, **({} if "source" in given else {"source": file})}
    if (mid := _number(given.get("mid"))) is not None:
        for end, wider in (("low", min), ("high", max)):
            if end not in given:
                figure[end] = wider(figure.get(end, mid), mid)
    return figure


def _convert(data: Mapping[str, Any], file: str) -> Profile:
    """Convert plain data to a profile, and check all figures."""
    profile = convert(data, Profile, f"{file}: ")
    parts: dict[str, msgspec.Struct] = {"site": profile.site, "codec": profile.codec}
    parts |= {f"media.{name}": medium for name, medium in profile.media.items()}
    parts |= {f"gpus.{name}": gpu for name, gpu in profile.gpus.items()}
    for path, part in parts.items():
        for name in part.__struct_fields__:
            figure = getattr(part, name)
            if not isinstance(figure, ProfileRange):
                continue
            here = f"{file}: {path}.{name}"
            if not figure.low <= figure.mid <= figure.high < math.inf:
                raise ConfigError(
                    f"{here}: low {figure.low:g}, mid {figure.mid:g}, high {figure.high:g}: not in "
                    "order; give all three, or one plain number"
                )
            may_be_0 = name.startswith(("dollars", "idle", "latency"))
            if figure.low <= 0 and not may_be_0:
                raise ConfigError(f"{here}: {figure.low:g}: must be above 0; remove the entry")
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
    return profile
