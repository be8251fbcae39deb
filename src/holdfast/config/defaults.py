"""Default options for this machine, and options from the environment.

Only this module reads the environment.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.address import UNIX
from holdfast.config.check import HOST_BYTES_MIN
from holdfast.errors import ConfigError
from holdfast.failpoints import arm
from holdfast.limits import GIB
from holdfast.probe import memory
from holdfast.tiers.disk.kind import DISK_BYTES_MIN, FILE_NAME, nearest

ENVIRONMENT_PREFIX = "HOLDFAST__"
HOST_BYTES_DEFAULT = 4 * GIB
DISK_BYTES_DEFAULT = 16 * GIB
PRIVATE_PARENT = "/var/tmp"  # noqa: S108  # a fresh 0700 folder is made below it


def environment_options(environment: Mapping[str, str] | None) -> list[tuple[str, list[str], str]]:
    """Return name, key path and value of each HOLDFAST__ variable, ordered by name."""
    environment = os.environ if environment is None else environment
    return [
        (name, name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__"), environment[name])
        for name in sorted(environment)
        if name.startswith(ENVIRONMENT_PREFIX)
    ]


def default_tiers(folder: str) -> list[dict[str, Any]]:
    """Return sections of a configuration: a host tier, and a disk tier in `folder`.

    The disk tier takes at most a quarter of the free space; an existing one keeps its size.
    """
    host_bytes = max(HOST_BYTES_MIN, min(HOST_BYTES_DEFAULT, memory().nbytes // 5))
    tiers: list[dict[str, Any]] = [{"kind": "host", "capacity": host_bytes}]
    blocks = Path(folder, "disk", FILE_NAME)
    nbytes = min(DISK_BYTES_DEFAULT, shutil.disk_usage(nearest(folder)).free // 4)
    if blocks.exists():
        nbytes = blocks.stat().st_size
    if nbytes >= DISK_BYTES_MIN:
        tiers.append({"kind": "disk", "path": f"{folder}/disk", "capacity": nbytes})
    return tiers


def default_address(environment: Mapping[str, str] | None = None) -> str:
    """Return the default address of this user's node."""
    environment = os.environ if environment is None else environment
    runtime = environment.get("XDG_RUNTIME_DIR")
    folder = f"{runtime}/holdfast" if runtime else f"/tmp/holdfast-{os.getuid()}"  # noqa: S108
    return f"{UNIX}{folder}/node.sock"


def machine_address() -> str:
    """Return the address of the node that the shipped systemd unit starts."""
    return f"{UNIX}/run/holdfast/node.sock"


def notify_address() -> str:
    """Return the address of systemd's readiness socket; empty without systemd."""
    return os.environ.get("NOTIFY_SOCKET", "")


def arm_failpoint() -> None:
    """Arm the failpoint named by HOLDFAST_FAILPOINT, for crash tests. Raises ConfigError."""
    try:
        arm(os.environ.get("HOLDFAST_FAILPOINT", ""))
    except ValueError as error:
        raise ConfigError(f"HOLDFAST_FAILPOINT: {error}") from error


def cache_folder() -> str:
    """Return the default folder of a node, which is kept, unlike that of an embedded node."""
    return str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "holdfast"))
