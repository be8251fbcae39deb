"""What suits this machine where nothing is said, and what its environment says.

The only module that reads the environment.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from holdfast.config.check import DISK_BYTES_MIN, HOST_BYTES_MIN
from holdfast.config.options import Config, DiskOptions, HostOptions, Size, TierOptions
from holdfast.errors import ConfigError
from holdfast.failpoints import arm
from holdfast.limits import GIB
from holdfast.probe import memory
from holdfast.wire.address import UNIX

ENVIRONMENT_PREFIX = "HOLDFAST__"
HOST_BYTES_DEFAULT = 4 * GIB
DISK_BYTES_DEFAULT = 16 * GIB
PRIVATE_PARENT = "/var/tmp"  # noqa: S108  # a fresh 0700 folder is made below it


def said_in_environment(environment: Mapping[str, str] | None) -> list[tuple[str, list[str], str]]:
    """Return name, key path and value of each of our variables, in order of their names."""
    environment = os.environ if environment is None else environment
    return [
        (name, name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__"), environment[name])
        for name in sorted(environment)
        if name.startswith(ENVIRONMENT_PREFIX)
    ]


def embedded_config(folder: str) -> Config:
    """Return what a private node of an engine uses: memory, and a disk tier in `folder`.

    The disk tier takes at most a quarter of what is free; one that is there keeps its size.
    """
    tiers: list[TierOptions] = [HostOptions(capacity=_host_bytes())]
    blocks = Path(folder, "disk", "blocks.holdfast")
    there = next(path for path in (Path(folder), *Path(folder).parents) if path.exists())
    nbytes = min(DISK_BYTES_DEFAULT, shutil.disk_usage(there).free // 4)
    if blocks.exists():
        nbytes = blocks.stat().st_size
    if nbytes >= DISK_BYTES_MIN:
        tiers.append(DiskOptions(path=f"{folder}/disk", capacity=Size(nbytes)))
    return Config(listen=f"{UNIX}{folder}/node.sock", tiers=tiers)


def default_address(environment: Mapping[str, str] | None = None) -> str:
    """Return where this user's node listens if nobody says otherwise."""
    environment = os.environ if environment is None else environment
    runtime = environment.get("XDG_RUNTIME_DIR")
    folder = f"{runtime}/holdfast" if runtime else f"/tmp/holdfast-{os.getuid()}"  # noqa: S108
    return f"{UNIX}{folder}/node.sock"


def notify_address() -> str:
    """Return where systemd wants to be told that the node is ready; empty without systemd."""
    return os.environ.get("NOTIFY_SOCKET", "")


def arm_failpoint(environment: Mapping[str, str] | None = None) -> None:
    """Arm the point that HOLDFAST_FAILPOINT names, for tests of crashes. Raises ConfigError."""
    environment = os.environ if environment is None else environment
    try:
        arm(environment.get("HOLDFAST_FAILPOINT", ""))
    except ValueError as error:
        raise ConfigError(f"HOLDFAST_FAILPOINT: {error}") from error


def _host_bytes() -> Size:
    return Size(max(HOST_BYTES_MIN, min(HOST_BYTES_DEFAULT, memory().nbytes // 5)))


def cache_folder() -> str:
    """Return the folder of a node that was told none: kept, unlike an embedded one's."""
    return str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "holdfast"))
