"""The tier kind `disk`: a folder on a local drive."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.buffers import ALIGNMENT, aligned_buffer
from holdfast.byte_size import Size
from holdfast.errors import ConfigError, HoldfastError
from holdfast.finding import Finding, problem
from holdfast.limits import MIB
from holdfast.tiers.base import Tier
from holdfast.tiers.kind import Admit, RecordTierSection, TierContext, TierKind, keeps_forever
from holdfast.tiers.option_checks import check_at_least

if TYPE_CHECKING:
    from holdfast.tiers.disk.file import DiskConfig

FILE_NAME = "blocks.holdfast"
"""Name of the file with the blocks, in the tier's folder."""

DISK_BYTES_MIN = 16 * MIB
DISK_BYTES_MAX = 1 << 50
"""1 PiB; creating the region table of a larger tier takes too long."""
READ_LIMIT_MIN = MIB
WRITES_PER_DAY_MAX = 1_000.0


class DiskOptions(RecordTierSection, frozen=True, tag="disk", tag_field="kind"):
    """A disk tier: its own folder, its capacity in bytes, and the size of its regions.

    `admit`: the rule for writing blocks to it. `writes_per_day`: maximum bytes written a day, as a
    multiple of the capacity. `thrash_guard`: pause writing if blocks are evicted unused.
    `read_limit`: maximum bytes read a second; unlimited if left out.
    """

    path: str
    capacity: Size
    region: Size | None = None
    admit: Admit = "always"
    thrash_guard: bool = False
    writes_per_day: float | None = None
    read_limit: Size | None = None


def check_disk(options: DiskOptions, at: str) -> None:
    """Raise ConfigError for a value out of range."""
    check_at_least(options.capacity, DISK_BYTES_MIN, f"{at}.capacity")
    if options.capacity > DISK_BYTES_MAX:
        raise ConfigError(
            f"{at}.capacity: {options.capacity} is more than {Size(DISK_BYTES_MAX)}; lower it to "
            "the drive's size"
        )
    if not options.path:
        raise ConfigError(f"{at}.path: is empty; name a folder for the blocks")
    if options.read_limit is not None:
        check_at_least(options.read_limit, READ_LIMIT_MIN, f"{at}.read_limit")
    writes = options.writes_per_day
    if writes is not None and not 0 < writes <= WRITES_PER_DAY_MAX:
        raise ConfigError(
            f"{at}.writes_per_day: {writes:g} times the capacity a day is not above 0 and at most "
            f"{WRITES_PER_DAY_MAX:g}; use the drive's rating, or leave it out for no limit"
        )


def open_disk(options: DiskOptions, context: TierContext) -> Tier:
    """Open the tier's file, and create it if there is none.

    Raises ConfigError, FormatError or BusyError, and leaves an existing file unchanged then.
    """
    from holdfast.tiers.disk.replaceable import ReplaceableDisk

    return ReplaceableDisk(_config(options, context))


def examine_disk(options: DiskOptions, context: TierContext) -> Iterator[Finding]:
    """Check the folder, its free space and its blocks' file; changes nothing."""
    at, there = context.at, nearest(options.path)
    stat = os.statvfs(there)
    free, file = stat.f_bavail * stat.f_frsize, Path(options.path, FILE_NAME)
    held = file.stat().st_size if file.exists() else 0
    found = f"disk, {options.capacity} in {options.path}"
    if not Path(there).is_dir():
        yield problem(at, found, f"{there} is a file, not a folder; name a folder in {at}.path")
        return
    if not os.access(there, os.W_OK):
        yield problem(at, found, f"{there} is not writable for user {os.geteuid()}; chown it")
    elif wrong := _refusal(options, context):
        yield problem(at, found, wrong)
    elif held:
        yield Finding(at, found, f"{Size(held)} allocated, {Size(free)} more free", ok=True)
    elif options.capacity > free:
        yield problem(at, found, f"{Size(free)} free; lower {at}.capacity")
    else:
        yield Finding(at, found, f"created at the first start; {Size(free)} free", ok=True)
    yield direct_io(f"{at} direct I/O", there)


def _refusal(options: DiskOptions, context: TierContext) -> str:
    """Return why a node would refuse the file; empty if it would not. A node may have it open."""
    from holdfast.tiers.disk.file import check_file

    try:
        check_file(_config(options, context))
    except HoldfastError as error:
        return str(error)
    return ""


def _config(options: DiskOptions, context: TierContext) -> DiskConfig:
    from holdfast.tiers.disk.file import DiskConfig

    return DiskConfig(
        path=options.path,
        capacity_bytes=int(options.capacity),
        region_bytes=None if options.region is None else int(options.region),
        read_bytes_per_s=options.read_limit or math.inf,
        setting=context.at,
        name=context.name,
    )


def nearest(path: str) -> str:
    """Return the path, or its nearest existing parent folder."""
    return str(next(p for p in (Path(path), *Path(path).parents) if p.exists()))


def direct_io(what: str, folder: str) -> Finding:
    """Try one direct read of a temporary file in `folder`."""
    try:
        with tempfile.NamedTemporaryFile(prefix=".holdfast-", dir=folder) as file:
            file.truncate(ALIGNMENT)
            fd = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
            try:
                os.preadv(fd, [aligned_buffer(ALIGNMENT)], 0)
            finally:
                os.close(fd)
    except OSError as error:
        return Finding(
            what,
            f"refused: {error.strerror}",
            "the page cache is used: slower if memory is short; choose another file system",
        )
    return Finding(what, "works", f"tried in {folder}", ok=True)


KIND = TierKind(
    options=DiskOptions,
    open=open_disk,
    check=check_disk,
    examine=examine_disk,
    paths=("path",),
    keep_s=keeps_forever,
)
