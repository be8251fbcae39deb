"""Movement: which tiers are offered a block that a tier evicts, or that is fetched from below.

Pure. Tiers are numbered from the fastest; *volatile* tiers lose their contents with the process.
The store and the simulator take the same answers. What is evicted moves only to slower tiers, and
what is fetched only to faster ones, so no two rules move a block in a circle: only a use brings it
up again.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Literal, NamedTuple, TypeAlias

Take: TypeAlias = Literal["never", "reused", "always"]
"""Which of the blocks that are offered to a tier it takes, before its admission rule is asked.
`reused`: those that were used at least `REUSED` times, or are durable."""

REUSED = 2
"""Uses from which a block counts as reused; its first save is one."""


class Intake(NamedTuple):
    """What a tier takes beside blocks that are computed.

    `saves`: it gets blocks soon after their save; otherwise when memory evicts them. `evicted`:
    blocks that faster tiers below memory evict. `fetched`: blocks that are read into memory from
    slower tiers; a volatile tier is offered all of these.
    """

    saves: bool = True
    evicted: Take = "reused"
    fetched: Take = "reused"


def takes(take: Take, uses: int, *, is_durable: bool = False) -> bool:
    """Return whether a tier takes a block that was used so often."""
    return take == "always" or (take == "reused" and (is_durable or uses >= REUSED))


def takes_fetched(
    intake: Intake, uses: int, *, is_volatile: bool, is_durable: bool = False
) -> bool:
    """Return whether a tier takes a block that is fetched from another one and that it lacks.

    `is_volatile`: the tier or the source is, so that the block was not saved there for good.
    """
    return is_volatile or takes(intake.fetched, uses, is_durable=is_durable)


def counts_uses(intakes: Mapping[int, Intake]) -> bool:
    """Return whether a tier's intake depends on uses: the first and only one evicts to none."""
    takers = [(n, intake) for n, intake in intakes.items()]
    return any(n > min(intakes) and intake.evicted == "reused" for n, intake in takers) or any(
        n < max(intakes) and intake.fetched == "reused" for n, intake in takers
    )


def demotion_targets(source: int, intakes: Mapping[int, Intake]) -> tuple[int, ...]:
    """Return the tiers that are offered what tier `source` evicts, nearest first.

    Of these, the first one that takes the block gets it. `intakes`: of the tiers below memory.
    """
    return tuple(n for n in sorted(intakes) if n > source and intakes[n].evicted != "never")


def promotion_targets(
    source: int, intakes: Mapping[int, Intake], volatile: Container[int]
) -> tuple[int, ...]:
    """Return the tiers below memory that are offered a block read from tier `source`.

    They are offered it only if they lack it. The tiers above `source` take what is fetched. A block
    that a volatile tier had is also offered to the tiers below that get saves, because these may
    have dropped it, or may admit it now.
    """
    tiers = [tier for tier in sorted(intakes) if tier != source]
    if source in volatile:
        return tuple(tier for tier in tiers if tier < source or intakes[tier].saves)
    above = (tier for tier in tiers if tier < source)
    return tuple(t for t in above if t in volatile or intakes[t].fetched != "never")
