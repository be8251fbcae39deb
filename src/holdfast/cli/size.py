"""`holdfast size`: how much of each tier, and what bandwidth, a model and its users need."""

from __future__ import annotations

import argparse

from holdfast.cli.options import add_json_argument
from holdfast.rig.report import Report, Row, check_target, write
from holdfast.sim.explain import CLAIMS, Claim, find_claim
from holdfast.sim.model import known_models, load_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what can be asked."""
    parser.add_argument(
        "--explain",
        nargs="?",
        const="",
        metavar="CLAIM",
        help="work out claims in circulation about context memory; all, or one by its name",
    )
    parser.add_argument("--models", action="store_true", help="list the models that are shipped")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Answer what was asked; print it, and write it as JSON if asked."""
    check_target(args.json)
    report = _explain(args) if args.explain is not None else _models(args)
    if args.json:
        write(report, args.json)
    return 0


def _explain(args: argparse.Namespace) -> Report:
    chosen = [find_claim(args.explain)] if args.explain else list(CLAIMS)
    rows = []
    for claim in chosen:
        explained = claim.work_out()
        if args.json != "-":
            print(f"{claim.name}: {claim.says}")
            print("".join(f"    {line}\n" for line in explained.lines), end="")
            print(f"    {explained.verdict}: {explained.because}\n")
        rows += _rows(claim)
    return Report("size", rows)


def _rows(claim: Claim) -> list[Row]:
    explained = claim.work_out()
    more: dict[str, object] = {"verdict": explained.verdict, "because": explained.because}
    return [
        Row(
            what=f"size.explain.{claim.name}",
            value=value,
            unit=name,
            more={"says": claim.says, **more},
        )
        for name, value in explained.figures.items()
    ]


def _models(args: argparse.Namespace) -> Report:
    rows = []
    for name in known_models():
        shape = load_model(name)
        if args.json != "-":
            print(
                f"{name:<52}{shape.kv_bytes_per_token():>10,.0f} B/token"
                f"{shape.fixed_bytes() / 1e6:>10,.1f} MB fixed{shape.context_max:>12,} tokens"
            )
        more: dict[str, object] = {
            "fixed_bytes": shape.fixed_bytes(),
            "weights_bytes": shape.weights_bytes,
            "active_parameters": shape.active_parameters,
            "context_max": shape.context_max,
        }
        row = Row(
            what=f"size.model.{name}", value=shape.kv_bytes_per_token(), unit="B/token", more=more
        )
        rows.append(row)
    return Report("size", rows)
