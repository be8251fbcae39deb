"""Plain data becomes a struct, or an error with the key's path, the value and a remedy."""

from typing import Annotated, Literal

import msgspec
import pytest

from holdfast.byte_size import Size
from holdfast.config.sections import FileSection, convert
from holdfast.errors import ConfigError


class Fast(FileSection, frozen=True, tag="fast", tag_field="kind"):
    mode: Literal["a", "b"] = "a"
    modes: list[Literal["x", "y"]] = msgspec.field(default_factory=list)
    name: Annotated[str, msgspec.Meta(max_length=3)] = ""


class Slow(FileSection, frozen=True, tag="slow", tag_field="kind"):
    weight: Annotated[float, msgspec.Meta(ge=0)]
    mode: Literal["c", "d"] | int | None = None
    size: Size | None = None
    share: Annotated[float, msgspec.Meta(gt=0)] = 1.0


class Whole(FileSection, frozen=True):
    parts: list[Fast | Slow] = msgspec.field(default_factory=list)
    named: dict[str, Slow] = msgspec.field(default_factory=dict)


SLOW = {"kind": "slow", "weight": 1}


def test_valid_data_is_converted():
    found = convert(
        {"parts": [{"kind": "fast"}], "named": {"a.b": {**SLOW, "size": "1 KiB"}}}, Whole
    )
    assert found.parts == [Fast()]
    assert found.named == {"a.b": Slow(weight=1.0, size=Size(1024))}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            {"part": 1},
            "configuration: contains unknown field 'part'; remove it; known here: parts, ",
        ),
        (3, "configuration: Expected 'object', got 'int'; correct it"),
        ({3: 1}, "configuration: 3 is not text, as a name must be; put it in quotes"),
        (
            {"parts": [{**SLOW, "x": 1}]},
            r"parts\.0: .* known here: kind, weight, mode, size, share$",
        ),
        (
            {"parts": [{"kind": "fast", "x": 1}]},
            r"parts\.0: .* known here: kind, mode, modes, name$",
        ),
        ({"parts": [{"kind": "slow"}]}, r"parts\.0: missing required field 'weight'; add it$"),
        (
            {"parts": [{"kind": "tape"}]},
            r"parts\.0\.kind: 'tape': .*; use one of: fast, slow, more$",
        ),
        ({"parts": [{"kind": "fast", "name": "long"}]}, r"parts\.0\.name: 'long': .*; correct it$"),
        ({"parts": [{"kind": "fast", "mode": "c"}]}, r"parts\.0\.mode: 'c': .* one of: a, b$"),
        ({"parts": [{**SLOW, "mode": "a"}]}, r"parts\.0\.mode: 'a': .* one of: a number, c, d$"),
        ({"parts": [{"kind": "fast", "modes": ["x", "z"]}]}, r"parts\.0\.modes\.1: .* of: x, y$"),
        (
            {"named": {"a.b": {**SLOW, "weight": -1}}},
            r"named\.a\.b\.weight: -1: .* number >= 0\.0$",
        ),
        (
            {"named": {"a": SLOW, "b": {**SLOW, "share": 0}}},
            r"named\.b\.share: 0: .*; give a number > 0\.0, or remove it$",
        ),
        ({"named": {4090: SLOW}}, "named: 4090 is not text, as a name must be; put it in quotes"),
        ({"named": {"a": {**SLOW, "size": "big"}}}, r"named\.a\.size: 'big': not a size; write"),
        ({"named": {"a": {**SLOW, "mode": "\ud800"}}}, r"file, .*: '\\ud800' is not UTF-8 text"),
    ],
)
def test_an_error_names_path_value_rule_and_remedy(data, said):
    with pytest.raises(ConfigError, match=f"^{said}"):
        convert(data, Whole, more_tags=lambda: ["slow", "more"])


def test_an_error_starts_with_the_file():
    with pytest.raises(ConfigError, match=r"^my\.yaml: parts: 3: Expected 'array', got 'int';"):
        convert({"parts": 3}, Whole, "my.yaml: ")
    with pytest.raises(ConfigError, match=r"^my\.yaml: contains unknown field 'x'; remove it;"):
        convert({"x": 3}, Whole, "my.yaml: ")
