"""Plan accuracy: how many plans ended, and how far first tokens were from the expected time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

ROUGHLY_RIGHT = 0.25


def right(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how many plans ended, and how far their first tokens were from the expected time.

    All figures but the last count only plans that were carried out, whose first token came, and
    whose time was expected: not plans for engines that have not reported their speed.
    """
    followed = [record for record in records if not record["not_followed"]]
    ended = [
        record
        for record in followed
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
        "not_followed": len(records) - len(followed),
    }
