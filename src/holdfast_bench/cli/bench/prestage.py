"""`holdfast bench prestage`: contexts that only a pool holds, announced before they are used."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib.util import find_spec

from holdfast.report import Row, not_measured
from holdfast_bench.cli import measuring
from holdfast_bench.cli.progress import Steps
from holdfast_bench.harness import model
from holdfast_bench.measure.prestage import prestage_rows
from holdfast_bench.measure.prestage_engine import PrestageEngineSettings, prestage_engine_rows

ALSO = ("pool_s", "queued_s", "waited_s", "limit_is", "why")
MODEL = "small"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    measuring.add_rounds_argument(parser, 20, "contexts")
    measuring.add_folder_argument(parser, "logs and keys")
    measuring.add_quick_argument(parser, f"{measuring.ROUNDS_MIN} contexts, without an engine")


def measure(args: argparse.Namespace, steps: Steps) -> Iterator[Row]:
    """Yield the figures. Takes 2 GiB of memory."""
    steps.plan(1 if args.quick else 2)
    with measuring.scratch(args.folder) as scratch:
        steps.begin("a node and a target on a limited link")
        yield from prestage_rows(
            scratch / "node", measuring.ROUNDS_MIN if args.quick else args.rounds
        )
        if args.quick:
            return
        steps.begin("a real engine that serves one request at a time")
        if find_spec("vllm") is None:
            yield not_measured("prestage.engine", measuring.NO_VLLM)
            return
        rounds = max(measuring.ROUNDS_MIN, args.rounds // 2)
        settings = PrestageEngineSettings(
            model.make(MODEL), model.SHAPES[MODEL].vocabulary, rounds, steps.update
        )
        yield from prestage_engine_rows(scratch / "engine", settings)
