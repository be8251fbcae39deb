"""`holdfast bench vllm`: what a real engine gains from a warm context, and pays without one."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from holdfast.cli.demo import need_engine
from holdfast.config import PRIVATE_PARENT
from holdfast.errors import ConfigError
from holdfast.rig import document, load, model, race, report
from holdfast.rig.race import Times, Track
from holdfast.rig.report import Report, Row

LENGTHS = (4096, 8192)
TAIL_TOKENS = 16
GOALS = {(4096, "host"): 20.0, (4096, "disk"): 12.0, (8192, "host"): 35.0, (8192, "disk"): 18.0}
OVERHEAD_GOAL = 2.0
AS_FAST = 1.0
ROUNDS_MIN = 5
"""Medians of fewer say little on a shared machine."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    parser.add_argument(
        "--rounds",
        type=int,
        default=7,
        metavar="N",
        help=f"rounds per length, at least {ROUNDS_MIN} (default: %(default)s)",
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep logs and store here")
    parser.add_argument("--json", metavar="FILE", help="write the figures; - is standard output")


def run(args: argparse.Namespace) -> int:
    """Measure; 0 if every goal was met, else 1."""
    if args.rounds < ROUNDS_MIN:
        raise ConfigError(f"--rounds: {args.rounds} is fewer than {ROUNDS_MIN}; raise it")
    console = report.console(args.json)
    need_engine()
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=PRIVATE_PARENT) as scratch,
        ExitStack() as stack,
        console.status("set-up: the model is made, the engines start ...") as status,
    ):
        folder = (args.keep or Path(scratch)).absolute()
        made = model.make("demo")
        track = race.lay_track(stack, folder, made, max(LENGTHS) + 1024)
        rows = []
        for row in _rows(track, made, args.rounds, status.update):
            rows.append(row)
            console.print(f"{row.what} {row.more.get('source', '')} {report.number(row.value)}")
    found = Report("bench vllm", rows)
    console.print(report.table(found, also=("source", "cold_s", "warm_s", "missed")))
    if args.json:
        report.write(found, args.json)
    return 0 if found.ok else 1


def _rows(track: Track, made: Path, rounds: int, tell: Callable[[str], None]) -> Iterator[Row]:
    tokenizer = document.tokenizer_of(made)
    text = document.read_tokens(tokenizer, None, sum(LENGTHS) + len(LENGTHS) * TAIL_TOKENS)
    for length in LENGTHS:
        # Each length has a part of the text to itself, so that none finds another's blocks. The
        # tail lies behind the last whole block and the last prefill step: see rig/street.py.
        prompt, text = text[: length + TAIL_TOKENS], text[length + TAIL_TOKENS :]
        times = race.race(track, prompt, rounds, tell)
        yield _warm_row(length, "host", times, times.host)
        yield _warm_row(length, "disk", times, times.disk)
        if times.lmcache:
            yield _peer_row(length, times)
    pairs = load.measure(track, model.SHAPES["demo"].vocabulary, rounds, tell)
    row = report.at_most("vllm.overhead", 100 * pairs.overhead, "%", OVERHEAD_GOAL)
    more: dict[str, object] = {
        "alone_tokens_per_s": pairs.tokens_per_s(pairs.alone),
        "holdfast_tokens_per_s": pairs.tokens_per_s(pairs.behind),
        "rounds": len(pairs.alone),
    }
    yield report.with_more(row, more)


def _warm_row(length: int, source: str, times: Times, warm: list[float]) -> Row:
    gain = race.gain(times.cold, warm)
    row = report.at_least(f"vllm.warm.{length}", gain, "x", GOALS[length, source])
    more: dict[str, object] = {
        "source": source,
        "cold_s": median(times.cold),
        "warm_s": median(warm),
        "warm_min_s": min(warm),
        "rounds": len(warm),
        "missed": times.missed[source],
    }
    return report.with_more(row, more)


def _peer_row(length: int, times: Times) -> Row:
    """How many times sooner than with LMCache, both from host memory."""
    gain = race.gain(times.lmcache, times.host)
    row = report.at_least(f"vllm.lmcache.{length}", gain, "x", AS_FAST)
    more: dict[str, object] = {
        "source": "host",
        "lmcache_s": median(times.lmcache),
        "warm_s": median(times.host),
        "rounds": len(times.lmcache),
    }
    return report.with_more(row, more)
