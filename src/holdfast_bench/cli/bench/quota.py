"""`holdfast bench quota`: a domain's fetch latency while another domain floods the same disk.

The victim is one client that fetches a context, waits for as long as three undisturbed fetches
take, and fetches the next; it uses a quarter of the disk's bandwidth. The flood is 50 clients that
do not wait. The figure is the victim's 99th percentile with the flood, relative to that without it;
phases of both alternate, so that other load on the machine affects both. A domain that starts to
flood has credit for a few seconds; the victim's largest latency in that time is `onset_ms`, and is
not part of the percentile.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median_high
from typing import NamedTuple

from holdfast.cli.serve import gc_frozen
from holdfast.errors import HoldfastError
from holdfast.fairness.fair_queue import WINDOW_S, WorkItem
from holdfast.fairness.shares import Quota
from holdfast.limits import MIB
from holdfast.node.local.threads import NodeThreads
from holdfast.report import Row
from holdfast.store.block_table import HOST
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.tier import DiskTier
from holdfast_bench.campaigns.contexts import Contexts, chain_of
from holdfast_bench.cli import measuring
from holdfast_bench.cli.progress import Steps
from holdfast_bench.harness.standard_error import percentile_99

ALSO = ("median_ratio", "onset_ms", "flood_disk", "fetches")

CLIENTS = 50
"""Clients of the flooding domain; each always has one fetch in flight."""

BLOCKS = 32
"""Blocks of a context: 4K tokens at 128 per block."""

BLOCK_BYTES = 128 << 10
PAYLOAD_BYTES = BLOCK_BYTES - 4096
CONTEXTS = 12
HOST_BYTES = 512 * MIB
DISK_BYTES = 1024 * MIB
RATE = 100 * MIB
"""Disk bandwidth in bytes per second; low, so that the disk is the bottleneck and not the CPU."""

THINK_S = 3.0 * BLOCKS * BLOCK_BYTES / RATE
GOAL = 1.2
DEADLINE_S = 60.0
FETCHES_A_PHASE = 50
QUICK_ROUNDS = 2
"""100 fetches of each kind: the fewest whose 99th percentile is not the maximum."""


class QuotaLoad(NamedTuple):
    """The victim's load: its share (the flood's is 1), and seconds between two fetches."""

    name: str
    share: float
    think_s: float
    goal: float | None


LOADS = (
    QuotaLoad("flooded.share1", 1.0, THINK_S, GOAL),
    QuotaLoad("flooded.share16", 16.0, THINK_S, GOAL),
    QuotaLoad("saturating.share1", 1.0, 0.0, None),
)
"""The last load could use the whole disk; with equal shares it gets half of it."""


class _Bench:
    """Two domains over one throttled disk, with fetches scheduled by a node's threads."""

    def __init__(self, folder: Path, share: float) -> None:
        config = DiskConfig(path=str(folder), capacity_bytes=DISK_BYTES, read_bytes_per_s=RATE)
        keys = {name: name.encode().ljust(32, b"-") for name in ("victim", "flood")}
        quotas = {"victim": {HOST: Quota(HOST_BYTES // 4, share=share)}}
        options = StoreOptions(quotas=quotas)
        self.store = Store(HOST_BYTES, [DiskTier(config)], keys, options)
        self.store.start()
        self.threads = NodeThreads()
        self.flood_bytes = 0
        self._counting = threading.Lock()
        self._contexts = {name: Contexts(self.store, PAYLOAD_BYTES, name) for name in keys}
        self._chains = {
            name: [chain_of(f"{name}/{number}", BLOCKS) for number in range(CONTEXTS)]
            for name in keys
        }
        for name, contexts in self._contexts.items():
            for chain in self._chains[name]:
                contexts.save(chain)
                contexts.wait_written()
                contexts.leave_host(chain)

    def close(self) -> None:
        self.threads.close()
        self.store.close()

    def fetch(self, name: str, number: int) -> float:
        """Fetch a context from the disk, as an engine's request does; return the seconds it took.

        Removes the context from memory again. Raises HoldfastError if the victim gets only a part.
        """
        contexts, keys = self._contexts[name], self._chains[name][number % CONTEXTS]
        namespace, domain = contexts.namespace, contexts.namespace.domain
        work_item = WorkItem(domain, BLOCKS * BLOCK_BYTES, self.store.share(domain))
        begun = time.perf_counter()
        fetch = partial(self.store.fetch, namespace, keys, DEADLINE_S)
        fetched = self.threads.fetching.submit(work_item, fetch).result()
        took_s = time.perf_counter() - begun
        self.store.release(fetched.lease)
        contexts.leave_host(keys)
        if name == "flood":
            with self._counting:  # of CLIENTS threads
                self.flood_bytes += len(fetched.places) * BLOCK_BYTES
        if name == "victim" and len(fetched.places) < BLOCKS:
            raise HoldfastError(
                f"fetched {len(fetched.places)} of {BLOCKS} blocks within {DEADLINE_S:g} s: "
                f"{fetched}"
            )
        return took_s

    @contextlib.contextmanager
    def flooded(self) -> Iterator[None]:
        """Run the flood's clients, which fetch without a pause, during the block."""
        over = threading.Event()

        def client(number: int) -> None:
            while not over.is_set():
                self.fetch("flood", number)
                number += CLIENTS

        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(client, number) for number in range(1, CLIENTS + 1)]
            try:
                yield
            finally:
                over.set()
        for each in clients:
            each.result()  # raises what a client raised


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    about = f"rounds of {FETCHES_A_PHASE} fetches of the victim in peace and as many in the flood"
    measuring.add_rounds_argument(parser, 6, about, least=QUICK_ROUNDS)
    measuring.add_folder_argument(parser, "scratch files, 1 GiB")
    measuring.add_quick_argument(parser, f"loads with a goal only, {QUICK_ROUNDS} rounds")


def measure(args: argparse.Namespace, steps: Steps) -> Iterator[Row]:
    """Yield one row per load of the victim."""
    steps.update(f"{CLIENTS} clients of one domain against one of another ...")
    rounds = QUICK_ROUNDS if args.quick else args.rounds
    for load in [each for each in LOADS if each.goal is not None or not args.quick]:
        with (
            measuring.scratch(args.folder) as folder,
            contextlib.closing(_Bench(folder, load.share)) as bench,
            gc_frozen(),  # as a node is
        ):
            yield _row(bench, load, rounds)


def _row(bench: _Bench, load: QuotaLoad, rounds: int) -> Row:
    """Alternate phases of fetches without and with the flood; return the row of both."""
    numbers = itertools.count()
    peace, onset, flood = list[float](), list[float](), list[float]()
    flood_bytes, flood_s = 0, 0.0

    def fetch() -> float:
        time.sleep(load.think_s)
        return bench.fetch("victim", next(numbers))

    for _ in range(rounds):
        peace += [fetch() for _ in range(FETCHES_A_PHASE)]
        with bench.flooded():
            settled_s = time.perf_counter() + WINDOW_S
            onset.append(fetch())
            while time.perf_counter() < settled_s:
                onset.append(fetch())
            begun, before = time.perf_counter(), bench.flood_bytes
            flood += [fetch() for _ in range(FETCHES_A_PHASE)]
            flood_s += time.perf_counter() - begun
            flood_bytes += bench.flood_bytes - before
    flood_p99_s, peace_p99_s = percentile_99(flood), percentile_99(peace)
    ratio = flood_p99_s / peace_p99_s
    return Row(
        what=f"quota.{load.name}",
        value=1e3 * flood_p99_s,
        unit="ms",
        limit=1e3 * peace_p99_s,
        ratio=ratio,
        goal=load.goal,
        ok=None if load.goal is None else ratio <= load.goal,
        more={
            "median_ratio": median_high(flood) / median_high(peace),
            "onset_ms": 1e3 * max(onset),
            "flood_disk": flood_bytes / flood_s / RATE,
            "fetches": len(flood),
            "clients": CLIENTS,
            "share": load.share,
            "think_s": load.think_s,
        },
    )
