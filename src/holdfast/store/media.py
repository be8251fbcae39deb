"""Detach or replace the medium of a tier while the store serves, as an operator asks.

The store forgets the copies on the former medium in its next housekeeping (`rewrite_lost`): blocks
in memory are queued for the new medium. A read of a copy that is not forgotten yet is a miss.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.errors import BlockError, ConfigError
from holdfast.store.core import StoreParts
from holdfast.store.unreadable import UnreadableCount
from holdfast.tiers.base import Replaceable


def would_lose(store: StoreParts, name: str) -> dict[str, Any]:
    """Return what the store would forget with a tier's medium; see `UnreadableCount`.

    Nothing if the medium is away: the store forgets what it held in any case. Raises ConfigError
    for a tier that does not exist or has no medium to replace.
    """
    number, tier = _replaceable(store, name)
    table, result = store.table, UnreadableCount(store.table)
    is_away = bool(tier.usage().away)

    def count(row: int) -> None:
        if table.is_on(row, number):
            result.add(row, [number])

    if not is_away:
        table.for_each_row(lambda _: True, count)
    return {"tier": name, **result.as_data()}


def detach(store: StoreParts, name: str) -> dict[str, Any]:
    """Release a tier's medium, so that it can be taken out; return what the store forgets."""
    _, tier = _replaceable(store, name)
    found = would_lose(store, name)
    tier.detach()
    store.audit.record("detach", tier=name, blocks=found["blocks"])
    return found


def replace(store: StoreParts, name: str, path: str = "") -> dict[str, Any]:
    """Use the medium at `path`, by default the tier's own; return what the store forgets.

    Raises what `Replaceable.replace` raises, and BlockError for a path that is not absolute.
    """
    _, tier = _replaceable(store, name)
    if path and not Path(path).is_absolute():
        raise BlockError(
            f"replace: path {path!r} is not absolute, and the node has another working folder; "
            "give the path from /"
        )
    found = would_lose(store, name)
    tier.replace(path)
    store.audit.record("replace", tier=name, path=path, blocks=found["blocks"])
    return found


def restore_files(store: StoreParts) -> None:
    """Write the small files beside the blocks that a replaced medium lacks."""
    tiers = (tier for tier in store.table.lower if isinstance(tier, Replaceable))
    if any(tier.has_survivors() for tier in tiers):
        store.options.restore_files()
        store.marks_file.rewrite()


def _replaceable(store: StoreParts, name: str) -> tuple[int, Replaceable]:
    """Return the number of a tier and the tier; raise ConfigError if it has no medium."""
    tiers = {
        tier.name: (number, tier)
        for number, tier in enumerate(store.table.lower, start=1)
        if isinstance(tier, Replaceable)
    }
    if name not in tiers:
        known = ", ".join(tiers) or "none"
        raise ConfigError(
            f"tier {name!r} has no drive that can be replaced; those that have: {known}"
        )
    return tiers[name]
