"""`holdfast bench quota`: a domain's fetches while another one floods the same disk.

The victim is one client that fetches a context, thinks for as long as three fetches take alone, and
fetches the next: it asks for a quarter of the disk. The flood is 50 clients that never think. Its
figure in the flood is held against its own in peace: phases of both by turns, so that whatever else
runs here hits both, and one 99th percentile of all fetches of each kind. A domain that begins to
flood was served nothing before, so for a few seconds it is made up to: what the victim waits in
that time is `onset_ms`, and not counted among the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from holdfast.blocks.world import World
from holdfast.cli import measuring
from holdfast.cli.settled import settled
from holdfast.errors import ConfigError
from holdfast.limits import MIB
from holdfast.node.threads import Threads
from holdfast.policy.fair_queue import WINDOW_S
from holdfast.policy.shares import Quota
from holdfast.policy.turns import Turn
from holdfast.rig.report import Row
from holdfast.store.states import HOST
from holdfast.store.store import Store
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.tier import DiskTier
from holdfast.tiers.throttle import Throttled

if TYPE_CHECKING:
    from rich.status import Status

ALSO = ("median_ratio", "onset_ms", "flood_disk", "fetches")

CLIENTS = 50
"""Clients of the domain that floods, each with one fetch under way all the time."""

BLOCKS = 32
"""In a context: 4K tokens at 128 a block."""

BLOCK_BYTES = 128 << 10
CONTEXTS = 12
HOST_BYTES = 512 * MIB
DISK_BYTES = 1024 * MIB
RATE = 100 * MIB
"""Bytes a second of the disk: so few that the disk's time counts, and not the processor's."""

THINK_S = 3.0 * BLOCKS * BLOCK_BYTES / RATE
GOAL = 1.2
DEADLINE_S = 60.0
FETCHES_A_PHASE = 50
QUICK_ROUNDS = 2
"""100 fetches of each kind: the fewest of which a 99th percentile is not the worst."""


class Load(NamedTuple):
    """What the victim is and asks: its weight beside the flood, seconds between two fetches."""

    name: str
    share: float
    think_s: float
    goal: float | None


LOADS = (
    Load("flooded.share1", 1.0, THINK_S, GOAL),
    Load("flooded.share16", 16.0, THINK_S, GOAL),
    Load("saturating.share1", 1.0, 0.0, None),
)
"""The last one asks for all of the disk itself: with equal shares it can have half of it."""


class _Bench:
    """Two domains over one throttled disk, reached through the threads of a node."""

    def __init__(self, folder: Path, share: float) -> None:
        disk = DiskTier(DiskConfig(path=str(folder), capacity_bytes=DISK_BYTES))
        keys = {name: name.encode().ljust(32, b"-") for name in ("victim", "flood")}
        self.store = Store(HOST_BYTES, [Throttled(disk, RATE)], keys)
        self.store.divide({"victim": {HOST: Quota(HOST_BYTES // 4, share=share)}})
        self.store.start()
        self.threads = Threads()
        self.flood_bytes = 0
        self.contexts = {name: self._save(name) for name in keys}

    def close(self) -> None:
        """End threads, then the store."""
        self.threads.close()
        self.store.close()

    def fetch(self, name: str, number: int) -> float:
        """Fetch a context from the disk as an engine's request would; return the seconds it took.

        It has left memory again when this returns.
        """
        world, keys = self.world(name), self.contexts[name][number % CONTEXTS]
        turn = Turn(world.domain, BLOCKS * BLOCK_BYTES, self.store.share(world.domain))
        begun = time.perf_counter()
        fetch = partial(self.store.fetch, world, keys, DEADLINE_S)
        fetched = self.threads.fetching.submit(turn, fetch).result()
        took_s = time.perf_counter() - begun
        self.store.release(fetched.lease)
        self._leave_memory(keys)
        if name == "victim" and len(fetched.places) < BLOCKS:
            raise ConfigError(f"only {len(fetched.places)} of {BLOCKS} blocks came: {fetched}")
        return took_s

    @contextlib.contextmanager
    def flooded(self, name: str) -> Iterator[None]:
        """Have a domain's clients fetch without a pause."""
        over = threading.Event()

        def client(number: int) -> None:
            while not over.is_set():
                self.fetch(name, number)
                self.flood_bytes += BLOCKS * BLOCK_BYTES
                number += CLIENTS

        clients = [threading.Thread(target=client, args=(n,)) for n in range(1, CLIENTS + 1)]
        for each in clients:
            each.start()
        try:
            yield
        finally:
            over.set()
            for each in clients:
                each.join()

    def world(self, name: str) -> World:
        """Return the world of a domain's blocks."""
        return World(b"bench quota 16 B", self.store.domain(name)[1], BLOCK_BYTES - 4096, 128)

    def _save(self, name: str) -> list[list[bytes]]:
        """Save a domain's contexts and have them on the disk only."""
        world, contexts = self.world(name), []
        for number in range(CONTEXTS):
            keys = [f"{name:<8}{number:>4}{block:>4}".encode() for block in range(BLOCKS)]
            self.store.commit(self.store.reserve(world, keys, world.fingerprint, 0).ticket)
            contexts.append(keys)
            while self.store.states.unwritten():
                time.sleep(0.01)
            self._leave_memory(keys)
        return contexts

    def _leave_memory(self, keys: Sequence[bytes]) -> None:
        states = self.store.states
        with states.lock:
            for row in map(states.index.find, keys):
                if row >= 0 and row not in states.loading:
                    states.vacate(row, HOST)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    about = f"rounds of {FETCHES_A_PHASE} fetches of the victim in peace and as many in the flood"
    measuring.add_rounds_argument(parser, 6, about, least=QUICK_ROUNDS)
    measuring.add_folder_argument(parser, "scratch files, 1 GiB")
    measuring.add_quick_argument(parser, f"loads with a goal only, {QUICK_ROUNDS} rounds")


def measure(args: argparse.Namespace, status: Status) -> Iterator[Row]:
    """Yield the figures: how well a domain of moderate load fares in the flood."""
    status.update(f"{CLIENTS} clients of one domain against one of another ...")
    rounds = QUICK_ROUNDS if args.quick else args.rounds
    for load in [each for each in LOADS if each.goal is not None or not args.quick]:
        with (
            measuring.scratch(args.folder) as folder,
            contextlib.closing(_Bench(folder, load.share)) as bench,
            settled(),  # as a node is
        ):
            yield _row(bench, load, rounds)


def _row(bench: _Bench, load: Load, rounds: int) -> Row:
    """Fetch in peace and in the flood by turns."""
    numbers = itertools.count()
    peace, onset, flood = list[float](), list[float](), list[float]()
    flood_bytes, flood_s = 0, 0.0

    def fetch() -> float:
        time.sleep(load.think_s)
        return bench.fetch("victim", next(numbers))

    for _ in range(rounds):
        peace += [fetch() for _ in range(FETCHES_A_PHASE)]
        with bench.flooded("flood"):
            settled_s = time.perf_counter() + WINDOW_S
            onset.append(fetch())
            while time.perf_counter() < settled_s:
                onset.append(fetch())
            begun, before = time.perf_counter(), bench.flood_bytes
            flood += [fetch() for _ in range(FETCHES_A_PHASE)]
            flood_s += time.perf_counter() - begun
            flood_bytes += bench.flood_bytes - before
    ratio = _p99(flood) / _p99(peace)
    return Row(
        what=f"quota.{load.name}",
        value=1e3 * _p99(flood),
        unit="ms",
        limit=1e3 * _p99(peace),
        ratio=ratio,
        goal=load.goal,
        ok=None if load.goal is None else ratio <= load.goal,
        more={
            "median_ratio": _middle(flood) / _middle(peace),
            "onset_ms": 1e3 * max(onset),
            "flood_disk": flood_bytes / flood_s / RATE,
            "fetches": len(flood),
            "clients": CLIENTS,
            "share": load.share,
            "think_s": load.think_s,
        },
    )


def _p99(seconds: Sequence[float]) -> float:
    """Return what 99 in a hundred took at most."""
    return sorted(seconds)[math.ceil(0.99 * len(seconds)) - 1]


def _middle(seconds: Sequence[float]) -> float:
    return sorted(seconds)[len(seconds) // 2]
