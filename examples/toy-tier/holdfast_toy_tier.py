"""Two kinds of tiers that keep records in memory of this process: a local one and a shared one."""

from collections.abc import Iterator

from holdfast.byte_size import Size
from holdfast.errors import ConfigError
from holdfast.finding import Finding
from holdfast.testing.memory import MemoryTier, Records, SharedMemoryTier
from holdfast.tiers.base import Tier
from holdfast.tiers.kind import TierContext, TierKind, TierSection

CAPACITY_MIN = 1 << 20


class ToyOptions(TierSection, frozen=True):
    """`capacity`: bytes of memory."""

    capacity: Size


class SharedToyOptions(TierSection, frozen=True):
    """`shelf`: name of a set of records; stores of this process with the same name share it."""

    shelf: str = "default"


_shelves: dict[str, Records] = {}


def check(options: ToyOptions, at: str) -> None:
    """Raise ConfigError for a capacity below `CAPACITY_MIN`."""
    if options.capacity < CAPACITY_MIN:
        raise ConfigError(
            f"{at}.capacity: {options.capacity} is less than {Size(CAPACITY_MIN)}; raise it"
        )


def open_toy(options: ToyOptions, context: TierContext) -> Tier:
    """Return a local tier; its records are lost when it is closed."""
    return MemoryTier(options.capacity, name=context.name)


def open_shared(options: SharedToyOptions, context: TierContext) -> Tier:
    """Return a shared tier; stores of this process with the same shelf share its records."""
    return SharedMemoryTier(_shelves.setdefault(options.shelf, {}), name=context.name)


def examine(options: ToyOptions, context: TierContext) -> Iterator[Finding]:
    """Yield the finding that `holdfast doctor` shows."""
    yield Finding(context.at, context.name, f"{options.capacity} of this process", ok=True)


TOY = TierKind(options=ToyOptions, open=open_toy, check=check, examine=examine)
TOY_SHARED = TierKind(options=SharedToyOptions, open=open_shared, shared=True)
