"""The HTML report of a simulation: one page without scripts or links, in light or dark mode."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from holdfast.report import Row
from holdfast.sim.amounts import figure_text, size_text
from holdfast.sim.bounds import StoreBounds
from holdfast.sim.economy import assumptions
from holdfast.sim.figures import SimulationFigures
from holdfast.sim.hardware import capacity_text
from holdfast.sim.pictures import capacity_chart, history_chart, retention_chart, time_chart
from holdfast.sim.verdict import verdict
from holdfast.version import __version__

_STYLE = """\
:root { color-scheme: light dark; --ink: #24292f; --pale: #57606a; --line: #d0d7de;
  --back: #ffffff; --bar: #0969da }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --pale: #9198a1; --line: #30363d; --back: #0d1117; --bar: #58a6ff }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back);
  max-width: 76rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: 0 } h2 { font-size: 1.1rem; margin-top: 2rem }
.pale { color: var(--pale) }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { border-bottom: 1px solid var(--line); padding: .25rem .8rem; text-align: right }
td:first-child, th:first-child { text-align: left; padding-left: 0 }
.bar { display: inline-block; height: .7em; background: var(--bar) }
.cards { display: flex; flex-wrap: wrap; gap: 1rem; margin: 1.2rem 0 }
.cards div { border: 1px solid var(--line); border-radius: 6px; padding: .6rem 1rem }
.cards b { display: block; font-size: 1.4rem }
.charts { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(36rem, 100%), 1fr)) }
.wide, figure { overflow-x: auto; margin: 0 }
svg { width: 100%; min-width: 34rem; height: auto }
h1, p, li { overflow-wrap: anywhere }
.verdict { border-left: 4px solid var(--bar); padding-left: .8rem }
.verdict b { font-size: 1.1rem }"""

_CARDS = {
    "sim.hit.tokens": ("of the input from tiers", "{:.1%}"),
    "sim.best.tokens": ("with unlimited capacity", "{:.1%}"),
    "sim.ttft.p50": ("first token, median", "{:.2f} s"),
    "sim.ttft.p99": ("first token, 99 %", "{:.2f} s"),
    "sim.gpu.saved": ("GPU seconds saved", "{:,.0f}"),
    "sim.cost.per_million_out": ("per million output tokens", "${:.2f}"),
    "sim.cost.without_ladder": ("without the ladder", "${:.2f}"),
}

_TIER_COLUMNS = (
    "tier",
    "input served",
    "read, GB",
    "written, GB",
    "held at the peak",
    "in blocks",
    "capacity, blocks",
    "writes refused",
    "writes declined",
)

_BAR_EM = 8


def page(run: SimulationFigures, figures: Sequence[Row], found: StoreBounds, command: str) -> str:
    """Return the page; it shows `command`, the command that produced it."""
    title = f"{run.trace.name} on {run.fleet.hardware.name}"
    charts = capacity_chart(run, found), time_chart(run), history_chart(run), retention_chart(found)
    trace, workers = run.trace, len(run.fleet.workers)
    summary = (
        f"{trace.requests:,} requests in {trace.span_s:,.0f} s, "
        f"{trace.input_tokens.sum() / 1e6:,.1f} M tokens in, {run.output_tokens / 1e6:,.1f} M out, "
        f"{workers} worker{'' if workers == 1 else 's'}"
    )
    conclusion, *warnings = verdict(figures)
    cards, tiers, rows = [], [], []
    for figure in figures:
        if figure.what in _CARDS and figure.value is not None:
            label, form = _CARDS[figure.what]
            cards.append(f"<div><b>{escape(form.format(figure.value))}</b>{escape(label)}</div>")
        if figure.what.startswith("sim.tier."):
            more, share = figure.more, figure.value or 0.0
            bar = f'<span class="bar" style="width:{share * _BAR_EM:.2f}em"></span>'
            cells = (
                f"{figure.what.rpartition('.')[2]} {bar}",
                f"{share:.1%}",
                _cell(more["read_gb"]),
                _cell(more["written_gb"]),
                size_text(float(str(more["peak_bytes"]))),
                _cell(more["peak_blocks"]),
                capacity_text(more["capacity_blocks"]),
                _cell(more["refused_blocks"]),
                _cell(more["declined_blocks"]),
            )
            tiers.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
        else:
            plain = {k: v for k, v in figure.more.items() if isinstance(v, int | float | str)}
            details = escape(", ".join(f"{k} {_cell(v)}" for k, v in plain.items()))
            rows.append(
                f"<tr><td><code>{escape(figure.what)}</code></td><td>{_cell(figure.value)}</td>"
                f'<td class="pale">{escape(figure.unit)}</td><td class="pale">{details}</td></tr>'
            )
    heads = "".join(f"<th>{column}</th>" for column in _TIER_COLUMNS)
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="pale">{escape(summary)}<br><code>{escape(command)}</code></p>',
        f'<div class="verdict"><b>{escape(conclusion)}</b>{_items(warnings)}</div>',
        f'<div class="cards">{"".join(cards)}</div>',
        "<h2>Tiers</h2>",
        f'<div class="wide"><table><tr>{heads}</tr>{"".join(tiers)}</table></div>',
        "<h2>Charts</h2>",
        f'<div class="charts">{"".join(f"<figure>{one}</figure>" for one in charts)}</div>',
        "<h2>Figures</h2>",
        f'<div class="wide"><table>{"".join(rows)}</table></div>',
        "<h2>Assumptions</h2>",
        _items(assumptions(run)),
        f'<p class="pale">holdfast {escape(__version__)}</p>',
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style>"
    )
    inner = "\n".join(body)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>{head}</head>\n<body>\n{inner}\n</body></html>\n'
    )


def _items(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return figure_text(value)
    return f"{value:,}" if isinstance(value, int) else escape(str(value))
