"""Crash campaign: kill -9 at every failpoint and at random times; no wrong byte is ever read.

Most cycles fork a process with a store, which is cheap; one in eight kills a node with an engine
writing to it (`crash_node.py`). Each process first reads the blocks that earlier ones saved. The
payload follows from the key, so no record of saved bytes is needed.
"""

from __future__ import annotations

import itertools
import os
import random
import select
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from holdfast import failpoints
from holdfast.limits import MIB
from holdfast.store.store import Store
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.tier import DiskTier
from holdfast_bench.campaigns import crash_node
from holdfast_bench.campaigns.campaign import FORCED_SWITCH_S, CampaignBudget, CampaignResult
from holdfast_bench.campaigns.contexts import Contexts, chain_of
from holdfast_bench.harness.lifetime import die_with

CHAIN_BLOCKS = 8
CHAINS_KEPT = 24
CHAINS_A_LIFE = 12
PAYLOAD_BYTES = 20_000
SNAPSHOT_S = 0.02
HOST_BYTES = 16 * MIB
DISK_BYTES = 16 * MIB
"""Small enough that the disk is full after some cycles and reclaims regions."""

SECRET = b"s" * 32
NODE_SHARE = 8
POINTS_PROVEN_AT = 20
"""After this many cycles for each failpoint, every failpoint must have killed a process."""

_STUCK_S = 60.0
_MOMENT_S = 0.06


class CrashPlan(NamedTuple):
    """How one process is killed: at a failpoint, or after `after_s` seconds (`point` empty).

    `text` arms the failpoint.
    """

    point: str = ""
    text: str = ""
    after_s: float = 0.0

    @classmethod
    def drawn(cls, rng: random.Random, cycle: int) -> CrashPlan:
        """Draw a plan: each failpoint in turn; every third process is killed at a random time."""
        if cycle % 3 == 2:  # noqa: PLR2004 - one in three
            return cls(after_s=rng.uniform(0, _MOMENT_S))
        point = failpoints.POINTS[(cycle - cycle // 3) % len(failpoints.POINTS)]
        return cls(point, f"{point}:{rng.choice((1, 1, 2, 3, 5))}")


class History:
    """The chains whose save has begun; each process reads the last of them."""

    def __init__(self) -> None:
        self.kept: list[list[bytes]] = []
        self.read = 0

    def fresh(self, cycle: int) -> Iterator[list[bytes]]:
        """Yield new chains to save; each is recorded in `kept` before it is yielded."""
        for number in range(CHAINS_A_LIFE):
            chain = chain_of(f"store/{cycle}/{number}", CHAIN_BLOCKS)
            self.kept = [*self.kept[1 - CHAINS_KEPT :], chain]
            yield chain


def run(budget: CampaignBudget) -> Iterator[CampaignResult]:
    """Kill processes with a store, then nodes."""
    half_s = budget.share(2).seconds
    stores, nodes = budget.share(NODE_SHARE / (NODE_SHARE - 1)), budget.share(NODE_SHARE)
    yield kill_stores(stores._replace(seconds=half_s))
    yield crash_node.kill_nodes(nodes._replace(seconds=half_s))


def kill_stores(budget: CampaignBudget) -> CampaignResult:
    """Fork a process that reads and writes, kill it, and repeat."""
    result, history = CampaignResult("crash.store", "kills"), History()
    folder = budget.folder / "crash-store"
    for cycle, rng in enumerate(budget.rounds(result)):
        plan = CrashPlan.drawn(rng, cycle)
        read_end, write_end = os.pipe()
        owner = os.getpid()
        # The child uses nothing that another thread (a progress bar's, say) may hold a lock of, so
        # Python's warning about forks with threads does not apply.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            process = os.fork()
        if not process:
            die_with(owner)
            _live(folder, history, cycle, plan, write_end)
        os.close(write_end)
        with os.fdopen(read_end, "rb") as report:
            begun = _end(result, history, process, report, plan)
        for _ in itertools.islice(history.fresh(cycle), begun):
            pass
    result.counts["blocks read and right"] = history.read
    if result.tried > POINTS_PROVEN_AT * len(failpoints.POINTS):
        read_most = history.read > result.tried * CHAIN_BLOCKS
        budget.expect_enough(result, read_most, "too few blocks were read for a verdict")
        for point in failpoints.POINTS:
            killed = result.counts[f"at {point}"]
            budget.expect_enough(result, killed, f"failpoint {point} never killed")
    return result


def open_store(folder: Path, disk_bytes: int = DISK_BYTES) -> Store:
    """Open a store over a small disk tier that saves a snapshot every `SNAPSHOT_S` seconds."""
    config = DiskConfig(
        path=str(folder), capacity_bytes=disk_bytes, region_bytes=MIB, snapshot_s=SNAPSHOT_S
    )
    store = Store(HOST_BYTES, [DiskTier(config)], {"default": SECRET})
    store.start()
    return store


def _live(folder: Path, history: History, cycle: int, plan: CrashPlan, report: int) -> None:
    """Run the forked process: open, read, save, close, and exit. Writes lines to `report`."""
    sys.setswitchinterval(FORCED_SWITCH_S)
    os.setpgid(0, 0)  # Ctrl-C must not reach this process
    try:
        failpoints.arm(plan.text if cycle % 2 or plan.point == "disk_open" else "")
        with open_store(folder) as store:
            contexts = Contexts(store, PAYLOAD_BYTES)
            contexts.await_recovery()
            failpoints.arm("" if plan.point == "promotion_read" else plan.text)
            read = sum(contexts.read(chain) for chain in history.kept[-CHAINS_KEPT // 2 :])
            failpoints.arm(plan.text)
            read += sum(contexts.read(chain) for chain in history.kept[: CHAINS_KEPT // 2])
            os.write(report, b"read %d\n" % read)
            for chain in history.fresh(cycle):
                os.write(report, b"save\n")
                contexts.save(chain)
        os.write(report, b"closed\n")
    except BaseException as error:  # noqa: BLE001  # the parent must see any error
        os.write(report, f"wrong {error!r}\n".encode())
    finally:
        os._exit(0)


def _end(
    result: CampaignResult, history: History, process: int, report: BinaryIO, plan: CrashPlan
) -> int:
    """Wait for the planned end and count it; return how many saves the process began."""
    if not plan.point:
        time.sleep(plan.after_s)
        os.kill(process, signal.SIGKILL)
    elif not _closes_in_time(report.fileno()):
        result.fail(f"kill {result.tried}, {plan.text}: no end within {_STUCK_S:g} s")
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    ending = os.waitstatus_to_exitcode(status)
    killed = ending == -signal.SIGKILL
    result.expect(killed or not ending, f"kill {result.tried}, {plan.text}: ended with {ending}")
    result.tried += killed
    result.counts[f"at {plan.point or 'any moment'}" if killed else "lived on"] += 1
    lines = report.read().decode().splitlines()
    for line in lines:
        if line.startswith("wrong"):
            result.fail(f"kill {result.tried}, {plan.text}: {line}")
        elif line.startswith("read "):
            history.read += int(line.split()[1])
    return lines.count("save")


def _closes_in_time(read_end: int) -> bool:
    """Wait until the write end of a pipe closes; return False after `_STUCK_S`. Reads nothing."""
    poll = select.poll()
    poll.register(read_end, 0)  # hang-up only
    return bool(poll.poll(1000 * _STUCK_S))
