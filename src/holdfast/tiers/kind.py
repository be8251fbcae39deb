"""Tier kinds: the registry of this package's kinds, and the kinds of other installed packages.

Each kind of this package is a folder beside this file whose `kind.py` defines `KIND`. Another
package registers a kind in the entry point group `holdfast.tiers`: the entry point's name is the
`kind` in a configuration, its object is a `TierKind`. `examples/toy-tier` is a complete example.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import msgspec

from holdfast.byte_size import Size
from holdfast.codec.codec import CodecMode
from holdfast.errors import ConfigError
from holdfast.finding import Finding
from holdfast.installed import entry_points, find_installed
from holdfast.policy.movement import Take
from holdfast.tiers.base import Tier

if TYPE_CHECKING:
    from holdfast.wire.remote.credentials import Credentials

ENTRY_POINTS = "holdfast.tiers"

BUILT_IN = ("cxl", "disk", "pool", "files", "object", "valkey", "mooncake")
"""This package's kinds: each is the name of its folder."""

Admit: TypeAlias = Literal["always", "second_touch", "reuse", "reuse_interval"]
"""The admission rules that a kind can offer as an option."""


class TierSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base class of a kind's options: the fields of its section in a configuration."""


class LowerTierSection(TierSection, frozen=True, kw_only=True):
    """Base class of the options of a kind below memory: which blocks move to the tier.

    `write`: whether it gets blocks soon after their save (`behind`), or when memory evicts them
    (`on_eviction`); left out: as `write` of the node. `admit_evicted`: which of the blocks that
    faster tiers below memory evict it is offered: none, those used at least twice or durable, or
    all. `admit_fetched`: which of the blocks that are read from slower tiers it is offered; CXL
    memory is offered all. Its admission rule and write budgets apply to all of them. `move_limit`:
    maximum bytes a second that are moved to it from other tiers below memory; unlimited if left
    out.
    """

    write: Literal["behind", "on_eviction"] | None = None
    admit_evicted: Take = "reused"
    admit_fetched: Take = "reused"
    move_limit: Size | None = None


class RecordTierSection(LowerTierSection, frozen=True, kw_only=True):
    """Base class of the options of a kind that keeps encoded records as it keeps raw ones.

    A kind whose readers use its records in place, as engines use those in memory, keeps raw records
    only, and derives from `LowerTierSection`. `codec`: whether new records are encoded, `auto` if
    they then arrive no later than raw ones, `off` never, `planes` always.
    """

    codec: CodecMode = "auto"


class TierContext(NamedTuple):
    """Context of a tier, beside its options.

    `at` is the key path of its section, at the start of error messages. `name` identifies the tier
    in status and logs. `segment_blocks` is the number of blocks of a chain that share a place on a
    shared tier. `credentials` and `transport` are the node's for connections to other nodes.
    """

    at: str
    name: str
    segment_blocks: int
    credentials: Credentials | None = None
    transport: str = "tcp"


def _accept(options: Any, at: str) -> None:  # noqa: ANN401  # the kind's own options
    """Accept all options that have the right types."""


def _show_options(options: Any, context: TierContext) -> Iterator[Finding]:  # noqa: ANN401
    """Show the options as they are."""
    yield Finding(context.at, context.name, repr(options), ok=True)


class TierKind(NamedTuple):
    """A kind of tier.

    `options` is a subclass of `TierSection`. `open` returns the tier, a `Tier` or, with
    `shared`, a `SharedTier`; it raises ConfigError if the medium does not match the options.
    `check` raises ConfigError for option values out of range and accesses nothing else.
    `examine` yields the findings of `holdfast doctor`; it changes nothing. `paths` names the
    options that are paths of files: they are relative to the configuration's folder. `keep_s`
    returns for how many seconds the tier keeps a record at most, by its options, of a kind whose
    medium keeps records through a loss of power; None: its tiers keep no durable contexts.
    """

    options: type[TierSection]
    open: Callable[[Any, TierContext], Tier]
    shared: bool = False
    check: Callable[[Any, str], None] = _accept
    examine: Callable[[Any, TierContext], Iterator[Finding]] = _show_options
    paths: Sequence[str] = ()
    keep_s: Callable[[Any], float] | None = None


def keeps_forever(options: Any) -> float:  # noqa: ANN401, ARG001  # the kind's own options
    """Return that a tier deletes no record because of its age."""
    return math.inf


def installed_kinds() -> list[str]:
    """Return the names of the kinds from installed packages, without loading them."""
    return sorted({point.name for point in entry_points(ENTRY_POINTS)})


@cache
def built_in_kind(name: str) -> TierKind:
    """Return a kind of this package; raise KeyError for another name."""
    if name not in BUILT_IN:
        raise KeyError(name)
    kind: TierKind = import_module(f"holdfast.tiers.{name}.kind").KIND
    return kind


@cache
def find_kind(name: str) -> TierKind | None:
    """Return an installed kind by its name; None if no package registers it.

    Raises ConfigError if several packages register it, or if it cannot be loaded.
    """
    return find_installed(ENTRY_POINTS, name, TierKind, f"tier kind {name!r}", ConfigError)
