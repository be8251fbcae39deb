"""Open the disk tier's file: lock the folder, format a new file, refuse a foreign one."""

from __future__ import annotations

import math
import os
import secrets
from pathlib import Path

import msgspec

from holdfast.buffers import align_up
from holdfast.errors import ConfigError, FormatError
from holdfast.limits import MIB
from holdfast.tiers.disk.extent_io import (
    Extents,
    FileExtents,
    check_free,
    lock_folder,
    preallocate,
)
from holdfast.tiers.disk.kind import FILE_NAME, nearest
from holdfast.tiers.disk.recovery import read_superblock
from holdfast.tiers.disk.region import (
    REGION_BYTES_MAX,
    REGION_BYTES_MIN,
    REGIONS_MAX,
    SECTOR,
    RegionGeometry,
    Superblock,
    pack_superblock,
    region_bytes_for,
)


class DiskConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one disk tier. Sizes in bytes, times in seconds.

    `capacity_bytes` bounds the whole file. `region_bytes` None means 64 MiB, or an eighth of a
    small capacity. `read_bytes_per_s` limits the reads of all threads together. `setting` is the
    tier's key path in the configuration, for error messages.
    """

    path: str
    capacity_bytes: int
    region_bytes: int | None = None
    reader_threads: int = 4
    writer_threads: int = 4
    read_bytes_per_s: float = math.inf
    snapshot_s: float = 30.0
    setting: str = "disk"
    name: str = "disk"


def open_file(config: DiskConfig) -> Extents:
    """Lock the folder and open its file; create and format the file if it does not exist.

    Raises ConfigError, BusyError or FormatError. Does not change an existing file.
    """
    _check(config)
    folder = Path(config.path)
    path = folder / FILE_NAME
    lock_fd = lock_folder(folder)
    try:
        if not path.exists():
            fresh = Superblock(secrets.token_bytes(16), 0, _fresh_geometry(config))
            first = pack_superblock(fresh)
            preallocate(path, fresh.geometry.file_bytes, config.setting, first + first)
        extents = FileExtents(path, lock_fd)
    except OSError as error:
        os.close(lock_fd)
        raise ConfigError(f'{config.setting}.path: "{path}": {error.strerror}') from error
    except BaseException:
        os.close(lock_fd)
        raise
    extents.drop_cache()
    return extents


def check_superblock(extents: Extents, config: DiskConfig) -> Superblock:
    """Return the file's superblock; raise FormatError or ConfigError if it does not match.

    A changed capacity is refused, because adapting the file would lose all of its blocks.
    """
    path = Path(config.path) / FILE_NAME
    try:
        superblock = read_superblock(extents)
    except FormatError as error:
        raise FormatError(
            f'"{path}" is not a region log of this build: {error}; '
            "it was left unchanged, move it away or choose another folder"
        ) from error
    geometry = superblock.geometry
    requested = RegionGeometry.within(
        config.capacity_bytes, config.region_bytes or geometry.region_bytes
    )
    if requested != geometry:
        raise _changed(path, config, geometry, requested)
    if extents.size < geometry.file_bytes:
        raise FormatError(
            f'"{path}" has {extents.size} bytes, its superblock says {geometry.file_bytes}; '
            "it was truncated: delete it, its blocks will be recomputed"
        )
    return superblock


def check_file(config: DiskConfig) -> None:
    """Raise the errors that opening the tier would raise, even while a node has it open.

    Takes no lock and changes nothing. A file that does not exist is no error.
    """
    _check(config)
    path = Path(config.path) / FILE_NAME
    if not path.exists():
        _fresh_geometry(config)
        return
    try:
        extents = FileExtents(path, os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY))
    except OSError as error:
        raise ConfigError(f'{config.setting}.path: "{path}": {error.strerror}') from error
    try:
        check_superblock(extents, config)
    finally:
        extents.close()


def check_space(config: DiskConfig) -> None:
    """Raise ConfigError if the folder has no file yet, and not enough space for one."""
    if not Path(config.path, FILE_NAME).exists():
        check_free(Path(nearest(config.path)), _fresh_geometry(config).file_bytes, config.setting)


def file_uuid(config: DiskConfig) -> bytes:
    """Return the identity of the folder's file; empty if there is none that can be read."""
    path = Path(config.path) / FILE_NAME
    try:
        extents = FileExtents(path, os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY))
    except OSError:
        return b""
    try:
        return read_superblock(extents).uuid
    except FormatError:
        return b""
    finally:
        extents.close()


def _changed(
    path: Path, config: DiskConfig, was: RegionGeometry, requested: RegionGeometry
) -> ConfigError:
    """Return an error that names the options to change, and their values in exact bytes."""
    remedies = {}
    if RegionGeometry.within(config.capacity_bytes, was.region_bytes) != was:
        remedies["capacity"] = was.file_bytes
    if requested.region_bytes != was.region_bytes:
        remedies["region"] = was.region_bytes
    remedy = " and ".join(f"{config.setting}.{name} to {value}" for name, value in remedies.items())
    return ConfigError(
        f'{config.setting}.{next(iter(remedies))}: "{path}" was created with {was.file_bytes} '
        f"bytes, {was.region_count} regions of {was.region_bytes}; {config.capacity_bytes} bytes "
        f"are {requested.region_count} regions of {requested.region_bytes}; set {remedy}, or "
        "delete the file and lose its blocks"
    )


def _check(config: DiskConfig) -> None:
    size = config.region_bytes
    if size is not None and (size % SECTOR or not REGION_BYTES_MIN <= size <= REGION_BYTES_MAX):
        raise ConfigError(
            f"{config.setting}.region is {size}; it must be a multiple of {SECTOR} from "
            f"{REGION_BYTES_MIN} to {REGION_BYTES_MAX}"
        )


def _fresh_geometry(config: DiskConfig) -> RegionGeometry:
    region_bytes = config.region_bytes or region_bytes_for(config.capacity_bytes)
    regions = config.capacity_bytes // region_bytes
    if regions > REGIONS_MAX:
        raise ConfigError(
            f"{config.setting}.region is {region_bytes} bytes: a capacity of "
            f"{config.capacity_bytes} bytes has {regions} regions, more than {REGIONS_MAX}; "
            f"raise it to {align_up(-(-config.capacity_bytes // REGIONS_MAX))} bytes or more"
        )
    geometry = RegionGeometry.within(config.capacity_bytes, region_bytes)
    if not geometry.region_count:
        raise ConfigError(
            f"{config.setting}.capacity is {config.capacity_bytes} bytes, less than one region of "
            f"{region_bytes / MIB:.2f} MiB; raise it to {8 * region_bytes} bytes or more"
        )
    return geometry
