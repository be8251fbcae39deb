"""The tier kind `cxl`: memory of a NUMA node without processors, or of a DAX device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from holdfast.byte_size import Size
from holdfast.errors import ConfigError
from holdfast.finding import Finding, problem
from holdfast.limits import MIB
from holdfast.tiers.base import Tier
from holdfast.tiers.cxl.medium import describe
from holdfast.tiers.kind import Admit, LowerTierSection, TierContext, TierKind
from holdfast.tiers.option_checks import check_at_least

CXL_BYTES_MIN = 16 * MIB


class CxlOptions(LowerTierSection, frozen=True, tag="cxl", tag_field="kind"):
    """A tier of CXL memory, in bytes; its blocks do not survive the node.

    `node`: the number of a NUMA node without processors, or "any": ordinary memory, to try it out;
    or `device`: a DAX device, /dev/daxX.Y. `admit`: the rule for copying blocks to it.
    `thrash_guard`: pause copying if blocks are evicted unused.
    """

    capacity: Size
    node: int | Literal["any"] | None = None
    device: str = ""
    admit: Admit = "reuse_interval"
    thrash_guard: bool = True


def check_cxl(options: CxlOptions, at: str) -> None:
    """Raise ConfigError for a size or a place that cannot be."""
    check_at_least(options.capacity, CXL_BYTES_MIN, f"{at}.capacity")
    if (options.node is None) == (not options.device):
        both = f"node {options.node} and device {options.device!r}"
        given = both if options.device else "neither node nor device"
        raise ConfigError(
            f"{at}: {given} given; name a node without processors or a DAX device, or node: any "
            "for ordinary memory"
        )
    if isinstance(options.node, int) and options.node < 0:
        raise ConfigError(f"{at}.node: {options.node} is not a NUMA node; they count from 0")


def open_cxl(options: CxlOptions, context: TierContext) -> Tier:
    """Map the memory. Raises ConfigError if there is too little."""
    from holdfast.tiers.cxl.tier import CxlTier

    return CxlTier(options, context.at, context.name)


def examine_cxl(options: CxlOptions, context: TierContext) -> Iterator[Finding]:
    """Check the NUMA node or the device, without mapping its memory."""
    found = f"cxl, {options.capacity}"
    try:
        yield Finding(context.at, found, describe(options, context.at), ok=True)
    except ConfigError as error:
        yield problem(context.at, found, str(error))


KIND = TierKind(options=CxlOptions, open=open_cxl, check=check_cxl, examine=examine_cxl)
