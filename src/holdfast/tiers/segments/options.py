"""What the kinds of segment tiers share: options, checks, opening, and findings of a probe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from holdfast.errors import ConfigError, Outcome
from holdfast.finding import Finding, problem
from holdfast.limits import MIB
from holdfast.tiers.kind import RecordTierSection, TierContext
from holdfast.tiers.option_checks import DEADLINE_S_MAX, check_above_zero

if TYPE_CHECKING:
    from holdfast.tiers.segments.medium import MediumProbe, SegmentMedium
    from holdfast.tiers.segments.tier import SegmentTier

CAPACITY_MIN = 256 * MIB
WRITE_S_MAX = 600.0
POLL_S_MIN, POLL_S_MAX = 1.0, 3_600.0
POLL_S = 60.0
"""Default interval between two listings of one node, in seconds."""

GATHER_S_MAX = 600.0
EXAMINE_S = 20.0
"""Maximum duration of the probe when a tier is examined, in seconds."""


class SegmentTierSection(RecordTierSection, frozen=True, kw_only=True):
    """Options of every segment tier; times in seconds.

    `keep`: how long a segment is kept after its write. `deadline_s` bounds one read, `write_s` one
    write, `ask_s` a lookup before the first listing. `poll_s`: interval between listings of what
    other nodes have written. `gather_s`: how long a block waits at most for others to fill a
    segment with it.
    """

    keep: Literal["1d", "7d", "30d"] = "7d"
    deadline_s: float = 2.0
    write_s: float = 60.0
    ask_s: float = 0.25
    poll_s: float = POLL_S
    gather_s: float = 10.0


def check_times(options: SegmentTierSection, at: str, each_listing: str) -> None:
    """Raise ConfigError for times out of range; `each_listing` says why not to list more often."""
    check_above_zero(f"{at}.deadline_s", options.deadline_s, DEADLINE_S_MAX)
    check_above_zero(f"{at}.ask_s", options.ask_s, DEADLINE_S_MAX)
    check_above_zero(f"{at}.write_s", options.write_s, WRITE_S_MAX)
    check_above_zero(f"{at}.poll_s", options.poll_s, POLL_S_MAX)
    if not 0 <= options.gather_s <= GATHER_S_MAX:
        raise ConfigError(
            f"{at}.gather_s: {options.gather_s:g} s is not from 0 to {GATHER_S_MAX:g}; lower it, "
            "because blocks wait in memory"
        )
    if options.poll_s < POLL_S_MIN:
        raise ConfigError(
            f"{at}.poll_s: {options.poll_s:g} s is less than {POLL_S_MIN:g} s; raise it, because "
            f"{each_listing}"
        )


def keep_s(options: SegmentTierSection) -> float:
    """Return for how many seconds a segment is kept after its write."""
    from holdfast.tiers.segments.format import AGE_CLASSES

    return AGE_CLASSES[options.keep]


def open_segment_tier(
    medium: SegmentMedium,
    options: SegmentTierSection,
    capacity_bytes: int,
    requests: tuple[int, int],
    name: str,
) -> SegmentTier:
    """Open a tier on a medium, which need not answer yet. `requests`: most reads, most writes."""
    from holdfast.tiers.segments.tier import SegmentTier, SegmentTierLimits
    from holdfast.tiers.segments.writer import SegmentWriter

    reads, writes = requests
    limits = SegmentTierLimits(
        read_s=options.deadline_s,
        write_s=options.write_s,
        ask_s=options.ask_s,
        reads=reads,
        writes=writes,
        poll_s=options.poll_s,
        capacity_bytes=capacity_bytes,
        gather_s=options.gather_s,
    )
    return SegmentTier(medium, SegmentWriter(options.keep), limits, name)


def probe_findings(
    probe: MediumProbe, context: TierContext, where: str, remedy: str
) -> Iterator[Finding]:
    """Yield what a probe found; `remedy` says what to do if the medium did not answer."""
    if probe.outcome is not Outcome.OK:
        yield problem(context.at, where, f"{probe.why}; {remedy}")
    elif probe.refusal:
        yield problem(context.at, where, probe.refusal)
    elif probe.read_only:
        yield Finding(context.at, where, probe.read_only, ok=True, warning=True)
    else:
        yield Finding(context.at, where, "can be read and written", ok=True)
    for each in probe.findings:
        yield Finding(f"{context.at} {each.what}", each.found, each.why, each.ok, each.warning)
