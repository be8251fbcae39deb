"""The tier kind `files`: a folder on a file system that several hosts mount."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from holdfast.byte_size import Size
from holdfast.errors import ConfigError, Outcome
from holdfast.finding import Finding, problem
from holdfast.limits import MIB
from holdfast.tiers.kind import RecordTierSection, TierContext, TierKind
from holdfast.tiers.option_checks import DEADLINE_S_MAX, check_above_zero, check_at_least

if TYPE_CHECKING:
    from holdfast.tiers.segments.tier import SegmentTier

CAPACITY_MIN = 256 * MIB
WRITE_S_MAX = 600.0
POLL_S_MIN, POLL_S_MAX = 1.0, 3_600.0
EXAMINE_S = 20.0
"""Maximum duration of the probe when a tier is examined, in seconds."""


class FilesOptions(RecordTierSection, frozen=True, tag="files", tag_field="kind"):
    """A folder on a shared file system; times in seconds.

    `path`: the folder, which is made if its parent exists. `capacity` bounds the bytes in it, of
    all nodes. `filesystem`: type that the file system must have, such as `nfs4`, so that the tier
    does not use a mount point without it. `keep`: how long a segment is kept after its write.
    `deadline_s` bounds one read, `write_s` one write, `ask_s` a lookup before the first listing.
    `poll_s`: interval between listings of what other nodes have written.
    """

    path: str
    capacity: Size
    filesystem: str = ""
    keep: Literal["1d", "7d", "30d"] = "7d"
    deadline_s: float = 2.0
    write_s: float = 20.0
    ask_s: float = 0.25
    poll_s: float = 60.0


def check_files(options: FilesOptions, at: str) -> None:
    """Raise ConfigError for values out of range."""
    if not options.path.startswith("/"):
        raise ConfigError(f"{at}.path: {options.path!r} is no absolute path; write one")
    check_at_least(options.capacity, CAPACITY_MIN, f"{at}.capacity")
    check_above_zero(f"{at}.deadline_s", options.deadline_s, DEADLINE_S_MAX)
    check_above_zero(f"{at}.ask_s", options.ask_s, DEADLINE_S_MAX)
    check_above_zero(f"{at}.write_s", options.write_s, WRITE_S_MAX)
    check_above_zero(f"{at}.poll_s", options.poll_s, POLL_S_MAX)
    if options.poll_s < POLL_S_MIN:
        raise ConfigError(
            f"{at}.poll_s: {options.poll_s:g} s is less than {POLL_S_MIN:g} s; raise it, because "
            "every node lists that often"
        )


def open_files(options: FilesOptions, context: TierContext) -> SegmentTier:
    """Open the tier; the file system does not need to be mounted."""
    from holdfast.tiers.files.medium import LANES, PUT_LANES, FilesMedium
    from holdfast.tiers.segments.tier import SegmentTier, SegmentTierLimits
    from holdfast.tiers.segments.writer import SegmentWriter

    limits = SegmentTierLimits(
        read_s=options.deadline_s,
        write_s=options.write_s,
        ask_s=options.ask_s,
        reads=LANES,
        writes=PUT_LANES,
        poll_s=options.poll_s,
        capacity_bytes=options.capacity,
    )
    medium = FilesMedium(options.path, options.filesystem)
    return SegmentTier(medium, SegmentWriter(options.keep), limits, context.name)


def examine_files(options: FilesOptions, context: TierContext) -> Iterator[Finding]:
    """Probe the folder: how it is mounted, and what its file system does."""
    from holdfast.tiers.files.medium import FilesMedium
    from holdfast.wire.remote.stream import Deadline

    where = f"files in {options.path}"
    medium = FilesMedium(options.path, options.filesystem)
    try:
        probe = medium.probe(Deadline.within(EXAMINE_S))
    finally:
        medium.close()
    if probe.outcome is not Outcome.OK:
        why = f"{probe.why}; mount it, or correct path or filesystem"
        yield problem(context.at, where, why)
    elif probe.refusal:
        yield problem(context.at, where, probe.refusal)
    elif probe.read_only:
        yield Finding(context.at, where, probe.read_only, ok=True, warning=True)
    else:
        yield Finding(context.at, where, "can be read and written", ok=True)
    for each in probe.findings:
        at = f"{context.at} {each.what}"
        yield Finding(at, each.found, each.why, each.ok, each.warning)


KIND = TierKind(
    options=FilesOptions,
    open=open_files,
    shared=True,
    check=check_files,
    examine=examine_files,
    paths=("path",),
)
