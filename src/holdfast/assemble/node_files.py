"""The small files of a node, which lie beside the blocks of its first disk tier.

With another first disk a node would make another key ring and another default key, and find none of
its blocks. So it does not start while such a file lies only beside another disk tier's blocks.
"""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.assemble.domains import DEFAULT_DOMAIN, DEFAULT_KEY_FILE, sealed_domains
from holdfast.config import Config, DiskOptions
from holdfast.config.options import KEYRING_NAME
from holdfast.errors import ConfigError

ESTIMATES_FILE = "learnt.json"
DROPS_FILE = "drops.json"
MARKS_FILE = "durable.log"
"""Files in the folder of the first disk tier: estimates, drops, names of durable blocks."""


def check_first_disk(config: Config) -> None:
    """Raise ConfigError if the first disk lacks a file of the node that another disk has."""
    keys = [DEFAULT_KEY_FILE] if DEFAULT_DOMAIN not in config.domains else []
    if not config.keyring and sealed_domains(config):
        keys.append(KEYRING_NAME)
    files = [*keys, MARKS_FILE, DROPS_FILE]
    disks = [tier.path for tier in config.tiers if isinstance(tier, DiskOptions)]
    first = config.disk_folder
    has_any = any(_exists(first, name) for name in files)
    for other in disks:
        lacking = [
            name
            for name in (keys if has_any else files)
            if _exists(other, name) and not _exists(first, name)
        ]
        if lacking:
            moves = ", ".join(f'mv "{Path(other, name)}" "{Path(first, name)}"' for name in lacking)
            raise ConfigError(
                f'tiers: the first disk tier is at "{first}", which has no {lacking[0]}, and '
                f'"{Path(other, lacking[0])}" exists: with another one this node would not find '
                f"the blocks that it has; name the disks in their former order, or move: {moves}"
            )


def _exists(folder: str, name: str) -> bool:
    return os.path.lexists(Path(folder, name))
