"""Measure what sealing costs a pool behind a link of 10 Gbit/s, as between two hosts.

Over loopback at memory speed both ends of an unsealed transfer keep both cores of a small machine
busy, so whatever a core does besides is missing; a network card is slower than that. The figures
are those of `pool_rows`, taken in a network namespace whose loopback interface is paced (tc-tbf).
Needs root, unshare, ip and tc: no rows without.

Run as a module it is what runs inside, and prints its rows as JSON.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec

from holdfast.errors import HoldfastError
from holdfast.rig.measure import seal
from holdfast.rig.report import Row

GBIT_PER_S = 10
_PROGRAMS = ("unshare", "ip", "tc")
_PACED = f"""\
ip link set lo up
tc qdisc add dev lo root tbf rate {GBIT_PER_S}gbit burst 4mb latency 100ms
exec "$@"
"""
_LIMIT_S = 600.0


def link_rows(folder: Path, rounds: int) -> list[Row]:
    """Write to a target behind a paced link and fetch from it, sealed and not, in turns."""
    found = list(map(shutil.which, _PROGRAMS))
    if os.geteuid() != 0 or not all(found):
        return []
    ours = [sys.executable, "-m", "holdfast.rig.measure.seal_link", str(folder), str(rounds)]
    done = subprocess.run(
        [str(found[0]), "--net", "sh", "-ec", _PACED, "sh", *ours],
        capture_output=True,
        text=True,
        check=False,
        timeout=_LIMIT_S,
    )
    if done.returncode:
        raise HoldfastError(f"a paced link: {done.stderr.strip()[-500:] or done.returncode}")
    return msgspec.json.decode(done.stdout, type=list[Row])


def _main() -> None:
    folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
    rows = seal.pool_rows(folder, rounds, "seal.link")
    sys.stdout.buffer.write(msgspec.json.encode(rows))


if __name__ == "__main__":
    _main()
