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
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast.clock import ManualClock
from holdfast.errors import ConfigError, HoldfastError
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
    "pwritev": ("pwritev,pwritev2", 10, ("error=EIO", "error=ENOSPC", "retval=4096")),
    "preadv": ("preadv,preadv2", 12, ("error=EIO", "retval=4096", "retval=0")),
    "fdatasync": ("fdatasync", 3, ("error=EIO", "error=ENOSPC")),
    "fallocate": ("fallocate", 1, ("error=ENOSPC", "error=EIO")),
}
"""What is made to fail: its system calls, how many of them one thread of a life makes, and how.

A disk is flushed whenever it is opened, and its room allocated when it is formatted, once.
"""

_TURNS = ("pwritev", "preadv", "fdatasync", "pwritev", "preadv", "fallocate",
          "pwritev", "preadv", "pwritev", "preadv")  # fmt: skip
OPENINGS = 3
"""How often a life opens its disk; chains that are new, and old ones, each time."""

STRUCK_ONE_IN = 4
"""Of so many rounds of a kind at least one must have struck."""

_LIFE_S = 120.0
_REJECTED = 2
_UNFORMATTED = "opening 0: ConfigError"


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


def _live(tally: Tally, store: Store, dice: random.Random, where: str, first: int = 0) -> None:
    """Save and read at random; whatever is read is right, and nothing is raised."""
    contexts = Contexts(store, PAYLOAD_BYTES)
    chains = [chain_of(f"injected/{first + number}", CHAIN_BLOCKS) for number in range(CHAINS)]
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


class Strike(NamedTuple):
    """One system call of a life that is made to fail: its kind, and what strace is told."""

    kind: str
    calls: str
    inject: str

    @classmethod
    def drawn(cls, dice: random.Random, number: int) -> Strike:
        """Draw one; every kind comes up in its turn."""
        kind = _TURNS[number % len(_TURNS)]
        calls, most, hows = CALLS[kind]
        inject = f"inject={calls}:{dice.choice(hows)}:when={dice.randint(1, most)}"
        return cls(kind, calls, inject)

    def argv(self, strace: str, log: Path) -> list[str]:
        """Return what a command is put behind for this to happen to it."""
        return [strace, "-f", "-qq", "-o", str(log), "-e", f"trace={self.calls}", "-e", self.inject]


def _in_system_calls(order: Order) -> Tally:
    """Let one system call of a process fail; then let another read what is there."""
    tally = Tally("injected.calls", "faults")
    strace = shutil.which("strace")
    tally.skipped = _why_not(strace)
    if tally.skipped or strace is None:
        return tally
    rounds: Counter[str] = Counter()
    for number, dice in enumerate(order.rounds(tally)):
        strike, seed = Strike.drawn(dice, number), f"{order.seed}/{number}"
        folder = order.folder / f"injected-{number}"
        log = folder.with_suffix(".trace")
        status, said = _life(strike.argv(strace, log), folder, seed)
        struck, rejected = "(INJECTED)" in log.read_text(), status == _REJECTED
        where = f"round {number}, {strike.inject}"
        tally.expect(status == 0 or (struck and rejected), f"{where}: {said[-300:]}")
        rounds[strike.kind] += 1
        tally.counts[f"struck {strike.kind}" if struck else "struck nothing"] += 1
        tally.counts["clean rejects"] += rejected
        tally.tried += struck and _UNFORMATTED not in said
        status, said = _life([], folder, seed)
        tally.expect(status == 0, f"{where}, then without: {said[-300:]}")
        shutil.rmtree(folder, ignore_errors=True)
        log.unlink()
    for kind, count in rounds.items():
        struck_enough = tally.counts[f"struck {kind}"] >= count // STRUCK_ONE_IN
        order.expect_enough(tally, struck_enough, f"of {count} strikes at {kind} too few hit")
    return tally


def _why_not(strace: str | None) -> str:
    """Say why no system call can be made to fail here; empty where one can."""
    if strace is None:
        return "strace is not installed: apt-get install strace"
    probe = [strace, "-o", "/dev/null", "-e", "inject=getpid:error=EIO", "true"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"strace does not work here: {done.stderr.strip()[:200]}"


def _life(wrapped: Sequence[str], folder: Path, seed: str) -> tuple[int, str]:
    """Run a process that saves and reads in a folder; return how it ended and what it said."""
    argv = [*wrapped, sys.executable, "-m", "holdfast.testing.injected", str(folder), seed]
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=_LIFE_S,
            check=False,
            process_group=0,  # an interrupt at the terminal is not for this life
        )
    except subprocess.TimeoutExpired:
        return -1, f"no end within {_LIFE_S:g} s"
    return done.returncode, done.stderr


def main(folder: str, seed: str) -> int:
    """Live in a folder as a process of its own; 2 where its disk was once refused in words."""
    config = DiskConfig(
        path=folder, capacity_bytes=16 * MIB, region_bytes=MIB, reader_threads=1, writer_threads=1
    )
    tally, dice, refused = Tally("life", "faults"), random.Random(seed), False  # noqa: S311 - must replay
    for opening in range(OPENINGS):
        try:
            tier = DiskTier(config)
        except ConfigError as error:
            print(f"opening {opening}: ConfigError: {error}", file=sys.stderr)  # noqa: T201 - its parent reads it
            refused = True
            continue
        with contextlib.closing(Store(HOST_BYTES, [tier], SECRET)) as store:
            store.start()
            store.recovery.wait()
            _live(tally, store, dice, f"opening {opening}", opening * CHAINS // 2)
    for words in tally.failures:
        print(words, file=sys.stderr)  # noqa: T201 - as above
    return 1 if tally.failed else _REJECTED if refused else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
