"""Render docs/benchmarks.md from the reports in docs/benchmarks/: what was measured, and where."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
REPORTS = ROOT / "docs" / "benchmarks"

INTRO = """\
# Benchmarks

Rendered by `make bench` from the reports in `docs/benchmarks/` (`tools/benchmarks.py`). Each figure
is a median. Where a figure has a *limit*, the limit was measured in the same run, in turns with
ours, by the plainest code that moves the same bytes; *ratio* is ours over the limit. The machines
are shared and noisy: compare ratios, not seconds. *goal* is what the ratio (or the value, where
there is no limit) has to reach; a missed goal is printed like a met one.
"""
DIGITS = 3
KNOWN = ("what", "value", "unit", "limit", "ratio", "goal", "ok")


def figure(value: object) -> str:
    """Three significant digits for numbers; nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10**DIGITS else f"{value:.{DIGITS}g}"
    return str(value)


def row(fields: dict[str, object]) -> str:
    """One line of the table; what only this row has goes to its end."""
    more = "; ".join(f"{k} {figure(v)}" for k, v in fields.items() if k not in KNOWN)
    return "| " + " | ".join([f"`{fields['what']}`", *map(figure, list_of(fields)), more]) + " |"


def list_of(fields: dict[str, object]) -> list[object]:
    """The known fields after the name, in order."""
    return [fields.get(name) for name in KNOWN[1:]]


def section(report: dict[str, Any]) -> Iterator[str]:
    """The lines of one report: machine, date, command, rows."""
    machine = report["machine"]
    memory_gib = machine["memory_bytes"] / (1 << 30)
    yield f"\n## `holdfast {report['name']}`\n"
    yield (
        f"{machine['date']}, {machine['cores']} cores of {machine['cpu']}, {memory_gib:.0f} GiB, "
        f"Linux {machine['kernel']}, Python {machine['python']}, Holdfast {report['version']}.\n"
    )
    yield "| " + " | ".join([*KNOWN, "more"]) + " |"
    yield "|---|--:|---|--:|--:|--:|---|---|"
    yield from (row(fields) for fields in report["rows"])


def main() -> None:
    """Write the page."""
    reports = [json.loads(path.read_text()) for path in sorted(REPORTS.glob("*.json"))]
    lines = [line for report in reports for line in section(report)]
    PAGE.write_text(INTRO + "\n".join(lines or ["\nNothing is measured yet."]) + "\n")


if __name__ == "__main__":
    main()
