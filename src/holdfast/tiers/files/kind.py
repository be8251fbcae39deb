"""The tier kind `files`: a folder on a file system that several hosts mount."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from holdfast.byte_size import Size
from holdfast.errors import ConfigError
from holdfast.finding import Finding
from holdfast.tiers.kind import TierContext, TierKind
from holdfast.tiers.option_checks import check_at_least
from holdfast.tiers.segments.options import (
    CAPACITY_MIN,
    EXAMINE_S,
    SegmentTierSection,
    check_times,
    keep_s,
    open_segment_tier,
    probe_findings,
)

if TYPE_CHECKING:
    from holdfast.tiers.segments.tier import SegmentTier


class FilesOptions(SegmentTierSection, frozen=True, tag="files", tag_field="kind"):
    """A folder on a shared file system.

    `path`: the folder, which is made if its parent exists. `capacity` bounds the bytes in it, of
    all nodes. `filesystem`: type that the file system must have, such as `nfs4`, so that the tier
    does not use a mount point without it.
    """

    path: str
    capacity: Size
    filesystem: str = ""


def check_files(options: FilesOptions, at: str) -> None:
    """Raise ConfigError for values out of range."""
    if not options.path.startswith("/"):
        raise ConfigError(f"{at}.path: {options.path!r} is no absolute path; write one")
    check_at_least(options.capacity, CAPACITY_MIN, f"{at}.capacity")
    check_times(options, at, "every node lists that often")


def open_files(options: FilesOptions, context: TierContext) -> SegmentTier:
    """Open the tier; the file system does not need to be mounted."""
    from holdfast.tiers.files.medium import LANES, PUT_LANES, FilesMedium

    medium = FilesMedium(options.path, options.filesystem)
    requests = LANES, PUT_LANES
    return open_segment_tier(medium, options, options.capacity, requests, context.name)


def examine_files(options: FilesOptions, context: TierContext) -> Iterator[Finding]:
    """Yield how the folder is mounted, and what its file system does."""
    from holdfast.tiers.files.medium import FilesMedium
    from holdfast.wire.remote.stream import Deadline

    where = f"files in {options.path}"
    medium = FilesMedium(options.path, options.filesystem)
    try:
        probe = medium.examine(Deadline.within(EXAMINE_S))
    finally:
        medium.close()
    remedy = "mount it, or correct path or filesystem"
    yield from probe_findings(probe, context, where, remedy)


KIND = TierKind(
    options=FilesOptions,
    open=open_files,
    shared=True,
    check=check_files,
    examine=examine_files,
    paths=("path",),
    keep_s=keep_s,
)
