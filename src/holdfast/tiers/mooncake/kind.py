"""The tier kind `mooncake`: a Mooncake Store that already runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from holdfast.byte_size import Size
from holdfast.errors import ConfigError
from holdfast.finding import Finding
from holdfast.limits import MIB
from holdfast.tiers.base import Tier
from holdfast.tiers.kind import RecordTierSection, TierContext, TierKind
from holdfast.tiers.option_checks import (
    check_address,
    check_at_least,
    check_store_calls,
    examine_server,
)

LANE_BYTES_MIN = MIB


class MooncakeOptions(RecordTierSection, frozen=True, tag="mooncake", tag_field="kind"):
    """An existing Mooncake Store; times in seconds.

    `master`: tcp://HOST:PORT. `host`: this machine's address for the others, if it differs from the
    one that connects to the master. `devices`: the devices for `protocol: rdma`. `lane`: size of
    the largest record; the tier needs four times that in memory. `deadline_s` bounds one read or
    write, `ask_s` one lookup or deletion.
    """

    master: str
    host: str = ""
    protocol: Literal["tcp", "rdma"] = "tcp"
    devices: str = ""
    lane: Size = Size(64 * MIB)
    prefix: str = "holdfast"
    deadline_s: float = 2.0
    ask_s: float = 0.25


def check_mooncake(options: MooncakeOptions, at: str) -> None:
    """Raise ConfigError for values out of range."""
    check_store_calls(options.deadline_s, options.ask_s, options.prefix, at)
    check_address(options.master, f"{at}.master")
    check_at_least(options.lane, LANE_BYTES_MIN, f"{at}.lane")


def open_mooncake(options: MooncakeOptions, context: TierContext) -> Tier:
    """Open the tier; no master needs to answer."""
    from holdfast.tiers.mooncake.tier import MooncakeTier

    try:
        return MooncakeTier(options, name=context.name)
    except ConfigError as error:
        raise ConfigError(f"{context.at}: {error}") from error


def examine_mooncake(options: MooncakeOptions, context: TierContext) -> Iterator[Finding]:
    """Check that the master accepts connections."""
    yield examine_server("mooncake", [options.master], context.at)


KIND = TierKind(
    options=MooncakeOptions,
    open=open_mooncake,
    shared=True,
    check=check_mooncake,
    examine=examine_mooncake,
)
