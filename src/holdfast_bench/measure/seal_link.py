"""Measure the cost of sealing for a pool behind a link of 10 Gbit/s, as between two hosts.

Over unlimited loopback both ends of an unsealed transfer keep both cores of a small machine busy,
so that any other work reduces the throughput; a network card is slower than that. The figures are
those of `pool_rows`, measured in a network namespace whose loopback interface is limited with
tc-tbf. Without root, unshare, ip and tc there are no rows.

Executed as a module, this file runs inside the namespace and prints its rows as JSON.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from holdfast.errors import HoldfastError
from holdfast.report import Row
from holdfast_bench.harness.lifetime import owned
from holdfast_bench.measure import seal

GBIT_PER_S = 10
_PROGRAMS = ("unshare", "ip", "tc")
_PACED = f"""\
ip link set lo up
tc qdisc add dev lo root tbf rate {GBIT_PER_S}gbit burst 4mb latency 100ms
exec "$@"
"""
_LIMIT_S = 600.0


def link_rows(folder: Path, rounds: int) -> list[Row]:
    """Measure write-behind to a target over the limited link, and fetches from it."""
    if os.geteuid() != 0 or not all(map(shutil.which, _PROGRAMS)):
        return []
    ours = [sys.executable, "-m", "holdfast_bench.measure.seal_link", str(folder), str(rounds)]
    done = subprocess.run(
        owned(behind_link(ours)), capture_output=True, text=True, check=False, timeout=_LIMIT_S
    )
    if done.returncode:
        raise HoldfastError(f"a paced link: {done.stderr.strip()[-500:] or done.returncode}")
    return msgspec.json.decode(done.stdout, type=list[Row])


def behind_link(argv: Sequence[str]) -> list[str]:
    """Return the command that runs `argv` in a network namespace with a limited loopback link."""
    return ["unshare", "--net", "sh", "-ec", _PACED, "sh", *argv]


if __name__ == "__main__":
    found = seal.pool_rows(Path(sys.argv[1]), int(sys.argv[2]), "seal.link")
    sys.stdout.buffer.write(msgspec.json.encode(found))
