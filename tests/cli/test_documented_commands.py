"""Every `holdfast` command in README and docs can be typed as it stands."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from holdfast.cli import OptionParser, all_verbs, parser_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "tutorial.md",
    ROOT / "docs" / "index.md",
    *sorted((ROOT / "docs" / "how-to").glob("*.md")),
    *sorted(page for page in (ROOT / "docs" / "reference").glob("*.md") if page.stem != "commands"),
]


def commands(page):
    """Return the words behind `holdfast` of each command in a page's blocks, with its line."""
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"```(?:sh|console)\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"^    (.*)$", text, re.MULTILINE)
    found = {}
    for line in lines:
        match = re.match(
            r"\s*(?:\$ )?(?:[A-Z_]+=\S+ )?(?:\.venv/bin/)?holdfast ([a-z]+(?: .*)?)$", line
        )
        if match:
            typed = re.split(r" (?:[<>|&]|2>)", match[1])[0]
            found[tuple(shlex.split(typed, comments=True))] = line
    return found


TYPED = [
    pytest.param(words, id=f"{page.stem}: {' '.join(words)}")
    for page in PAGES
    for words in commands(page)
]


def test_the_pages_have_commands():
    assert len(TYPED) > 40


@pytest.mark.parametrize("words", TYPED)
def test_every_documented_command_parses(words):
    name, *options = words
    parsed = parser_of(name, all_verbs()[name]).parse(options)
    if name == "bench":
        subject = OptionParser()
        import_module(f"holdfast_bench.cli.bench.{parsed.subject}").add_arguments(subject)
        subject.add_argument("--json")
        subject.parse(parsed.options)
