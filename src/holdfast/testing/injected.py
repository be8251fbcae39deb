"""EIO, ENOSPC and short transfers: in a tier, on a medium, and in the system calls themselves.

A failure is an outcome. So nothing is raised, whatever is served is right, and where the medium is
well again everything can be saved and read. For system calls an unmodified process runs under
strace, which makes one call of one kind fail; then another process reads what it left.
"""

from __future__ import annotations

import contextlib
import errno
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.clock import ManualClock
from holdfast.errors import HoldfastError
from holdfast.limits import MIB
from holdfast.store.store import Store
from holdfast.testing.campaign import Order, Tally
from holdfast.testing.contexts import Contexts, chain_of
from holdfast.testing.extents import MemoryExtents
from holdfast.testing.faulty import EVERY_FAULT, Fault, FaultyTier
from holdfast.testing.memory import MemoryTier
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.region import SECTOR
from holdfast.tiers.disk.tier import DiskTier

PAYLOAD_BYTES = 9_000
CHAIN_BLOCKS = 6
CHAINS = 12
HOST_BYTES = MIB
REGION_BYTES = 32 * SECTOR
REGIONS = 24
FAULT_CHANCE = 0.05
MEDIUM_CHANCE = 0.2
LIFE_ROUNDS = 40
SYSTEM_CALLS_SHARE = 400
"""One system call for so many faults in tiers: each is a process's whole life."""

SECRET = {"default": b"s" * 32}
CALLS = {
    "pwritev,pwritev2": ("error=EIO", "error=ENOSPC", "retval=4096"),
    "preadv,preadv2": ("error=EIO", "retval=4096", "retval=0"),
    "fdatasync": ("error=EIO", "error=ENOSPC"),
    "fallocate": ("error=ENOSPC", "error=EIO"),
}
"""What is made to fail, and how."""

WHEN_MAX = 120
_LIFE_S = 120.0
_REJECTED = 2


def run(order: Order) -> Iterator[Tally]:
    """Fail in a tier, on a medium, in system calls."""
    half = order.share(2.1)
    yield _in_a_tier(half)
    yield _on_a_medium(half)
    calls = order.share(SYSTEM_CALLS_SHARE)
    yield _in_system_calls(calls._replace(seconds=order.share(10).seconds))


def _in_a_tier(order: Order) -> Tally:
    """Save and read through a tier that does everything that media are known for."""
    tally = Tally("injected.tier", "faults")
    chance = dict.fromkeys(EVERY_FAULT, FAULT_CHANCE) | {Fault.DELAY_READ: 0, Fault.DELAY_WRITE: 0}
    for number, dice in enumerate(order.rounds(tally)):
        faulty = FaultyTier(MemoryTier(HOST_BYTES), dice.randrange(1 << 30), chance)
        with contextlib.closing(Store(HOST_BYTES, [faulty], SECRET)) as store:
            store.start()
            _live(tally, store, dice, f"round {number}")
        tally.tried += faulty.injected.total()
        tally.counts.update({str(fault): count for fault, count in faulty.injected.items()})
    return tally


class FailingMedium(MemoryExtents):
    """A medium whose reads and writes fail now and then; a write that fails may have begun."""

    def __init__(self, image: bytes | bytearray, dice: random.Random) -> None:
        super().__init__(image)
        self.chance = 0.0
        self.injected = 0
        self._dice = dice

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        """Read, or fail: with EIO, or short."""
        if self._dice.random() < self.chance:
            self.injected += 1
            super().read(offset, [view[: len(view) // 2] for view in views])
            raise OSError(errno.EIO, "injected")
        super().read(offset, views)

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        """Write, or fail: with EIO or ENOSPC, at once or half-way."""
        if self._dice.random() < self.chance:
            self.injected += 1
            whole = b"".join(views)
            part = whole[: self._dice.randrange(len(whole) + 1) // SECTOR * SECTOR]
            if part:
                super().write(offset, [memoryview(part)])
            raise OSError(self._dice.choice((errno.EIO, errno.ENOSPC)), "injected")
        super().write(offset, views)
        self.log.clear()


def _on_a_medium(order: Order) -> Tally:
    """Save, read and start again on a disk whose medium fails; then on one that is well."""
    tally = Tally("injected.medium", "faults")
    for number, dice in enumerate(order.rounds(tally)):
        fresh = MemoryExtents.formatted(REGION_BYTES, REGIONS)
        medium = FailingMedium(fresh.image, dice)
        for life in range(3):
            with _disk_store(medium) as store:
                medium.chance = MEDIUM_CHANCE
                _live(tally, store, dice, f"round {number}, life {life}")
                medium.chance = 0.0
        tally.tried += medium.injected
        with _disk_store(medium) as store:
            contexts, chain = Contexts(store, PAYLOAD_BYTES), chain_of("well again", CHAIN_BLOCKS)
            contexts.save(chain)
            contexts.settle()
            contexts.leave_host(chain)
            well = contexts.read(chain) == CHAIN_BLOCKS
            tally.expect(well, f"round {number}: a medium that is well again is not used")
    return tally


@contextlib.contextmanager
def _disk_store(medium: FailingMedium) -> Iterator[Store]:
    """Open a store on a medium; its clock jumps, so that no count of failures ends the writing."""
    config = DiskConfig(path="memory", capacity_bytes=medium.size, region_bytes=REGION_BYTES)
    clock = ManualClock()
    tier = DiskTier(config, _Leaping(clock), lambda _: medium)
    with contextlib.closing(Store(HOST_BYTES, [tier], SECRET)) as store:
        store.start()
        store.recovery.wait()
        yield store


class _Leaping:
    """A clock on which an hour passes whenever somebody looks."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock

    def now(self) -> float:
        """Return the next hour."""
        self._clock.advance(3600.0)
        return self._clock.now()


def _live(tally: Tally, store: Store, dice: random.Random, where: str) -> None:
    """Save and read at random; whatever is read is right, and nothing is raised."""
    contexts = Contexts(store, PAYLOAD_BYTES)
    chains = [chain_of(f"injected/{number}", CHAIN_BLOCKS) for number in range(CHAINS)]
    try:
        for _ in range(LIFE_ROUNDS):
            chain = dice.choice(chains)
            if dice.random() < 0.5:  # noqa: PLR2004 - a coin
                contexts.save(chain)
                contexts.settle()
                contexts.leave_host(chain)
            else:
                tally.counts["blocks read and right"] += contexts.read(chain)
    except (AssertionError, OSError, HoldfastError) as error:
        tally.fail(f"{where}: {error!r}")


def _in_system_calls(order: Order) -> Tally:
    """Let one system call of a process fail; then let another read what is there."""
    tally = Tally("injected.calls", "faults")
    strace = shutil.which("strace")
    tally.skipped = _why_not(strace)
    if tally.skipped or strace is None:
        return tally
    for number, dice in enumerate(order.rounds(tally)):
        calls = dice.choice(list(CALLS))
        how = dice.choice(CALLS[calls])
        when = dice.randrange(1, WHEN_MAX) if calls[0] == "p" else 1
        folder = order.folder / f"injected-{number}"
        inject = f"inject={calls}:{how}:when={when}"
        wrapped = [strace, "-f", "-qq", "-o", f"{folder}.trace", "-e", f"trace={calls}", "-e"]
        for words, argv in ((inject, [*wrapped, inject]), (f"{inject}, then without", [])):
            status, said = _life(argv, folder, number)
            rejected = status == _REJECTED and "ConfigError" in said
            tally.counts["clean rejects"] += rejected
            tally.expect(status == 0 or rejected, f"round {number}, {words}: {said[-300:]}")
        struck = "(INJECTED)" in Path(f"{folder}.trace").read_text()
        tally.counts["struck"] += struck
        tally.tried += 1
        shutil.rmtree(folder, ignore_errors=True)
    tally.expect(tally.counts["struck"], "no system call was ever made to fail")
    return tally


def _why_not(strace: str | None) -> str:
    """Say why no system call can be made to fail here; empty where one can."""
    if strace is None:
        return "strace is not installed: apt-get install strace"
    probe = [strace, "-o", "/dev/null", "-e", "inject=getpid:error=EIO", "true"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"strace does not work here: {done.stderr.strip()[:200]}"


def _life(wrapped: Sequence[str], folder: Path, number: int) -> tuple[int, str]:
    """Run a process that saves and reads in a folder; return how it ended and what it said."""
    argv = [*wrapped, sys.executable, "-m", "holdfast.testing.injected", str(folder), str(number)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_LIFE_S, check=False)
    except subprocess.TimeoutExpired:
        return -1, f"no end within {_LIFE_S:g} s"
    return done.returncode, done.stderr


def main(folder: str, number: str) -> int:
    """Live in a folder as a process of its own; 2 where its disk is refused in words."""
    config = DiskConfig(
        path=folder, capacity_bytes=16 * MIB, region_bytes=MIB, reader_threads=1, writer_threads=1
    )
    try:
        tier = DiskTier(config)
    except HoldfastError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201 - its parent reads it
        return _REJECTED
    tally = Tally("life", "faults")
    with contextlib.closing(Store(HOST_BYTES, [tier], SECRET)) as store:
        store.start()
        store.recovery.wait()
        _live(tally, store, random.Random(number), "this life")  # noqa: S311 - must replay
    for words in tally.failures:
        print(words, file=sys.stderr)  # noqa: T201 - as above
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
