"""`holdfast bench offload`: vLLM's own offloading with Holdfast as its second tier, beside `fs`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from importlib.util import find_spec
from statistics import median
from typing import Any

from holdfast.limits import MIB
from holdfast.report import Row, at_most, not_measured
from holdfast_bench.cli import measuring
from holdfast_bench.cli.progress import Steps
from holdfast_bench.harness import model
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.measure import offload

ALSO = ("ours_s", "fs_s", "rows", "rounds", "why")
ROWS = 128
QUICK_ROWS = 32
GOAL = 1.0
"""Largest time relative to vLLM's tier `fs`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    measuring.add_rounds_argument(parser, 7, "contexts")
    measuring.add_folder_argument(parser, "both tiers, 4 GiB")
    measuring.add_quick_argument(parser, "a quarter of the rows in a context")


def measure(args: argparse.Namespace, steps: Steps) -> Iterator[Row]:
    """Yield the figures. Takes 3 GiB of memory."""
    if find_spec("vllm") is None:
        yield not_measured("offload.load.host", measuring.NO_VLLM)
        return
    rows = QUICK_ROWS if args.quick else ROWS
    steps.plan(3)
    steps.begin("vLLM's configuration")
    config = offload.engine_config(model.make("tiny"))
    with measuring.scratch(args.folder) as scratch, ExitStack() as stack:
        held = (args.rounds + 2) * rows * offload.ROW_BYTES
        node = stack.enter_context(NodeUnderTest(scratch / "node", max(held, 256 * MIB), 2 * held))
        tiers = {
            offload.FS: offload.fs_tier(scratch / "fs"),
            offload.HOLDFAST: offload.holdfast_tier(node.address),
        }
        engines = {
            name: stack.enter_context(closing(offload.OffloadedEngine(config, tier, rows)))
            for name, tier in tiers.items()
        }
        contexts = range(args.rounds + 1)
        steps.begin("saves, and loads from the node's memory")
        saves, loads = _save_and_load(engines, contexts, rows)
        yield _row("offload.save", saves, rows)
        yield _row("offload.load.host", loads, rows)
        steps.begin("loads from the node's disk")
        node.wait_idle()
        node.restart()
        node.wait_recovered()
        yield _row("offload.load.disk", _load(engines, contexts, rows), rows)


Times = dict[str, list[float]]


def _save_and_load(
    engines: dict[str, Any], contexts: Sequence[int], rows: int
) -> tuple[Times, Times]:
    """Save each context with each tier, and load it back; in turns."""
    saves: Times = {name: [] for name in engines}
    loads: Times = {name: [] for name in engines}
    for context in contexts:
        keys, content = offload.keys_of(context, rows), offload.content_of(context, rows)
        for name, engine in engines.items():
            saves[name].append(engine.save(keys, content))
            engine.forget()
            loads[name].append(engine.load(keys, content))
            engine.forget()
    return saves, loads


def _load(engines: dict[str, Any], contexts: Sequence[int], rows: int) -> Times:
    """Load each context with each tier; in turns."""
    loads: Times = {name: [] for name in engines}
    for context in contexts:
        keys, content = offload.keys_of(context, rows), offload.content_of(context, rows)
        for name, engine in engines.items():
            loads[name].append(engine.load(keys, content))
            engine.forget()
    return loads


def _row(what: str, times: Times, rows: int) -> Row:
    """Return the row of a ratio of medians; the first context is a warm-up."""
    ours_s, fs_s = (median(times[name][1:]) for name in (offload.HOLDFAST, offload.FS))
    more = {"ours_s": ours_s, "fs_s": fs_s, "rows": rows, "rounds": len(times[offload.FS]) - 1}
    return at_most(what, ours_s / fs_s, "x", GOAL, **more)
