"""`holdfast bench policies`: what eviction policies hit on public traces, beside the oracle."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from holdfast import report
from holdfast.errors import ConfigError
from holdfast.policy.choice import BASELINE, DEFAULT, POLICIES
from holdfast.report import Row
from holdfast.sim.belady import belady
from holdfast.sim.formats.load import load
from holdfast.sim.formats.rows import Reading
from holdfast.sim.replay import RUN_BLOCKS, replay, returns
from holdfast.sim.trace import Trace
from holdfast_bench.cli import measuring
from holdfast_bench.cli.progress import Steps

ALSO = ("gap_closed",)

TOLERANCE = 0.005
GAP_GOAL = 0.5
UNIT = "token hit"

_COUNTED = {False: 1, True: 8}
"""Blocks that orders by count take as one, by whether the trace is heavy: 8 moves them by .0003."""


class ReplayedTrace(NamedTuple):
    """A trace and the stores to replay it through; `known` is leaf-first LRU and the bound there.

    Known figures were computed independently of this code, from the raw files.
    """

    name: str
    file: str
    known: dict[int, tuple[float, float]]
    agents: bool
    window_s: float = 0.0
    heavy: bool = False


SUBJECTS = (
    ReplayedTrace(
        "conversation",
        "mooncake_conversation_trace.jsonl.gz",
        {
            1_000: (0.045, 0.194),
            5_860: (0.139, 0.360),
            10_000: (0.216, 0.374),
            50_000: (0.362, 0.374),
        },
        agents=False,
    ),
    ReplayedTrace(
        "synthetic",
        "mooncake_synthetic_trace.jsonl.gz",
        {5_860: (0.315, 0.560), 19_532: (0.577, 0.651)},
        agents=False,
    ),
    ReplayedTrace(
        "tau-bench",
        "taubench_gpt4o_airline_blk256B.jsonl.gz",
        {30: (0.611, 0.611), 60: (0.859, 0.859)},
        agents=True,
    ),
    ReplayedTrace(
        "claude-code-8h",
        "agentic_claudecode_dev.jsonl.gz",
        {
            12_500: (0.329, 0.635),
            25_000: (0.661, 0.824),
            50_000: (0.884, 0.931),
            100_000: (0.946, 0.960),
        },
        agents=True,
        window_s=8 * 3600.0,
        heavy=True,
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    parser.add_argument(
        "--traces",
        type=Path,
        default=Path("traces"),
        metavar="FOLDER",
        help="where the traces of Holdfast's source tree lie (default: %(default)s)",
    )
    measuring.add_quick_argument(parser, "leave out the trace of 42 million block accesses")


def measure(args: argparse.Namespace, steps: Steps) -> Iterator[Row]:
    """Yield the figures of every trace, replayed."""
    subjects = [each for each in SUBJECTS if not (args.quick and each.heavy)]
    for subject in subjects:
        if not (args.traces / subject.file).is_file():
            raise ConfigError(
                f"--traces: {str(args.traces)!r} has no {subject.file}; "
                "name the folder traces of Holdfast's source tree"
            )
    steps.plan(len(subjects))
    for subject in subjects:
        steps.begin(f"reading {subject.file}")
        trace = load(args.traces / subject.file, Reading(window_s=subject.window_s))
        for row in _rows(subject, trace):
            steps.update(row.what)
            yield row


def _rows(subject: ReplayedTrace, trace: Trace) -> Iterator[Row]:
    hints = returns(trace) if subject.agents else None
    bounds = belady(trace, list(subject.known))
    for bound, (capacity, known) in zip(bounds, subject.known.items(), strict=True):
        at = f"{subject.name}.{capacity}"
        yield _known(f"{at}.belady", bound.token_hit, known[1])
        hits: dict[str, float] = {}
        for name, make in POLICIES.items():
            runs = RUN_BLOCKS if name in (BASELINE, DEFAULT) else _COUNTED[subject.heavy]
            hits[name] = replay(trace, capacity, make(), run_blocks=runs).token_hit
            yield _row(f"{at}.{name}", name, hits, bound.token_hit, known[0])
        if hints is not None:
            hinted = replay(trace, capacity, POLICIES[DEFAULT](), hints).token_hit
            yield _hinted(at, hinted, hits[BASELINE], bound.token_hit)


def _row(what: str, name: str, hits: dict[str, float], bound: float, known: float) -> Row:
    """Make the row of a policy; the baseline must be what is known, the default as good as it."""
    if name == BASELINE:
        return _known(what, hits[name], known)
    goal = hits[BASELINE] - TOLERANCE if name == DEFAULT else None
    return report.at_least(what, hits[name], UNIT, goal, bound=bound, leaf_lru=hits[BASELINE])


def _known(what: str, value: float, known: float) -> Row:
    """Make the row of a figure that is known from elsewhere, to three digits."""
    ok = abs(value - known) <= TOLERANCE
    return Row(what=what, value=value, unit=UNIT, ok=ok, more={"known": known})


def _hinted(at: str, hit: float, baseline: float, bound: float) -> Row:
    """Make the row of the default policy with hints: how much of the gap to the bound it closes."""
    gap = bound - baseline
    more = {"bound": bound, "leaf_lru": baseline}
    goal = baseline - TOLERANCE
    if gap > TOLERANCE:
        goal = baseline + GAP_GOAL * gap
        more["gap_closed"] = (hit - baseline) / gap
    return report.at_least(f"{at}.{DEFAULT}.hinted", hit, UNIT, goal, **more)
