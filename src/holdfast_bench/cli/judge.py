"""`holdfast judge`: judge a lossy codec by a model and prompts, and record the result.

Exits with 1 if the codec does not pass, or if fewer prompts or tokens were judged than a gate
record needs.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from datetime import UTC, datetime
from pathlib import Path

from holdfast import report
from holdfast.assemble.domains import domain_secret
from holdfast.cli.options import add_config_arguments, load_config
from holdfast.cli.progress import work_progress
from holdfast.codec.gate import (
    CODED_TOKENS_MIN,
    CONTROLS_MAX,
    JUDGED_TOKENS_MIN,
    PROMPTS_MIN,
    TOP_TOKEN_LOSS_MAX,
    Difference,
    GateRecord,
    excesses,
    gate_file,
    objections,
    signed,
    write_gate_record,
)
from holdfast.codec.int8 import NAME, VERSION, coded_bytes
from holdfast.config import Config
from holdfast.errors import ConfigError
from holdfast.limits import BLOCK_TOKENS
from holdfast.regular_file import replace_file
from holdfast.report import Report, Row, at_least, at_most
from holdfast_bench.measure.quantisation import (
    Coder,
    Int8Coder,
    JudgedModel,
    Lengths,
    comparisons,
    judge,
    read_prompts,
)

_FINGERPRINT = re.compile(r"[0-9a-f]{32}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("codec", choices=[NAME], help="the codec to judge")
    parser.add_argument(
        "--model", type=Path, required=True, metavar="FOLDER", help="the model, for transformers"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        required=True,
        metavar="FILE",
        help="your prompts: FILE.jsonl with one a line (a string, or an object with prompt or "
        "text), or one long text",
    )
    parser.add_argument(
        "--fingerprint",
        metavar="HEX",
        help="the coded blocks that a record is made for, as the node's log names them (default: "
        "make no record)",
    )
    parser.add_argument(
        "--model-digest",
        default="",
        metavar="TEXT",
        help="what the blocks' fingerprint says of the model, if that does not come from its files "
        "(default: the digest of the folder's safetensors files and config.json)",
    )
    parser.add_argument(
        "--domain",
        default="default",
        metavar="NAME",
        help="the domain whose secret signs the record (default: %(default)s)",
    )
    for option, least, about in (
        ("--count", PROMPTS_MIN, "prompts"),
        ("--coded-tokens", CODED_TOKENS_MIN, "tokens that are coded, of each prompt"),
        ("--judged-tokens", JUDGED_TOKENS_MIN, "tokens that are judged, of each prompt"),
    ):
        parser.add_argument(
            option,
            type=int,
            default=least,
            metavar="N",
            help=f"{about} (default: %(default)s; with fewer a record permits nothing)",
        )
    parser.add_argument(
        "--block-tokens",
        type=int,
        default=BLOCK_TOKENS,
        metavar="N",
        help="tokens of a block, as the engine's (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype", default="", help="dtype of keys and values (default: that of the weights)"
    )
    parser.add_argument(
        "--control",
        choices=("float32", "batch"),
        default="float32",
        help="the arithmetic whose noise is the unit: the model in fp32, for which both copies are "
        "in memory, or in batches of another shape (default: %(default)s)",
    )
    parser.add_argument(
        "--device", default="cpu", help="device for torch, such as cuda (default: %(default)s)"
    )
    parser.add_argument(
        "--beside",
        action="store_true",
        help="judge int6, fp8 and int4 too, which Holdfast does not store: to see the gate refuse",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="write the record to this file (default: to the node's folder of gate records)",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the figures as JSON; - for standard output"
    )
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Judge, show the figures, write the record."""
    _check(args)
    config = load_config(args) if args.fingerprint else None
    secret = domain_secret(config, args.domain) if config else b""
    target = _target(args, config)
    lengths = Lengths(args.count, args.coded_tokens, args.judged_tokens)
    model = JudgedModel(args.model, args.dtype, args.control, args.device)
    prompts = read_prompts(args.prompts, model, lengths)
    layout = model.layout(model.context(prompts[0][: lengths.coded]), args.block_tokens)
    coder = Int8Coder(layout)
    coders: dict[str, Coder] = {NAME: coder}
    if args.beside:
        coders |= comparisons(args.block_tokens)
    with work_progress("prompts") as show:
        control, coded = judge(
            model, prompts, lengths, coders, lambda done: show(done, len(prompts), "judged")
        )
    record = GateRecord(
        fingerprint=args.fingerprint or "",
        codec=NAME,
        version=VERSION,
        layout=layout,
        model=args.model_digest or (model.digest(layout) if args.fingerprint else ""),
        engine=model.engine,
        control=args.control,
        prompts=lengths.prompts,
        coded_tokens=lengths.coded,
        judged_tokens=lengths.judged,
        exact_blocks=coder.exact_blocks / coder.blocks,
        control_difference=control,
        coded_difference=coded[NAME],
        made=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    found = Report("judge", _rows(record, coded))
    if args.json:
        report.write(found, args.json)
    if args.json != "-":
        _print(record, coded)
    why = objections(record)
    if target:
        replace_file(target, write_gate_record(signed(record, secret)))
        print(f"record: {target}", file=sys.stderr)
    for reason in why:
        print(f"does not pass: {reason}", file=sys.stderr)
    return 1 if why else 0


def _check(args: argparse.Namespace) -> None:
    for option in ("count", "coded_tokens", "judged_tokens", "block_tokens"):
        if getattr(args, option) < 1:
            raise ConfigError(
                f"--{option.replace('_', '-')}: {getattr(args, option)} is not at least 1; raise it"
            )
    if args.coded_tokens % args.block_tokens:
        raise ConfigError(
            f"--coded-tokens: {args.coded_tokens} does not fill blocks of {args.block_tokens} "
            f"tokens; write {-(-args.coded_tokens // args.block_tokens) * args.block_tokens}"
        )
    if args.fingerprint and not _FINGERPRINT.fullmatch(args.fingerprint):
        raise ConfigError(
            f"--fingerprint: {args.fingerprint!r} is not 32 hex digits; copy it from the log of "
            "the node that asks for a record"
        )
    if args.out and not args.fingerprint:
        raise ConfigError("--out: a record names blocks; give their --fingerprint")
    for option in ("json", "out"):
        if target := getattr(args, option):
            report.check_target(f"--{option}", target)


def _target(args: argparse.Namespace, config: Config | None) -> Path | None:
    """Return the file of the record; None if none is made."""
    if config is None:
        return None
    if args.out:
        return Path(args.out)
    if not config.gates_folder:
        raise ConfigError(
            "--fingerprint: the configuration names no folder for gate records; set gates, or a "
            "disk tier, or give --out FILE"
        )
    folder = Path(config.gates_folder)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"gates: {str(folder)!r} cannot be made: {error.strerror}") from error
    target = gate_file(folder, args.fingerprint)
    report.check_target("gates", str(target))
    return target


def _rows(record: GateRecord, coded: dict[str, Difference]) -> list[Row]:
    control, layout = record.control_difference, record.layout
    rows = [
        at_most(f"{NAME}.stored", coded_bytes(layout) / layout.raw_bytes, "of raw"),
        at_most(f"{NAME}.exact_blocks", record.exact_blocks, "of blocks"),
        at_most("control.kl", control.kl, "nats", control=record.control, engine=record.engine),
        at_most("control.kl_p99", control.kl_p99, "nats"),
        at_least("control.same_top", control.same_top, "of positions"),
        at_most("control.nats_lost", control.nats_lost, "nats"),
        at_least("exact.score", control.score, "of tokens", error=control.score_error),
    ]
    for name, found in coded.items():
        for what, value, unit in (
            ("kl", found.kl, control.kl),
            ("kl_p99", found.kl_p99, control.kl_p99),
        ):
            ratio = _times(value, unit)
            rows.append(
                Row(
                    what=f"{name}.{what}",
                    value=value,
                    unit="nats",
                    limit=unit,
                    ratio=ratio,
                    goal=CONTROLS_MAX,
                    ok=ratio <= CONTROLS_MAX,
                )
            )
        rows += [
            at_least(
                f"{name}.same_top",
                found.same_top,
                "of positions",
                control.same_top - TOP_TOKEN_LOSS_MAX,
            ),
            at_most(f"{name}.nats_lost", found.nats_lost, "nats"),
            at_least(
                f"{name}.score", found.score, "of tokens", control.score - control.score_error
            ),
        ]
    return rows


def _times(value: float, unit: float) -> float:
    """Return a figure as a multiple of the control's; few positions may differ, so p99 may be 0."""
    if unit:
        return value / unit
    return math.inf if value else 1.0


def _print(record: GateRecord, coded: dict[str, Difference]) -> None:
    control, layout = record.control_difference, record.layout
    print(
        f"{record.prompts} prompts, {record.coded_tokens} tokens coded and {record.judged_tokens} "
        f"judged of each; {record.engine}\n"
        f"{NAME}: {coded_bytes(layout) / layout.raw_bytes:.3f} of the bytes, "
        f"{record.exact_blocks:.1%} of the blocks left exact\n"
    )
    print(
        f"{'':24}{'KL':>10}{'x control':>11}{'p99':>10}{'x control':>11}{'top token':>11}"
        f"{'score':>9}"
    )
    for name, found in {f"control ({record.control})": control, **coded}.items():
        times = _times(found.kl, control.kl), _times(found.kl_p99, control.kl_p99)
        verdict = "" if found is control else "fails" if excesses(found, control) else "passes"
        print(
            f"{name:24}{found.kl:10.2e}{times[0]:11.2f}{found.kl_p99:10.2e}{times[1]:11.2f}"
            f"{found.same_top:11.2%}{found.score:9.2%}  {verdict}"
        )
