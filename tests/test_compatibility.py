"""The page of compatibility names the versions that are declared and installed."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "reference" / "compatibility.md").read_text()
ROWS = dict(re.findall(r"^\| [^|]*\(`([\w-]+)`\) \| `([^`]+)` \|", PAGE, re.MULTILINE))


def declared():
    """The requirements of users: of the package and its extras, and the pinned engine."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    users = (extras[name] for name in ("secure", "nixl", "object", "mooncake"))
    lines = [*project["dependencies"], *(line for extra in users for line in extra)]
    for name in ("torch", "vllm"):
        text = (ROOT / "requirements" / f"{name}.txt").read_text()
        lines += [line for line in text.splitlines() if not line.startswith("#")]
    return {each.name: each for each in map(Requirement, filter(None, lines))}


def test_the_page_names_each_declared_range():
    assert {name: Requirement(name + text).specifier for name, text in ROWS.items()} == {
        name: each.specifier for name, each in declared().items()
    }


@pytest.mark.parametrize("package", ROWS)
def test_the_installed_version_is_in_the_range(package):
    assert metadata.version(package) in Requirement(package + ROWS[package]).specifier
