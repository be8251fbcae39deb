"""Units of amounts and time, and amounts as text: bytes, figures and durations."""

from __future__ import annotations

SECONDS_PER_DAY = 86_400
HOURS_PER_YEAR = 8_760.0
HOURS_PER_MONTH = HOURS_PER_YEAR / 12
GB = 1e9
TB = 1e12
PB = 1e15


def size_text(nbytes: float) -> str:
    """Return bytes with three digits, in decimal units."""
    rounded = float(f"{nbytes:.3g}")  # round before choosing the unit: 999.9 GB is 1 TB
    if rounded >= 1000 * PB:
        return f"{nbytes / PB:,.0f} PB"
    for unit, size in (("PB", PB), ("TB", TB), ("GB", GB)):
        if rounded >= size:
            return f"{rounded / size:.3g} {unit}"
    return f"{rounded / 1e6:.3g} MB"


def figure_text(value: float) -> str:
    """Return a number with three significant digits, or all digits of the integer part."""
    return f"{value:,.0f}" if abs(float(f"{value:.3g}")) >= 1000 else f"{value:.3g}"  # noqa: PLR2004


def duration_text(hours: float) -> str:
    """Return a duration in hours, days, months or years."""
    days = hours / 24
    if hours < 48:  # noqa: PLR2004
        return f"{max(1, round(hours)):d} hours" if hours >= 1.5 else "1 hour"  # noqa: PLR2004
    if days < 90:  # noqa: PLR2004
        return f"{days:.0f} days"
    return f"{days / 30.4:.0f} months" if days < 730 else f"{days / 365:.1f} years"  # noqa: PLR2004
