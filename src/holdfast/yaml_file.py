"""Read a YAML file of settings; an error is one line that names the file and the position."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigError
from holdfast.limits import MIB
from holdfast.regular_file import check_regular

if TYPE_CHECKING:
    import yaml

FILE_BYTES_MAX = 4 * MIB
BRACKETS_MAX = 64
"""Maximum nesting depth of brackets: the parser's time grows with the square of the depth."""

INTEGER_BITS_MAX = 64
"""Maximum length of an integer, of whatever notation; Python refuses to print much longer ones."""

_NAMES = {type(None): "nothing", list: "a list", str: "plain text"}


def read_mapping(file: str, bytes_max: int = FILE_BYTES_MAX) -> dict[str, Any]:
    """Return the mapping in a file. Raises ConfigError, which names the file and the line."""
    import yaml

    try:
        check_regular(Path(file))
        with Path(file).open("rb") as opened:
            encoded = opened.read(bytes_max + 1)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}; name another file") from error
    if len(encoded) > bytes_max:
        raise ConfigError(f"{file}: has more than {bytes_max} bytes; name another file")
    try:
        text = encoded.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is not text in UTF-8; name another file") from error
    try:
        data: object = _loader()(text, file).get_single_data()
    except RecursionError as error:
        raise ConfigError(f"{file}: nested too deep for a configuration; correct it") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        what = f"{at}{error.problem or error.context}"
        raise ConfigError(f"{file}: cannot be read as YAML: {what}; correct it") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: e.g. an invalid date
        what = " ".join(str(error).split())
        raise ConfigError(f"{file}: cannot be read as YAML: {what}; correct it") from error
    if not isinstance(data, dict):
        held = _NAMES.get(type(data), "one value")
        raise ConfigError(f"{file}: holds {held}; write key: value lines")
    return data


def value_at(data: object, keys: Sequence[str]) -> Any:  # noqa: ANN401  # any value of the file
    """Return the value at a path in the data of a file; None if there is none."""
    for key in keys:
        if isinstance(data, list):
            data = data[int(key)]
        else:
            data = data.get(key) if isinstance(data, Mapping) else None
    return data


@functools.cache
def _loader() -> Callable[[str, str], yaml.SafeLoader]:
    """Return a safe loader that refuses deep brackets and a key that a mapping has twice.

    The parser would drop the first of two. yaml is imported at the first read.
    """
    import yaml

    class StrictYamlLoader(yaml.SafeLoader):
        def __init__(self, text: str, file: str) -> None:
            super().__init__(text)
            self.name = file

        def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
            if self.flow_level == BRACKETS_MAX:
                problem = f"brackets nested more than {BRACKETS_MAX} deep"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.get_mark())
            super().fetch_flow_collection_start(token)

        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:  # noqa: ANN401  # untyped
            mapping = super().compose_mapping_node(anchor)
            keys = set[str]()
            for key, _ in mapping.value:
                if isinstance(key, yaml.ScalarNode) and key.value in keys:
                    raise ConfigError(
                        f"{self.name}: line {key.start_mark.line + 1}: {key.value!r} is there "
                        "twice; remove one"
                    )
                if isinstance(key, yaml.ScalarNode):
                    keys.add(key.value)
            return mapping

        def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
            number: int = super().construct_yaml_int(node)
            if number.bit_length() > INTEGER_BITS_MAX:
                problem = f"an integer of more than {INTEGER_BITS_MAX} bits"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
            return number

    StrictYamlLoader.add_constructor("tag:yaml.org,2002:int", StrictYamlLoader.construct_yaml_int)
    return StrictYamlLoader
