"""The report of a measurement: named rows about one machine, as JSON and as a table."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.errors import ConfigError, HoldfastError
from holdfast.probe import kernel_text
from holdfast.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

PIPE_COLUMNS = 10_000
"""Maximum width of a table that is not printed to a terminal."""

_OPTIONAL = ("ratio", "goal", "limit")
"""Columns that are omitted if a table is too wide, the last one first."""


class Row(msgspec.Struct, frozen=True):
    """One figure of a report.

    `limit`: what the simplest code reached in the same run, in the same unit. `goal`: bound on
    `ratio`, or on `value` if there is no ratio. `ok`: None if there is no goal. `more`: further
    fields of this kind of row, flattened into the row in JSON.
    """

    what: str
    value: float | None
    unit: str
    more: dict[str, object] = {}
    limit: float | None = None
    ratio: float | None = None
    goal: float | None = None
    ok: bool | None = None


class Report(msgspec.Struct, frozen=True):
    """The rows that one command measured; `broken_off`: the command was interrupted."""

    name: str
    rows: Sequence[Row]
    broken_off: bool = False

    @property
    def ok(self) -> bool:
        """Whether the command completed and no row missed its goal."""
        return not self.broken_off and all(row.ok is not False for row in self.rows)


def share(
    what: str, value: float, unit: str, limit: float, goal: float | None = None, **more: object
) -> Row:
    """Return the row of a speed and its limit; `goal`: smallest acceptable share of the limit.

    `more`, here and below: further fields of the row.
    """
    ratio = value / limit
    ok = None if goal is None else ratio >= goal
    return Row(
        what=what, value=value, unit=unit, limit=limit, ratio=ratio, goal=goal, ok=ok, more=more
    )


def at_most(what: str, value: float, unit: str, goal: float | None = None, **more: object) -> Row:
    """Return the row of a cost; `goal`: the largest acceptable value."""
    ok = None if goal is None else value <= goal
    return Row(what=what, value=value, unit=unit, goal=goal, ok=ok, more=more)


def at_least(what: str, value: float, unit: str, goal: float | None = None, **more: object) -> Row:
    """Return the row of a gain; `goal`: the smallest acceptable value."""
    ok = None if goal is None else value >= goal
    return Row(what=what, value=value, unit=unit, goal=goal, ok=ok, more=more)


def not_measured(what: str, why: str) -> Row:
    """Return the row, without a value, of a figure that cannot be measured here."""
    return Row(what=what, value=None, unit="", more={"why": why})


def machine() -> dict[str, object]:
    """Return this machine's processor, cores, memory, kernel and Python, and the date."""
    return {
        "cpu": kernel_text("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": 1024 * int((kernel_text("/proc/meminfo", "MemTotal") or "0").split()[0]),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def to_json(report: Report) -> bytes:
    """Encode a report as indented JSON, in the format that all commands share."""
    rows = []
    for row in report.rows:
        fields = msgspec.structs.asdict(row)
        more = fields.pop("more")
        rows.append({**fields, **more})
    document = {
        "name": report.name,
        "version": __version__,
        "machine": machine(),
        **({"broken_off": True} if report.broken_off else {}),
        "rows": rows,
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def check_target(option: str, target: str) -> None:
    """Raise ConfigError if the file that an option names cannot be written; call before the work.

    A missing folder is an error, because the path is probably misspelled. An existing file keeps
    its content. `-` is standard output.
    """
    if target == "-":
        return
    path = Path(target)
    try:
        was_there = path.exists()
        if was_there and not path.is_file() and not path.is_dir():
            return  # closing a FIFO here would signal end-of-file to its reader
        with path.open("ab"):
            pass
        if not was_there:
            path.unlink()  # leave no empty file
    except OSError as error:
        raise ConfigError(
            f"{option}: cannot write {target!r}: {error.strerror}; choose another file"
        ) from error


def write_text(option: str, target: str, text: str) -> None:
    """Write text to the file that an option names, `-` for standard output.

    Raises ConfigError if the file cannot be opened, HoldfastError if the write fails.
    """
    if target == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    check_target(option, target)
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:  # such as a full disk; the error does not name the file
        raise HoldfastError(
            f"{option}: {target!r} is not complete: {error.strerror}; free space, or choose "
            "another file"
        ) from error


def write(report: Report, target: str) -> None:
    """Write a report as JSON to the file of `--json`. Raises ConfigError."""
    write_text("--json", target, to_json(report).decode())


def console(json_target: str | None) -> Console:
    """Return the terminal to show progress on: standard error if JSON goes to standard output.

    Raises ConfigError if rich is not installed.
    """
    try:
        from rich.console import Console
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the rich package is missing: pip install 'holdfast-kv[bench]', or 'holdfast-kv[demo]' "
            "for the demo, brings it"
        ) from error
    shown = Console(stderr=json_target == "-", highlight=False)
    if not shown.is_terminal:
        shown.width = PIPE_COLUMNS
    return shown


def show(console: Console, report: Report, also: Sequence[str] = ()) -> None:
    """Print the rows as a table, with columns for the named fields of `more` in `also`.

    Empty columns are omitted. On a narrow terminal optional columns are omitted too, the last of
    `also` first. Cells of a table that is still too wide are wrapped; no figure is truncated.
    """
    from rich.box import SIMPLE
    from rich.table import Table

    rows = [{**msgspec.structs.asdict(row), **row.more} for row in report.rows]
    wanted = ("value", "unit", "limit", "ratio", "goal", *also, "ok")
    names = [name for name in wanted if any(row.get(name) is not None for row in rows)]
    optional = [name for name in (*_OPTIONAL, *also) if name in names]
    left_out: list[str] = []
    title = report.name + (", broken off" if report.broken_off else "")
    unbounded = console.options.update_width(PIPE_COLUMNS)
    while True:
        shown = Table(
            title=f"holdfast {title}", title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0)
        )
        shown.add_column("what", overflow="fold")
        for heading in names:
            shown.add_column(heading, justify="right", overflow="fold")
        for row in rows:
            shown.add_row(str(row["what"]), *(cell(row.get(heading)) for heading in names))
        fits = console.measure(shown, options=unbounded).maximum <= console.width
        if fits or not optional:
            break
        left_out.append(optional.pop())
        names.remove(left_out[-1])
    console.print(shown)
    if left_out:
        words = ", ".join(reversed(left_out))
        console.print(
            f"columns omitted on this narrow terminal, see --json: {words}", soft_wrap=True
        )


def number(value: float | None) -> str:
    """Return a figure with three significant digits; empty for None."""
    if value is None:
        return ""
    digits = f"{value:.3g}"
    return f"{float(digits):,.0f}" if abs(value) >= 100 else digits  # noqa: PLR2004  # 3 digits


def cell(value: object) -> str:
    """Return the text of any field of a row."""
    if isinstance(value, bool) or value is None:
        return mark(value)
    return number(value) if isinstance(value, float) else str(value)


def mark(ok: bool | None) -> str:  # noqa: FBT001  # a value to show, not a switch
    """Return `yes` or `no` in colour; empty for None."""
    return "" if ok is None else "[green]yes[/]" if ok else "[red]no[/]"
