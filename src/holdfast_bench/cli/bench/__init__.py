"""`holdfast bench`: measure this machine, and Holdfast as a share of what it can do."""

from __future__ import annotations

import argparse
from importlib import import_module

from holdfast import report
from holdfast.cli import EXIT_CODES, OptionParser
from holdfast.cli.options import add_json_argument
from holdfast.report import Report, Row
from holdfast_bench.cli.measuring import finish, rows_kept
from holdfast_bench.cli.progress import progress

SUBJECTS = {
    "quota": "a domain's fetches from a disk, with and without a flood by another domain",
    "policies": "what eviction policies hit on public traces, beside the oracle's bound",
    "tiers": "host and disk tier, names, index and recovery, each beside its plain limit",
    "metrics": "what counting a request costs, and a scrape every second during fetches",
    "seal": "what sealing costs: a core beside plain AES-256-GCM, a disk beside one not sealed",
    "convert": "pages converted to portable blocks and back, beside plain copies",
    "codec": "how far and how fast KV shrinks, beside a copy and other compressors",
    "pool": "a target over loopback TCP, beside plain sockets, with and without TLS",
    "prestage": "contexts of a pool that are announced before their use, and while a request waits",
    "movement": "moves between tiers, beside source and target alone, and beside reads",
    "files": "segments in a shared folder, beside plain reads and writes there",
    "object": "an object tier on a real store, beside its client without us (needs obstore)",
    "gpu": "blocks between a node's memory and an engine's pages on a GPU (needs one)",
    "plan": "a real engine: plans against recomputing, and against every other cut",
    "calibrate": "this machine's engine and tiers, as a ladder for `holdfast sim`",
    "vllm": "a real engine: time to first token cold and warm, and the cost without reuse",
    "kinds": "a real engine with models of each kind of layers: first token and bytes stored",
    "offload": "vLLM's own offloading with Holdfast as its second tier, beside vLLM's tier `fs`",
    "sglang": "SGLang on the CPU: first token with Holdfast as its storage, and with its own",
    "serve": "a real engine under load: sessions and crowds, beside vLLM's host tier and LMCache",
    "saves": "a real engine with each `save` option: bytes saved, and tokens computed",
    "engines": "answers behind contexts of another engine, beside an engine's own",
    "transformers": "first token of transformers: computed, missed in a store, and fetched",
    "sim": "the simulator: its speed through four tiers, and how near it is to published figures",
    "traces": "published traffic: exact LRU curves, oracle bounds, retention, and their speed",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subjects; each one's own options are read when it is chosen."""
    width = max(map(len, SUBJECTS)) + 2
    lines = "\n".join(f"  {name:<{width}}{about}" for name, about in SUBJECTS.items())
    about = f"subjects:\n{lines}\n\n`holdfast bench SUBJECT --help` lists its options."
    parser.epilog = f"{about}\n\n{parser.epilog}" if parser.epilog else about
    parser.add_argument("subject", choices=tuple(SUBJECTS), metavar="SUBJECT")
    parser.add_argument("options", nargs=argparse.REMAINDER, metavar="...")


def run(args: argparse.Namespace) -> int:
    """Load the subject, parse its options and measure; return 0 if every goal was met, else 1."""
    subject = import_module(f"holdfast_bench.cli.bench.{args.subject}")
    parser = OptionParser(
        prog=f"holdfast bench {args.subject}", description=SUBJECTS[args.subject], epilog=EXIT_CODES
    )
    subject.add_arguments(parser)
    add_json_argument(parser)
    options = parser.parse(args.options)
    console = report.console(options.json)
    rows: list[Row] = []
    found = Report(f"bench {args.subject}", rows)
    with (
        rows_kept(found, console, options.json, subject.ALSO),
        progress(console, "set-up ...") as steps,
    ):
        for row in subject.measure(options, steps):
            rows.append(row)  # noqa: PERF402  # one by one, because the run may be interrupted
    return finish(found, options.json)
