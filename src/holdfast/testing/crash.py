"""kill -9 at every failpoint and at any moment, again and again: nothing wrong is ever read.

Most cycles fork a process with a store in it, which is cheap; one in eight kills a whole node with
an engine writing to it (`holdfast.testing.crash_node`). Every life first reads what those before it
left. Payloads follow from keys, so nothing has to be remembered to check them.
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
from holdfast.testing import crash_node
from holdfast.testing.campaign import FORCED_SWITCH_S, Order, Tally
from holdfast.testing.contexts import Contexts, chain_of
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.tier import DiskTier

CHAIN_BLOCKS = 8
CHAINS_KEPT = 24
CHAINS_A_LIFE = 12
PAYLOAD_BYTES = 20_000
SNAPSHOT_S = 0.02
HOST_BYTES = 16 * MIB
DISK_BYTES = 16 * MIB
"""Full after some cycles, so that regions are reclaimed too."""

SECRET = b"s" * 32
NODE_SHARE = 8
POINTS_PROVEN_AT = 20
"""With so many cycles a point, every point must have killed."""

_STUCK_S = 60.0
_MOMENT_S = 0.06


class Plan(NamedTuple):
    """How one life ends: at a failpoint, or after a moment (`point` empty)."""

    point: str
    passes: int
    after_s: float

    @property
    def text(self) -> str:
        """What arms it."""
        return f"{self.point}:{self.passes}" if self.point else ""

    @classmethod
    def drawn(cls, dice: random.Random, cycle: int) -> Plan:
        """Draw one; every point comes up in turn, and every third life ends at a moment."""
        if cycle % 3 == 2:  # noqa: PLR2004 - one in three
            return cls("", 0, dice.uniform(0, _MOMENT_S))
        point = failpoints.POINTS[(cycle - cycle // 3) % len(failpoints.POINTS)]
        return cls(point, dice.choice((1, 1, 2, 3, 5)), 0.0)


class History:
    """The names of chains that were begun; every life reads the last of them."""

    def __init__(self, what: str) -> None:
        self._what = what
        self.kept: list[list[bytes]] = []
        self.read = 0

    def fresh(self, cycle: int) -> Iterator[list[bytes]]:
        """Yield chains to save, each noted before its first byte is written."""
        for number in range(CHAINS_A_LIFE):
            chain = chain_of(f"{self._what}/{cycle}/{number}", CHAIN_BLOCKS)
            self.kept = [*self.kept[1 - CHAINS_KEPT :], chain]
            yield chain


def run(order: Order) -> Iterator[Tally]:
    """Kill stores, then nodes."""
    half_s = order.share(2).seconds
    stores, nodes = order.share(NODE_SHARE / (NODE_SHARE - 1)), order.share(NODE_SHARE)
    yield kill_stores(stores._replace(seconds=half_s))
    yield crash_node.kill_nodes(nodes._replace(seconds=half_s))


def kill_stores(order: Order) -> Tally:
    """Fork, live, die, again."""
    tally, history = Tally("crash.store", "kills"), History("store")
    folder = order.folder / "crash-store"
    for cycle, dice in enumerate(order.rounds(tally)):
        plan = Plan.drawn(dice, cycle)
        listens, says = os.pipe()
        process = _fork()
        if not process:
            _live(folder, history, cycle, plan, says)
        os.close(says)
        with os.fdopen(listens, "rb") as heard:
            begun = _end(tally, history, process, heard, plan)
        for _ in itertools.islice(history.fresh(cycle), begun):
            pass
    tally.counts["blocks read and right"] = history.read
    if tally.tried > POINTS_PROVEN_AT * len(failpoints.POINTS):
        read_most = history.read > tally.tried * CHAIN_BLOCKS
        order.expect_enough(tally, read_most, "too little was read to tell")
        for point in failpoints.POINTS:
            killed = tally.counts[f"at {point}"]
            order.expect_enough(tally, killed, f"failpoint {point} never killed")
    return tally


def open_store(folder: Path) -> Store:
    """Open a store over a small disk tier that saves a snapshot all the time."""
    config = DiskConfig(
        path=str(folder), capacity_bytes=DISK_BYTES, region_bytes=MIB, snapshot_s=SNAPSHOT_S
    )
    store = Store(HOST_BYTES, [DiskTier(config)], {"default": SECRET})
    store.start()
    return store


def _fork() -> int:
    """Fork as the system does; the child has no use for what another thread may have held.

    Such a thread draws a progress bar, say. Python warns of any since 3.12.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _live(folder: Path, history: History, cycle: int, plan: Plan, says: int) -> None:
    """Live a forked process's whole life: open, read what there is, save, close; never returns."""
    sys.setswitchinterval(FORCED_SWITCH_S)
    os.setpgid(0, 0)  # an interrupt at the terminal is for who counts, not for this life
    try:
        failpoints.arm(plan.text if cycle % 2 or plan.point == "disk_open" else "")
        with open_store(folder) as store:
            contexts = Contexts(store, PAYLOAD_BYTES)
            contexts.await_recovery()
            failpoints.arm("" if plan.point == "climb_read" else plan.text)
            read = sum(contexts.read(chain) for chain in history.kept[-CHAINS_KEPT // 2 :])
            failpoints.arm(plan.text)
            read += sum(contexts.read(chain) for chain in history.kept[: CHAINS_KEPT // 2])
            os.write(says, b"read %d\n" % read)
            for chain in history.fresh(cycle):
                os.write(says, b"save\n")
                contexts.save(chain)
        os.write(says, b"closed\n")
    except BaseException as error:  # noqa: BLE001  # whatever it is, the parent must hear it
        os.write(says, f"wrong {error!r}\n".encode())
    finally:
        os._exit(0)


def _end(tally: Tally, history: History, process: int, heard: BinaryIO, plan: Plan) -> int:
    """Wait for the end that was planned; return how many chains were begun."""
    if not plan.point:
        time.sleep(plan.after_s)
        os.kill(process, signal.SIGKILL)
    elif not _hears_the_end(heard.fileno()):
        tally.fail(f"kill {tally.tried}, {plan.text}: no end within {_STUCK_S:g} s")
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    ending = os.waitstatus_to_exitcode(status)
    killed = ending == -signal.SIGKILL
    tally.expect(killed or not ending, f"kill {tally.tried}, {plan.text}: ended with {ending}")
    tally.tried += killed
    tally.counts[f"at {plan.point or 'any moment'}" if killed else "lived on"] += 1
    lines = heard.read().decode().splitlines()
    for line in lines:
        if line.startswith("wrong"):
            tally.fail(f"kill {tally.tried}, {plan.text}: {line}")
        elif line.startswith("read "):
            history.read += int(line.split()[1])
    return lines.count("save")


def _hears_the_end(listens: int) -> bool:
    """Whether the other end of a pipe closes in time; what it says stays to be read."""
    poll = select.poll()
    poll.register(listens, 0)  # nothing but the hang-up
    return bool(poll.poll(1000 * _STUCK_S))
