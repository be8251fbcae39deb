"""Measure what metrics cost: counting a request, and a scrape every second during other work."""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from holdfast.errors import HoldfastError, Outcome
from holdfast.limits import GIB, MIB
from holdfast.probe import free_port
from holdfast.report import Row, at_most
from holdfast.store.activity import Activity, PromptCounts
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.harness.paired_runs import Speed, paired, speed_row, timed
from holdfast_bench.measure.node import BATCH, PAYLOAD_BYTES, attached

COUNTING_GOAL_US = 20.0
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


def counting_row(rounds: int) -> Row:
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


def scraped_rows(folder: Path, rounds: int) -> Iterator[Row]:
    """Measure a node with a scrape every second and without, in turns.

    Fetches from memory (`metrics.scraped`), fetches from disk, and saves of new contexts.
    """
    listen = f"127.0.0.1:{free_port()}"
    settings = {"http": {"listen": f"tcp://{listen}"}}
    with (
        NodeUnderTest(folder, HOST_BYTES, DISK_BYTES, settings=settings) as node,
        attached(node) as engine,
    ):
        contexts = [engine.chain(seed, BATCH) for seed in range(CONTEXTS)]
        for chain in contexts:
            engine.save(chain)
            node.wait_idle()
        turn = itertools.count(CONTEXTS)

        def fetch_from_disk() -> None:
            sources = engine.fetch(contexts[next(turn) % CONTEXTS]).sources
            if sources != {"disk": BATCH}:
                raise HoldfastError(f"expected {BATCH} blocks from disk, got {sources}")

        for what, work in {
            "metrics.scraped": lambda: engine.fetch(contexts[-1]),
            "metrics.scraped.disk": fetch_from_disk,
            "metrics.scraped.save": lambda: engine.save(engine.chain(next(turn), BATCH)),
        }.items():
            _passes(work)  # the memory is faulted in
            scraped = partial(_scraped, f"http://{listen}/metrics", work)
            pairs = paired(rounds, scraped, partial(_speed, work))
            yield speed_row(what, pairs, SCRAPED_GOAL)


def _scraped(url: str, work: Callable[[], object]) -> Speed:
    with _scraping(url):
        return _passes(work)


def _speed(work: Callable[[], object]) -> float:
    return _passes(work).gb_per_s


@contextmanager
def _scraping(url: str) -> Iterator[None]:
    """Scrape every second in a process of its own."""
    with subprocess.Popen([sys.executable, "-c", _SCRAPER, url], stdout=subprocess.PIPE) as scraper:
        try:
            if scraper.stdout is not None:
                scraper.stdout.readline()
            yield
        finally:
            scraper.kill()


def _passes(work: Callable[[], object]) -> Speed:
    """Move one context again and again for `PASS_S`."""
    end_s, moved = time.perf_counter() + PASS_S, 0

    def move() -> None:
        nonlocal moved
        while time.perf_counter() < end_s:
            work()
            moved += 1

    one = timed(BATCH * PAYLOAD_BYTES, move)
    return Speed(one.gb_per_s * moved, one.cpu_s_per_gb / moved)
