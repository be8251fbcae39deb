"""Render docs/benchmarks.md from the reports in docs/benchmarks/: what was measured, and where."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
REPORTS = ROOT / "docs" / "benchmarks"

INTRO = """\
# Benchmarks

Rendered by `make bench` from the reports in `docs/benchmarks/` (`tools/benchmarks.py`). Each figure
is a median. Where a figure has a *limit*, the limit was measured in the same run, in turns with
ours, by the plainest code that moves the same bytes into as much memory; *ratio* is ours over the
limit, taken in each round where rounds are short. The machines are shared and noisy: compare
ratios, not seconds. *goal* is what the ratio (or the value, where
there is no limit) has to reach; a missed goal is printed like a met one.
"""
DIGITS = 3
KNOWN = ("what", "value", "unit", "limit", "ratio", "goal", "ok")

CHART = REPORTS / "pool.svg"
CHART_SIZES = ("64KiBx32", "512KiBx32", "2MiBx32", "8MiBx32")
CHART_STORES = {
    "plain": ("plain sockets", "#9aa5b1"),
    "pool": ("Holdfast", "#1f6feb"),
    "peer.mooncake": ("Mooncake Store, TCP", "#d98324"),
    "peer.redis": ("Redis", "#b3423a"),
    "peer.lmcache": ("LMCache server", "#5b8c5a"),
}
BAR, GAP, LEFT, WIDTH = 13, 18, 150, 430


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


Speeds: TypeAlias = dict[tuple[str, str, str], float]
"""GB/s by store, verb and size."""


def chart(report: dict[str, Any]) -> str:
    """Return an SVG of GB/s, 32 blocks a call; stores that were not measured are left out."""
    speeds: Speeds = {}
    for row in report["rows"]:
        store, _, rest = str(row["what"]).rpartition(".")[0].rpartition(".")
        size = str(row["what"]).rpartition(".")[2]
        if size in CHART_SIZES and store in CHART_STORES:
            speeds[store, rest, size] = row["value"]
            if row.get("limit") is not None:
                speeds["plain", rest, size] = row["limit"]
    stores = [name for name in CHART_STORES if any(key[0] == name for key in speeds)]
    top = 30 + 16 * len(stores)
    lines = [*legend(stores), *bars(speeds, stores, top)]
    wide = LEFT + WIDTH + 50
    high = top + 2 * len(CHART_SIZES) * (BAR * len(stores) + GAP)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" '
    head += f'height="{high}" font-family="sans-serif" font-size="11">'
    back = '<rect width="100%" height="100%" fill="white"/>'
    title = '<text x="10" y="12">GB/s over loopback TCP, one client (more is better)</text>'
    return "\n".join([head, back, title, *lines, "</svg>", ""])


def legend(stores: list[str]) -> Iterator[str]:
    """The stores' names beside their colours."""
    for number, name in enumerate(stores):
        words, colour = CHART_STORES[name]
        y = 18 + 16 * number
        yield f'<rect x="{LEFT}" y="{y}" width="10" height="10" fill="{colour}"/>'
        yield f'<text x="{LEFT + 16}" y="{y + 9}">{escape(words)}</text>'


def bars(speeds: Speeds, stores: list[str], y: int) -> Iterator[str]:
    """A group of bars for each verb and size."""
    most = max(speeds.values(), default=1.0)
    for verb in ("get", "put"):
        for size in CHART_SIZES:
            yield f'<text x="10" y="{y + BAR}">{verb}, 32 x {size[:-3]}</text>'
            for name in stores:
                speed, (_, colour) = speeds.get((name, verb, size), 0.0), CHART_STORES[name]
                wide = f"{WIDTH * speed / most:.1f}"
                at = f'x="{LEFT}" y="{y}" width="{wide}" height="{BAR - 2}"'
                yield f'<rect {at} fill="{colour}"/>'
                yield f'<text x="{LEFT + 5 + float(wide):.1f}" y="{y + BAR - 3}">{speed:.2g}</text>'
                y += BAR
            y += GAP


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
    lines: list[str] = []
    for report in reports:
        lines += section(report)
        if report["name"] == "bench pool":
            CHART.write_text(chart(report))
            lines += ["", f"![GB/s by store and size]({CHART.relative_to(PAGE.parent)})"]
    PAGE.write_text(INTRO + "\n".join(lines or ["\nNothing is measured yet."]) + "\n")


if __name__ == "__main__":
    main()
