"""`holdfast bench serve`: a serving load on vLLM alone, with its host tier, LMCache, Holdfast."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from holdfast.report import Row
from holdfast_bench.cli import measuring
from holdfast_bench.cli.progress import Steps
from holdfast_bench.harness import model
from holdfast_bench.scenarios.serving_comparison import (
    LOADS,
    QUICK_LOADS,
    ServeLoads,
    ServeSettings,
    serve_rows,
)

ALSO = ("best_peer", "vllm_s", "native_s", "lmcache_s", "holdfast_s", "prefix_loads", "why")
MODEL = "small"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    measuring.add_duration(parser, "30 minutes on two cores, and 12 GiB of memory")
    measuring.add_rounds_argument(parser, 7, "rounds of warm prompts")
    measuring.add_only_argument(parser, LOADS)
    measuring.add_quick_argument(parser, "shorter contexts, fewer sessions, and a smaller model")
    measuring.add_keep_argument(parser)


def measure(args: argparse.Namespace, steps: Steps) -> Iterator[Row]:
    """Yield the figures."""
    name, loads = ("tiny", QUICK_LOADS) if args.quick else (MODEL, ServeLoads())
    with measuring.engines(args.keep) as folder:
        made = model.make(name)
        settings = ServeSettings(made, model.SHAPES[name], args.rounds, loads, steps.update)
        yield from measuring.print_rows(serve_rows(folder, settings, args.only or LOADS), steps)
