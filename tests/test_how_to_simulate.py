"""The pages about simulations show what their commands print."""

import re
import shlex
from pathlib import Path

import pytest

from holdfast.cli import main

HOW_TO = Path(__file__).resolve().parent.parent / "docs" / "how-to"
FIGURES = {
    "input tokens served from tiers": "hit tokens",
    "input tokens served, all from memory": "hit tokens",
    "first token, median": "ttft p50",
    "first token, 90 %": "ttft p90",
    "first token, 99 %": "ttft p99",
}


def commands(page):
    text = (HOW_TO / page).read_text()
    lines = "".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("holdfast sim ")]


def table(page, head):
    """Return the rows below a table's head: the figures of both columns by the first cell."""
    text = (HOW_TO / page).read_text()
    [rows] = re.findall(rf"^\| \| {head} \|\n\|[-:|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)[:1]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()]
    return {what: figures for what, *figures in cells}


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Run a command in a folder of its own; returns the lines that it printed."""
    monkeypatch.chdir(tmp_path)

    def lines(*arguments):
        assert main(list(arguments)) == 0
        return capsys.readouterr().out.splitlines()

    return lines


def figure(lines, what):
    """Return a figure of the report, and what it is without the ladder, None if not printed."""
    [line] = [line for line in lines if line.startswith(f"{what}  ")]
    without = re.search(r"without the ladder ([\d.]+)", line)
    return float(line.removeprefix(what).split()[0]), float(without[1]) if without else None


def is_shown(cell, value):
    """Return whether a cell shows this value, rounded as the cell is."""
    number, unit = cell.split()
    shown = 100 * value if unit == "%" else value
    decimals = len(number.partition(".")[2])
    return f"{shown:.{decimals}f}" == number


def check(shown, columns):
    for what, cells in shown.items():
        if what in FIGURES:
            values = [value[FIGURES[what]] for value in columns]
            pairs = [each for each in zip(cells, values, strict=True) if each[0] != "-"]
            assert pairs
            assert all(is_shown(cell, value) for cell, value in pairs), (what, pairs)


def test_the_first_command_prints_what_the_page_shows(run):
    first, _ = commands("simulate.md")
    lines = run(*first)
    text = (HOW_TO / "simulate.md").read_text()
    [shown] = re.findall(r"```text\n(mooncake_.*?)```", text, re.DOTALL)
    for line in shown.splitlines():
        assert line in (*lines, "..."), line
    assert Path("sim.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.soak
def test_agents_gain_what_the_page_shows(run):
    _, agents = commands("simulate.md")
    lines = run(*agents)
    both = {name: figure(lines, name) for name in set(FIGURES.values())}
    ladder, without = ({name: each[side] for name, each in both.items()} for side in (0, 1))
    text = (HOW_TO / "simulate.md").read_text()
    shown = re.findall(r"^\| (input tokens served, all.*|first token.*) \|$", text, re.MULTILINE)[
        -3:
    ]
    rows = {what: figures for what, *figures in (row.split(" | ") for row in shown[-3:])}
    assert len(rows) == 3
    check(rows, (ladder, without))


@pytest.mark.soak
def test_hints_gain_what_the_page_shows(run, tmp_path):
    [ladder] = re.findall(r"```yaml\n(engine.*?)```", (HOW_TO / "hints.md").read_text(), re.DOTALL)
    (tmp_path / "tight.yaml").write_text(ladder)
    [command] = commands("hints.md")
    columns = []
    for options in ([], ["--hints"]):
        lines = run(*command, *options)
        columns.append({name: figure(lines, name)[0] for name in FIGURES.values()})
    shown = table("hints.md", r"without hints \| with hints")
    assert set(shown) < set(FIGURES)
    assert len(shown) == 4
    check(shown, columns)
