"""Measure what metrics cost: counting a request, and a scrape every second during fetches."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.errors import Outcome
from holdfast.probe import free_port
from holdfast.report import Row, at_most
from holdfast.store.activity import Activity, PromptCounts
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.harness.paired_runs import Speed, paired, speed_row, timed
from holdfast_bench.measure.node import BATCH, HOST_BYTES, PAYLOAD_BYTES, BenchSession, attached

COUNTING_GOAL_US = 20.0
SCRAPED_GOAL = 0.98
REQUESTS = 2_000
PASS_S = 2.0
"""Duration of a pass of fetches, in which one or two scrapes happen."""

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


def scraped_row(folder: Path, rounds: int) -> Row:
    """Measure fetches from a node's memory, with a scrape every second and without, in turns."""
    listen = f"127.0.0.1:{free_port()}"
    settings = {"http": {"listen": f"tcp://{listen}"}}
    with NodeUnderTest(folder, HOST_BYTES, settings=settings) as node, attached(node) as engine:
        engine.save(engine.chain(1, BATCH))

        def scraped() -> Speed:
            with _scraping(f"http://{listen}/metrics"):
                return _fetches(engine)

        _fetches(engine)  # the arena's memory is faulted in
        pairs = paired(rounds, scraped, lambda: _fetches(engine).gb_per_s)
    return speed_row("metrics.scraped", pairs, SCRAPED_GOAL)


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


def _fetches(engine: BenchSession) -> Speed:
    """Fetch one context again and again for `PASS_S`."""
    chain = engine.chain(1, BATCH)
    end_s, fetched = time.perf_counter() + PASS_S, 0

    def fetch() -> None:
        nonlocal fetched
        while time.perf_counter() < end_s:
            engine.fetch(chain)
            fetched += 1

    one = timed(BATCH * PAYLOAD_BYTES, fetch)
    return Speed(one.gb_per_s * fetched, one.cpu_s_per_gb / fetched)
