"""`holdfast bench calibrate`: measure this machine, and write its ladder file for the simulator."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from holdfast import report
from holdfast.cli.options import add_output_argument
from holdfast.errors import ConfigError
from holdfast.report import Row
from holdfast_bench.cli import measuring
from holdfast_bench.cli.progress import Steps
from holdfast_bench.harness import model
from holdfast_bench.measure import calibration, engine
from holdfast_bench.measure.engine import EngineMeasurement
from holdfast_bench.measure.engine_pair import (
    DISK_BYTES,
    HOST_BYTES,
    TAIL_TOKENS,
    EnginePair,
    EnginePairSettings,
)

ALSO = ("tokens", "predicted_s", "measured_s")

LENGTHS = (512, 1024, 2048, 3072)
PREDICTED = 4096
"""Tokens of the context whose time is predicted from the other lengths, and measured."""

QUICK_LENGTHS = (256, 512, 1024)
QUICK_PREDICTED = 2048
WITHIN = 0.25
ROUNDS_MIN = 3
ROUNDS = 7
"""The median of seven rounds tolerates three disturbed ones."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    about = "the ladder file to write, for `holdfast sim --ladder` (default: %(default)s)"
    add_output_argument(parser, "--out", about)
    parser.set_defaults(out="calibrated.yaml")
    measuring.add_rounds_argument(parser, ROUNDS, "rounds per length and node", ROUNDS_MIN)
    measuring.add_model_argument(parser, "demo")
    measuring.add_quick_argument(parser, "few and short contexts")
    measuring.add_keep_argument(parser)


def measure(args: argparse.Namespace, steps: Steps) -> Iterator[Row]:
    """Measure, write the ladder file, and yield its fitted values and its predictions."""
    if args.out == "-":
        raise ConfigError("--out -: progress and results are printed there; name a file")
    lengths, predicted = (QUICK_LENGTHS, QUICK_PREDICTED) if args.quick else (LENGTHS, PREDICTED)
    with measuring.engines(args.keep) as folder, ExitStack() as stack:
        settings = EnginePairSettings(
            model=args.model,
            made=model.make(args.model),
            lengths=(*lengths, predicted),
            cut_lengths=(),
            rounds=args.rounds,
            tell=steps.begin,
        )
        steps.plan(len(settings.lengths) * args.rounds + 1)  # of the first node
        measured = engine.measure(EnginePair(stack, folder, settings), settings)
    data = _ladder(measured, lengths)
    _write(args.out, data)
    steps.console.print(f"the ladder is in {args.out}: holdfast sim TRACE --ladder {args.out}")
    yield from _fitted(data)
    yield from _predictions(data, measured, predicted)


def _ladder(measured: EngineMeasurement, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Return the ladder fitted to `lengths`, which exclude the predicted one."""
    prefill = calibration.prefill_of({n: measured.cold[n] for n in lengths}, TAIL_TOKENS)
    tiers = {}
    for tier in sorted(measured.warm, key=("host", "disk").index):
        warm = {n: measured.warm[tier][n] for n in lengths}
        tiers[tier] = calibration.tier_of(warm, prefill, measured.token_bytes, TAIL_TOKENS)
    capacities = {"host": HOST_BYTES, "disk": DISK_BYTES}
    return calibration.ladder_data(prefill, tiers, measured.token_bytes, capacities)


def _write(file: str, data: dict[str, Any]) -> None:
    import yaml

    machine = report.machine()
    about = f"# Measured by `holdfast bench calibrate` on {machine['cpu']}, {machine['date']}.\n"
    report.write_text("--out", file, about + yaml.safe_dump(data, sort_keys=False))


def _fitted(data: dict[str, Any]) -> Iterator[Row]:
    prefill = data["engine"]["prefill"]
    for name, unit in (("a", "s"), ("b", "s/token"), ("c", "s/token^2")):
        yield Row(what=f"calibrate.prefill.{name}", value=prefill[name], unit=unit)
    for tier in data["tiers"]:
        speed = tier["read_bytes_per_s"] / 1e9
        yield Row(what=f"calibrate.{tier['kind']}.read", value=speed, unit="GB/s")


def _predictions(data: dict[str, Any], measured: EngineMeasurement, tokens: int) -> Iterator[Row]:
    """Yield the prediction error for the length that the fits exclude."""
    kinds = [tier["kind"] for tier in data["tiers"]]
    for tier in kinds:
        cold_s, warm_s = calibration.predict(data, tier, tokens, TAIL_TOKENS)
        if tier == kinds[0]:
            yield _row("cold", cold_s, measured.cold[tokens], tokens)
        yield _row(tier, warm_s, measured.warm[tier][tokens], tokens)


def _row(what: str, predicted_s: float, measured_s: float, tokens: int) -> Row:
    off = abs(predicted_s / measured_s - 1)
    seconds = {"predicted_s": predicted_s, "measured_s": measured_s}
    return report.at_most(
        f"calibrate.{what}", 100 * off, "%", 100 * WITHIN, tokens=tokens, **seconds
    )
