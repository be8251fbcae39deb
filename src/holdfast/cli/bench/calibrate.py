"""`holdfast bench calibrate`: measure this machine, and write the ladder that stands for it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.cli import measuring
from holdfast.errors import ConfigError
from holdfast.limits import BLOCK_TOKENS
from holdfast.rig import model, report
from holdfast.rig.measure import engine
from holdfast.rig.measure.bench import DISK_BYTES, HOST_BYTES, Bench, Course
from holdfast.rig.measure.engine import Engine
from holdfast.rig.report import Row
from holdfast.sim import calibration

if TYPE_CHECKING:
    from rich.status import Status

ALSO = ("tokens", "predicted_s", "measured_s")

LENGTHS = (512, 1024, 2048, 3072)
PREDICTED = 4096
"""Tokens of the demo's context: predicted from the other lengths, then measured."""

QUICK_LENGTHS = (256, 512, 1024)
QUICK_PREDICTED = 2048
WITHIN = 0.25
ROUNDS_MIN = 3
ROUNDS = 7
"""Of seven rounds three may be disturbed: the median is one of the others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("calibrated.yaml"),
        metavar="FILE",
        help="the ladder file to write, for `holdfast sim --ladder` (default: %(default)s)",
    )
    measuring.add_rounds_argument(parser, ROUNDS, "rounds per length and node", ROUNDS_MIN)
    measuring.add_model_argument(parser, "demo")
    measuring.add_quick_argument(parser, "few and short contexts")
    measuring.add_keep_argument(parser)


def measure(args: argparse.Namespace, status: Status) -> Iterator[Row]:
    """Measure, write, and yield what was fitted and what it predicts."""
    if args.out.is_dir() or not args.out.absolute().parent.is_dir():
        raise ConfigError(f"--out {args.out}: is no file in a folder that is there; name another")
    lengths, predicted = (QUICK_LENGTHS, QUICK_PREDICTED) if args.quick else (LENGTHS, PREDICTED)
    with measuring.engines(args.keep) as folder, ExitStack() as stack:
        course = Course(
            model=args.model,
            made=model.make(args.model),
            lengths=(*lengths, predicted),
            cut_lengths=(),
            rounds=args.rounds,
            tell=status.update,
        )
        measured = engine.measure(Bench(stack, folder, course), course)
    data = _ladder(measured, lengths)
    _write(args.out, data)
    status.console.print(f"the ladder is in {args.out}: holdfast sim TRACE --ladder {args.out}")
    yield from _fitted(data)
    yield from _predictions(data, measured, predicted)


def _ladder(measured: Engine, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Fit to all lengths but the one to be predicted."""
    prefill = calibration.prefill_of({n: measured.cold[n] for n in lengths}, measured.tail)
    tiers = {}
    for tier in sorted(measured.warm, key=("host", "disk").index):
        warm = {n: measured.warm[tier][n] for n in lengths}
        tiers[tier] = calibration.tier_of(warm, prefill, measured.token_bytes, measured.tail)
    capacities = {"host": HOST_BYTES, "disk": DISK_BYTES}
    return calibration.ladder_data(prefill, tiers, measured.token_bytes, capacities)


def _write(file: Path, data: dict[str, Any]) -> None:
    import yaml

    machine = report.machine()
    about = f"# Measured by `holdfast bench calibrate` on {machine['cpu']}, {machine['date']}.\n"
    try:
        file.write_text(about + yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {file}: {error.strerror}; choose another file") from error


def _fitted(data: dict[str, Any]) -> Iterator[Row]:
    prefill = data["engine"]["prefill"]
    for name, unit in (("a", "s"), ("b", "s/token"), ("c", "s/token^2")):
        yield Row(what=f"calibrate.prefill.{name}", value=prefill[name], unit=unit)
    for tier in data["tiers"]:
        speed = tier["read_bytes_per_s"] / 1e9
        yield Row(what=f"calibrate.{tier['kind']}.read", value=speed, unit="GB/s")


def _predictions(data: dict[str, Any], measured: Engine, tokens: int) -> Iterator[Row]:
    """Compare the length that was left out of the fits: predicted over measured."""
    kinds = [tier["kind"] for tier in data["tiers"]]
    for tier in kinds:
        cold_s, warm_s = calibration.predict(data, tier, tokens, measured.tail, BLOCK_TOKENS)
        if tier == kinds[0]:
            yield _row("cold", cold_s, measured.cold[tokens], tokens)
        yield _row(tier, warm_s, measured.warm[tier][tokens], tokens)


def _row(what: str, predicted_s: float, measured_s: float, tokens: int) -> Row:
    off = abs(predicted_s / measured_s - 1)
    row = report.at_most(f"calibrate.{what}", 100 * off, "%", 100 * WITHIN)
    more: dict[str, object] = {
        "tokens": tokens,
        "predicted_s": predicted_s,
        "measured_s": measured_s,
    }
    return report.with_more(row, more)
