"""Confirm a destructive command: by a question on a terminal, elsewhere by `--yes`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.cli.options import many
from holdfast.config import Size
from holdfast.errors import RefusedError


def add_yes_argument(parser: argparse.ArgumentParser) -> None:
    """Declare `--yes`."""
    parser.add_argument(
        "--yes", action="store_true", help="do it without asking, even if blocks are lost"
    )


def confirm(loss: Sequence[str], question: str) -> None:
    """Print what would be lost, and ask; raise RefusedError unless the answer is yes.

    Both are printed to standard error, because standard output may be JSON.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise RefusedError(
            f"{'; '.join(loss)}; nothing was changed; there is no terminal to ask on: add --yes "
            "to do it"
        )
    print("\n".join(loss), file=sys.stderr)
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise RefusedError("nothing was changed")


def copies(tiers: Mapping[str, Mapping[str, int]]) -> str:
    """Return the number of copies on each tier, such as "960 blocks on disk (3.75 GiB)"."""
    found = (
        f"{many(tier['blocks'], 'block')} on {name} ({Size(tier['bytes'])})"
        for name, tier in tiers.items()
    )
    return ", ".join(found) or "no block"


def not_counted(found: Mapping[str, Any], *, stays: bool = False) -> list[str]:
    """Return a line for each kind of copies that a preview could not count.

    `stays`: the command does not delete copies on shared tiers.
    """
    lines = []
    if found.get("uncounted"):
        names = ", ".join(found["uncounted"])
        lines.append(
            f"copies on {names} are not deleted, and can be fetched again"
            if stays
            else f"there may be more copies on {names}, which this node cannot count"
        )
    if not found.get("complete", True):
        lines.append(
            "there may be more: the recovery of this node's tiers after its start is not complete"
        )
    return lines
