"""Injected campaign: EIO, ENOSPC and short transfers in a tier, on a medium and in system calls.

An I/O failure is an outcome: the store raises nothing, serves right bytes only, and saves and reads
again when the medium works again. For system calls an unmodified process runs under strace, which
makes one call of one kind fail; then another process reads the disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
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
from holdfast.testing.extents import MemoryExtents, tier_on
from holdfast.testing.faulty import EVERY_FAULT, FaultyTier, InjectedFault
from holdfast.testing.memory import MemoryTier
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.region import SECTOR
from holdfast.tiers.disk.tier import DiskTier
from holdfast_bench.campaigns.campaign import CampaignBudget, CampaignResult
from holdfast_bench.campaigns.contexts import Contexts, chain_of
from holdfast_bench.harness.process import start_owned

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
"""Faults in tiers for each fault in a system call, which takes a whole process."""

SECRET = {"default": b"s" * 32}
CALLS = {
    "pwritev": ("pwritev,pwritev2", 10, ("error=EIO", "error=ENOSPC", "retval=4096")),
    "preadv": ("preadv,preadv2", 12, ("error=EIO", "retval=4096", "retval=0")),
    "fdatasync": ("fdatasync", 3, ("error=EIO", "error=ENOSPC")),
    "fallocate": ("fallocate", 1, ("error=ENOSPC", "error=EIO")),
}
"""By kind: the system calls that fail, how often one thread of a process makes them, and how.

A disk is flushed at every opening; its space is allocated once, when it is formatted.
"""

_KINDS = ("pwritev", "preadv", "fdatasync", "pwritev", "preadv", "fallocate",
          "pwritev", "preadv", "pwritev", "preadv")  # fmt: skip
OPENINGS = 3
"""How often one process opens its disk; each time it uses new chains and old ones."""

STRUCK_ONE_IN = 4
"""At least one of so many rounds of a kind must have made a call fail."""

_LIFE_S = 120.0
_REJECTED = 2
_UNFORMATTED = "opening 0: ConfigError"


def run(budget: CampaignBudget) -> Iterator[CampaignResult]:
    """Inject faults in a tier, on a medium and in system calls."""
    half = budget.share(2.1)
    yield _in_a_tier(half)
    yield _on_a_medium(half)
    calls = budget.share(SYSTEM_CALLS_SHARE)
    yield _in_system_calls(calls._replace(seconds=budget.share(10).seconds))


def _in_a_tier(budget: CampaignBudget) -> CampaignResult:
    """Save and read through a tier that injects every kind of fault."""
    result = CampaignResult("injected.tier", "faults")
    chance = dict.fromkeys(EVERY_FAULT, FAULT_CHANCE) | {
        InjectedFault.DELAY_READ: 0,
        InjectedFault.DELAY_WRITE: 0,
    }
    for number, rng in enumerate(budget.rounds(result)):
        faulty = FaultyTier(MemoryTier(HOST_BYTES), rng.randrange(1 << 30), chance)
        with Store(HOST_BYTES, [faulty], SECRET) as store:
            store.start()
            _live(result, store, rng, f"round {number}")
        result.tried += faulty.injected.total()
        result.counts.update({str(fault): count for fault, count in faulty.injected.items()})
    read = result.counts["blocks read and right"]
    budget.expect_enough(result, 4 * read > result.tried, f"{read} blocks read: too few")
    return result


class FailingMedium(MemoryExtents):
    """A medium whose reads and writes fail with `chance`; a failed write may be partial."""

    def __init__(self, image: bytes | bytearray, rng: random.Random) -> None:
        super().__init__(image)
        self.chance = 0.0
        self.injected = 0
        self._rng = rng

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        if self._rng.random() < self.chance:
            self.injected += 1
            super().read(offset, [view[: len(view) // 2] for view in views])
            raise OSError(errno.EIO, "injected")
        super().read(offset, views)

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        if self._rng.random() < self.chance:
            self.injected += 1
            whole = b"".join(views)
            part = whole[: self._rng.randrange(len(whole) + 1) // SECTOR * SECTOR]
            if part:
                super().write(offset, [memoryview(part)])
            raise OSError(self._rng.choice((errno.EIO, errno.ENOSPC)), "injected")
        super().write(offset, views)
        self.log.clear()


def _on_a_medium(budget: CampaignBudget) -> CampaignResult:
    """Save, read and reopen on a medium that fails; then save and read without failures."""
    result = CampaignResult("injected.medium", "faults")
    for number, rng in enumerate(budget.rounds(result)):
        fresh = MemoryExtents.formatted(REGION_BYTES, REGIONS)
        medium = FailingMedium(fresh.image, rng)
        for life in range(3):
            with _disk_store(medium) as store:
                medium.chance = MEDIUM_CHANCE
                _live(result, store, rng, f"round {number}, life {life}")
                medium.chance = 0.0
        result.tried += medium.injected
        with _disk_store(medium) as store:
            contexts, chain = Contexts(store, PAYLOAD_BYTES), chain_of("well again", CHAIN_BLOCKS)
            contexts.save(chain)
            contexts.wait_written()
            contexts.leave_host(chain)
            whole = contexts.read(chain) == CHAIN_BLOCKS
            result.expect(whole, f"round {number}: a medium that works again is not used")
    return result


@contextlib.contextmanager
def _disk_store(medium: FailingMedium) -> Iterator[Store]:
    """Open a store on a medium; the clock jumps, so that write failures are never too frequent."""
    with Store(HOST_BYTES, [tier_on(medium, _JumpingClock())], SECRET) as store:
        store.start()
        store.recovery.wait()
        yield store


class _JumpingClock(ManualClock):
    """A clock that advances by one hour at each reading."""

    def now(self) -> float:
        self.advance(3600.0)
        return super().now()


def _live(
    result: CampaignResult, store: Store, rng: random.Random, where: str, first: int = 0
) -> None:
    """Save and read chains in random order; count a wrong byte or an exception as a failure."""
    contexts = Contexts(store, PAYLOAD_BYTES)
    chains = [chain_of(f"injected/{first + number}", CHAIN_BLOCKS) for number in range(CHAINS)]
    try:
        for _ in range(LIFE_ROUNDS):
            chain = rng.choice(chains)
            if rng.random() < 0.5:  # noqa: PLR2004 - a coin
                contexts.save(chain)
                contexts.wait_written()
                contexts.leave_host(chain)
            else:
                result.counts["blocks read and right"] += contexts.read(chain)
    except (AssertionError, OSError, HoldfastError) as error:
        result.fail(f"{where}: {error!r}")


class Strike(NamedTuple):
    """One system call of a process that fails: its kind, its names and strace's expression."""

    kind: str
    calls: str
    inject: str

    @classmethod
    def drawn(cls, rng: random.Random, number: int) -> Strike:
        """Draw a strike for a round; the kinds take turns."""
        kind = _KINDS[number % len(_KINDS)]
        calls, most, hows = CALLS[kind]
        inject = f"inject={calls}:{rng.choice(hows)}:when={rng.randint(1, most)}"
        return cls(kind, calls, inject)


def _in_system_calls(budget: CampaignBudget) -> CampaignResult:
    """Make one system call of a process fail; then let another process read the disk."""
    result = CampaignResult("injected.calls", "faults")
    strace = shutil.which("strace")
    result.skipped = _why_not(strace)
    if result.skipped or strace is None:
        return result
    rounds: Counter[str] = Counter()
    for number, rng in enumerate(budget.rounds(result)):
        strike, seed = Strike.drawn(rng, number), f"{budget.seed}/{number}"
        folder = budget.folder / f"injected-{number}"
        log = folder.with_suffix(".trace")
        traced = [strace, "-f", "-qq", "-o", str(log), "-e", f"trace={strike.calls}"]
        status, stderr = _life([*traced, "-e", strike.inject], folder, seed)
        struck, rejected = "(INJECTED)" in log.read_text(), status == _REJECTED
        where = f"round {number}, {strike.inject}"
        result.expect(status == 0 or (struck and rejected), f"{where}: {stderr[-300:]}")
        rounds[strike.kind] += 1
        result.counts[f"struck {strike.kind}" if struck else "struck nothing"] += 1
        result.counts["clean rejects"] += rejected
        result.tried += struck and _UNFORMATTED not in stderr
        status, stderr = _life([], folder, seed)
        result.expect(status == 0, f"{where}, then without: {stderr[-300:]}")
        shutil.rmtree(folder, ignore_errors=True)
        log.unlink()
    for kind, count in rounds.items():
        struck_enough = result.counts[f"struck {kind}"] >= count // STRUCK_ONE_IN
        budget.expect_enough(result, struck_enough, f"too few of {count} strikes at {kind} hit")
    return result


def _why_not(strace: str | None) -> str:
    """Return why strace cannot inject failures here, "" if it can."""
    if strace is None:
        return "strace is not installed: apt-get install strace"
    probe = [strace, "-o", "/dev/null", "-e", "inject=getpid:error=EIO", "true"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"strace does not work here: {done.stderr.strip()[:200]}"


def _life(wrapped: Sequence[str], folder: Path, seed: str) -> tuple[int, str]:
    """Run a process that saves and reads in a folder; return its status and standard error.

    It is killed after `_LIFE_S`; the status is then -1.
    """
    process = start_owned(
        [*wrapped, sys.executable, "-m", "holdfast_bench.campaigns.injected", str(folder), seed],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        process_group=0,  # Ctrl-C must not reach this process
    )
    try:
        _, stderr = process.communicate(timeout=_LIFE_S)
        status = process.wait()
    except subprocess.TimeoutExpired:
        return -1, f"no end within {_LIFE_S:g} s"
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)  # a traced process may outlive its strace
            process.communicate()
    return status, stderr.decode(errors="replace")


def main(folder: str, seed: str) -> int:
    """Save and read in a folder; return 0, 1 for failures, or 2 if the disk was once refused."""
    config = DiskConfig(
        path=folder, capacity_bytes=16 * MIB, region_bytes=MIB, reader_threads=1, writer_threads=1
    )
    result, rng, refused = CampaignResult("life", "faults"), random.Random(seed), False  # noqa: S311 - must replay
    for opening in range(OPENINGS):
        try:
            tier = DiskTier(config)
        except ConfigError as error:
            print(f"opening {opening}: ConfigError: {error}", file=sys.stderr)
            refused = True
            continue
        with Store(HOST_BYTES, [tier], SECRET) as store:
            store.start()
            store.recovery.wait()
            _live(result, store, rng, f"opening {opening}", opening * CHAINS // 2)
    result.expect(refused or result.counts["blocks read and right"], "no block was read")
    for words in result.failures:
        print(words, file=sys.stderr)
    return 1 if result.failed else _REJECTED if refused else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
