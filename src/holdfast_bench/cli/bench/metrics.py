"""`holdfast bench metrics`: the cost of counting a request, and of a scrape every second."""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from holdfast.buffers import aligned_buffer
from holdfast.errors import HoldfastError, Outcome
from holdfast.limits import GIB, MIB
from holdfast.probe import free_port
from holdfast.report import Row, at_most
from holdfast.store.activity import Activity, PromptCounts
from holdfast_bench.cli import measuring
from holdfast_bench.cli.progress import Steps
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.harness.paired_runs import Speed, paired, speed_row, timed
from holdfast_bench.measure.disk import SECRET
from holdfast_bench.measure.node import BATCH, PAYLOAD_BYTES, BenchSession, attached
from holdfast_bench.measure.pool import (
    MAIN_BYTES,
    RECORDS_BYTES,
    RecordBatch,
    RoundTrip,
    TargetUnderTest,
    spent_s,
)
from holdfast_bench.peers.plain_sockets import PlainPool

ALSO = ("cpu_s_per_gb",)

COUNTING_GOAL_US = 20.0
SCRAPE_GOAL_MS = 10.0
"""CPU time of one scrape: at one scrape a second, 1 % of a core, under any load."""

SCRAPES = 50
SCRAPED_GOAL = 0.98
REQUESTS = 2_000
PASS_S = 2.0
"""Duration of a pass, in which one or two scrapes happen."""

HOST_BYTES = 256 * MIB
DISK_BYTES = 2 * GIB
CONTEXTS = 8
"""Contexts of 64 MiB: twice as many as fit in memory, so that a cycle reads each from disk."""

_SCRAPER = """
import sys, time, urllib.request
while True:
    with urllib.request.urlopen(sys.argv[1]) as reply:
        reply.read()
    print("scraped", flush=True)
    time.sleep(1.0)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    measuring.add_rounds_argument(parser, 15, "how often each is measured", least=1)
    measuring.add_folder_argument(parser, "the files of the nodes")
    measuring.add_quick_argument(parser, "three rounds")


def measure(args: argparse.Namespace, steps: Steps) -> Iterator[Row]:
    """Yield the figures."""
    rounds = min(3, args.rounds) if args.quick else args.rounds
    steps.plan(5)
    steps.begin("counting")
    yield _counting_row(rounds)
    with measuring.scratch(args.folder) as scratch:
        steps.begin("fetches with and without scrapes")
        yield from _node_rows(scratch / "node", rounds)
        steps.begin("saves with and without scrapes")
        yield _save_row(scratch / "memory", rounds)
        steps.begin("fetches of sealed blocks with and without scrapes")
        yield _sealed_row(scratch / "sealed", rounds)
        steps.begin("a target with and without scrapes")
        yield from _target_rows(scratch / "target", rounds)


def _counting_row(rounds: int) -> Row:
    """Time all counts of one request: prompt, lookup, fetch, save and the end of its plan."""
    activity, prompt = Activity(), PromptCounts(8_192, 128, {"host": 4_096, "disk": 2_048})
    times_us = []
    for _ in range(rounds):
        start_s = time.perf_counter()
        for _ in range(REQUESTS):
            activity.prompt(prompt)
            for name in ("lookup", "fetch", "reserve", "save"):
                activity.call(name, Outcome.OK, 0.01, 64)
            activity.plan_ended(0.2, 0.21, 1.5)
        times_us.append(1e6 * (time.perf_counter() - start_s) / REQUESTS)
    return at_most("metrics.counting", statistics.median(times_us), "us", COUNTING_GOAL_US)


def _node_rows(folder: Path, rounds: int) -> Iterator[Row]:
    """Measure the CPU time of a scrape, and a node with a scrape every second and without.

    Fetches from memory (`metrics.scraped`) and fetches from disk, each with and without scrapes in
    turns.
    """
    with _scraped_node(folder, {}) as (node, url, engine, fetch_from_disk):
        yield _scrape_row(node, url, rounds)
        newest = engine.chain(CONTEXTS - 1, BATCH)
        fetch = partial(_passes, lambda: engine.fetch(newest))
        yield _row("metrics.scraped", url, rounds, fetch)
        yield _row("metrics.scraped.disk", url, rounds, partial(_passes, fetch_from_disk))


def _save_row(folder: Path, rounds: int) -> Row:
    """Measure saves of new contexts, with scrapes and without, in turns.

    The node has memory only: a disk would fall behind the saves, which then find no free slot.
    """
    listen = f"127.0.0.1:{free_port()}"
    tiers = [{"kind": "host", "capacity": HOST_BYTES}]
    settings = {"http": {"listen": f"tcp://{listen}"}, "tiers": tiers}
    with NodeUnderTest(folder, settings=settings) as node, attached(node) as engine:
        saved = itertools.count()
        save = partial(_passes, lambda: engine.save(engine.chain(next(saved), BATCH)))
        return _row("metrics.scraped.save", f"http://{listen}/metrics", rounds, save)


def _sealed_row(folder: Path, rounds: int) -> Row:
    """Measure fetches of sealed blocks from a node's disk, with scrapes and without, in turns."""
    folder.mkdir(parents=True)
    key = folder / "key"
    key.write_bytes(SECRET)
    key.chmod(0o600)
    settings = {"domains": {"bench": {"key_file": str(key)}}}
    with _scraped_node(folder, settings) as (_, url, _, fetch_from_disk):
        measured = partial(_passes, fetch_from_disk)
        return _row("metrics.scraped.sealed", url, rounds, measured)


def _target_rows(folder: Path, rounds: int) -> Iterator[Row]:
    """Measure get and put of 32 blocks of 2 MiB at a target, with scrapes and without, in turns."""
    listen, pool = f"127.0.0.1:{free_port()}", PlainPool()
    records = RecordBatch(MAIN_BYTES, aligned_buffer(RECORDS_BYTES))
    with TargetUnderTest(folder, http=f"tcp://{listen}") as target:
        records.fill(target.client)
        for what, trip in {
            "metrics.scraped.get": lambda: records.get(target.client, pool, BATCH),
            "metrics.scraped.put": lambda: records.put(target.client, BATCH),
        }.items():
            yield _row(what, f"http://{listen}/metrics", rounds, partial(_trips, trip))


@contextmanager
def _scraped_node(
    folder: Path, settings: Mapping[str, object]
) -> Iterator[tuple[NodeUnderTest, str, BenchSession, Callable[[], None]]]:
    """Yield a node whose disk holds all contexts, the URL of its metrics, and a session with it.

    The function yielded last fetches the next context, which memory does not hold.
    """
    listen = f"127.0.0.1:{free_port()}"
    settings = {"http": {"listen": f"tcp://{listen}"}, **settings}
    with (
        NodeUnderTest(folder, HOST_BYTES, DISK_BYTES, settings=settings) as node,
        attached(node) as engine,
    ):
        contexts = [engine.chain(seed, BATCH) for seed in range(CONTEXTS)]
        for chain in contexts:
            engine.save(chain)
            node.wait_idle()
        turn = itertools.cycle(contexts)
        url = f"http://{listen}/metrics"
        yield node, url, engine, lambda: engine.fetch_from_disk(next(turn))


def _scrape_row(node: NodeUnderTest, url: str, rounds: int) -> Row:
    """Measure the CPU time that a node spends on one scrape while it does nothing else."""
    times_ms = []
    for _ in range(rounds):
        before_s = spent_s(node.process.pid)
        for _ in range(SCRAPES):
            with urllib.request.urlopen(url) as reply:  # noqa: S310  # of this bench's own node
                reply.read()
        times_ms.append(1e3 * (spent_s(node.process.pid) - before_s) / SCRAPES)
    return at_most("metrics.scrape.cpu", statistics.median(times_ms), "ms", SCRAPE_GOAL_MS)


def _row(what: str, url: str, rounds: int, measured: Callable[[], Speed]) -> Row:
    """Compare the speed beside a process that scrapes every second with the speed alone."""

    def scraped() -> Speed:
        with _scraping(url):
            return measured()

    measured()  # the memory is faulted in
    return speed_row(what, paired(rounds, scraped, lambda: measured().gb_per_s), SCRAPED_GOAL)


@contextmanager
def _scraping(url: str) -> Iterator[None]:
    """Scrape every second in a process of its own."""
    with subprocess.Popen([sys.executable, "-c", _SCRAPER, url], stdout=subprocess.PIPE) as scraper:
        try:
            if scraper.stdout is None or not scraper.stdout.readline():
                raise HoldfastError(f"{url}: the scraper got no page")
            yield
        finally:
            scraper.kill()


def _passes(work: Callable[[], object]) -> Speed:
    """Move one context again and again for `PASS_S`."""
    end_s, moved = time.perf_counter() + PASS_S, 0

    def move() -> None:
        nonlocal moved
        while not moved or time.perf_counter() < end_s:
            work()
            moved += 1

    one = timed(BATCH * PAYLOAD_BYTES, move)
    return Speed(one.gb_per_s * moved, one.cpu_s_per_gb / moved)


def _trips(trip: Callable[[], RoundTrip]) -> Speed:
    """Transfer batches of a target again and again for `PASS_S`; their checks are not timed.

    The speed is that of all batches together: a median would hide the one that a scrape delays.
    """
    end_s, speeds = time.perf_counter() + PASS_S, list[Speed]()
    while not speeds or time.perf_counter() < end_s:
        each = trip()
        speeds.append(timed(BATCH * MAIN_BYTES, each.run))
        each.check()
    gb_per_s = statistics.harmonic_mean([each.gb_per_s for each in speeds])
    return Speed(gb_per_s, statistics.fmean(each.cpu_s_per_gb for each in speeds))
