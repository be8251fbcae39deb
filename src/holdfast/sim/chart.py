"""SVG charts: lines and points on linear or logarithmic axes.

A chart has no links, scripts or embedded fonts, and follows the viewer's light or dark mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import ceil, floor, inf, log10
from typing import Literal, NamedTuple

from holdfast.sim.amounts import figure_text

WIDTH, HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 24, 58, 58
_LETTER_WIDTH = 6.5
_NOTE_GAP = 26
_TICKS = 6
_TICKS_LOG_MIN = 3

_STYLE = """\
text { font: 12px system-ui, sans-serif; fill: #24292f }
.title { font-size: 15px; font-weight: 600 }
.grid { stroke: #d0d7de; stroke-width: 1 }
.s0 { stroke: #0969da } .s1 { stroke: #bc4c00 } .s2 { stroke: #1a7f37 } .s3 { stroke: #8250df }
.f0 { fill: #0969da } .f1 { fill: #bc4c00 } .f2 { fill: #1a7f37 } .f3 { fill: #8250df }
path { fill: none; stroke-width: 2 }
.back { fill: #ffffff }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .back { fill: #0d1117 } .grid { stroke: #30363d }
  .s0 { stroke: #58a6ff } .s1 { stroke: #f0883e } .s2 { stroke: #3fb950 } .s3 { stroke: #bc8cff }
  .f0 { fill: #58a6ff } .f1 { fill: #f0883e } .f2 { fill: #3fb950 } .f3 { fill: #bc8cff }
}"""
_COLOURS = 4


class Axis(NamedTuple):
    """Title of an axis, with its unit, and whether it is logarithmic."""

    title: str
    log: bool = False


class Series(NamedTuple):
    """Points in order of x. `steps` draws right, then up or down; `notes` label the points."""

    label: str
    points: Sequence[tuple[float, float]]
    kind: Literal["line", "steps", "points"] = "line"
    notes: Sequence[str] = ()


def chart(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> str:
    """Return an SVG document, without the points that a logarithmic axis cannot show."""
    shown = []
    for one in series:
        kept = [
            i
            for i, (a, b) in enumerate(one.points)
            if (a > 0 or not x.log) and (b > 0 or not y.log)
        ]
        notes = [one.notes[i] if i < len(one.notes) else "" for i in kept]
        shown.append(one._replace(points=[one.points[i] for i in kept], notes=notes))
    points = [point for one in shown for point in one.points]
    if not points:
        points = [(1.0, 1.0)]
    across = _Scale(x, [p[0] for p in points], _LEFT, WIDTH - _RIGHT)
    up = _Scale(y, [p[1] for p in points], HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<rect class="back" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text class="title" x="{_LEFT}" y="22">{escape(title)}</text>',
    ]
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    for value in across.ticks:
        at, text = across(value), figure_text(value)
        parts += [
            f'<line class="grid" x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{bottom}"/>',
            f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{text}</text>',
        ]
    for value in up.ticks:
        at, text = up(value), figure_text(value)
        parts += [
            f'<line class="grid" x1="{_LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}"/>',
            f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{text}</text>',
        ]
    middle = (_TOP + bottom) / 2
    parts += [
        (
            f'<text x="{(_LEFT + right) / 2:.0f}" y="{HEIGHT - 14}" text-anchor="middle">'
            f"{escape(x.title)}</text>"
        ),
        (
            f'<text transform="translate(18 {middle:.0f}) rotate(-90)" text-anchor="middle">'
            f"{escape(y.title)}</text>"
        ),
    ]
    for i, one in enumerate(shown):
        parts += _series_marks(one, i, across, up)
    at = float(_LEFT)  # the labels in a row below the title, each after a dot of its colour
    for i, one in enumerate(shown):
        dot = f'<tspan class="f{i % _COLOURS}">●</tspan>'
        parts.append(f'<text x="{at:.0f}" y="42">{dot} {escape(one.label)}</text>')
        at += _LETTER_WIDTH * (len(one.label) + 5)
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Scale:
    """Maps values to pixels, on a range between round numbers."""

    def __init__(self, axis: Axis, values: Sequence[float], first: float, last: float) -> None:
        self.log = axis.log
        low, high = min(values), max(values)
        if self.log:
            for marks in ((1,), (1, 3), (1, 2, 5)):
                powers = range(floor(log10(low)) - 1, ceil(log10(high)) + 2)
                every = [m * 10.0**p for p in powers for m in marks]
                begin = max(i for i, value in enumerate(every) if value <= low)
                end = min(i for i, value in enumerate(every) if value >= high)
                self.ticks = every[begin : max(end, begin + 1) + 1]
                if len(self.ticks) > _TICKS_LOG_MIN:
                    break
        else:
            low = min(low, 0.0)
            raw = ((high - low) or abs(high) or 1.0) / _TICKS
            power = 10.0 ** floor(log10(raw))
            step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
            begin, end = floor(low / step), ceil((high or step) / step)
            self.ticks = [i * step for i in range(begin, max(end, begin + 1) + 1)]
        self._low, self._high = self._place(self.ticks[0]), self._place(self.ticks[-1])
        self._first, self._last = first, last

    def __call__(self, value: float) -> float:
        """Return the pixel coordinate of a value."""
        share = (self._place(value) - self._low) / (self._high - self._low)
        return self._first + share * (self._last - self._first)

    def _place(self, value: float) -> float:
        return log10(value) if self.log else value


def _series_marks(one: Series, number: int, across: _Scale, up: _Scale) -> list[str]:
    """Return the path, the dots and the notes of a series.

    A note is slanted, or level and to the left of its point near the right edge.
    """
    colour = number % _COLOURS
    pixels = [(across(a), up(b)) for a, b in one.points]
    parts = []
    if one.kind != "points" and pixels:
        form = "H{:.1f} V{:.1f}" if one.kind == "steps" else "L{:.1f} {:.1f}"
        path = ["M{:.1f} {:.1f}".format(*pixels[0]), *(form.format(a, b) for a, b in pixels[1:])]
        parts.append(f'<path class="s{colour}" d="{" ".join(path)}"/>')
    if one.kind != "line":
        parts += [f'<circle class="f{colour}" cx="{a:.1f}" cy="{b:.1f}" r="4"/>' for a, b in pixels]
    free_from = -inf
    for (a, b), note in zip(pixels, one.notes, strict=True):
        if not note or a < free_from:
            continue
        free_from = a + _NOTE_GAP
        if a + _LETTER_WIDTH * len(note) > WIDTH - _RIGHT:
            place = f'x="{a - 8:.1f}" y="{b - 8:.1f}" text-anchor="end"'
        else:
            place = f'transform="translate({a + 5:.1f} {b - 8:.1f}) rotate(-25)"'
        parts.append(f"<text {place}>{escape(note)}</text>")
    return parts
