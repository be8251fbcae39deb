"""Two kinds of tiers that keep records in this process: one of a store's own, one shared."""

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
    """`shelf`: stores of this process that name the same one share what is there."""

    shelf: str = "default"


_shelves: dict[str, Records] = {}


def check(options: ToyOptions, at: str) -> None:
    """Raise ConfigError for a capacity that holds nothing."""
    if options.capacity < CAPACITY_MIN:
        raise ConfigError(
            f"{at}.capacity: {options.capacity} is less than {Size(CAPACITY_MIN)}; raise it"
        )


def open_toy(options: ToyOptions, context: TierContext) -> Tier:
    """Return a tier that forgets everything when it is closed."""
    return MemoryTier(options.capacity, name=context.name)


def open_shared(options: SharedToyOptions, context: TierContext) -> Tier:
    """Return a tier that every store of this process with the same shelf writes to."""
    return SharedMemoryTier(_shelves.setdefault(options.shelf, {}), name=context.name)


def examine(options: ToyOptions, context: TierContext) -> Iterator[Finding]:
    """Yield what `holdfast doctor` shows."""
    yield Finding(context.at, context.name, f"{options.capacity} of this process", ok=True)


TOY = TierKind(options=ToyOptions, open=open_toy, check=check, examine=examine)
TOY_SHARED = TierKind(options=SharedToyOptions, open=open_shared, shared=True)
