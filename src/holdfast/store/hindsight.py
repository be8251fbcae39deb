"""How plans came out: how many ended, and how far their first tokens were from expected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

ROUGHLY_RIGHT = 0.25


def right(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how many plans ended, and how far their first tokens were from what was expected.

    Of all figures only plans count whose first token came and was expected: not those of engines
    that have not told yet how fast they compute.
    """
    ended = [
        record
        for record in records
        if record["actual"]["first_token_s"] and record["expected"]["first_token_s"]
    ]
    errors = [
        abs(record["actual"]["first_token_s"] / record["expected"]["first_token_s"] - 1.0)
        for record in ended
    ]
    return {
        "ended": len(errors),
        "within_25_percent": sum(error <= ROUGHLY_RIGHT for error in errors),
        "median_error": median(errors) if errors else None,
        "late": sum(record["outcome"] == "late" for record in ended),
    }
