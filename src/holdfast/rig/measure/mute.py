"""Measure a real engine's time to the first token while no target of its pool says anything.

Two engines of one model: one without Holdfast, one behind a node whose pool was well and then fell
silent. Both compute the same new prompts by turns, so nothing is ever fetched: what differs is
what a dead pool costs.

Others on the machine count: a pair beside which they computed is measured anew, up to twice as
many pairs as were asked for; of those the calmest count.

The pool falls silent several times. The first request that meets each silence is asked between two
requests of the engine alone, and the median of the falls counts: a moment of a busy machine is as
long as what is looked for. The rounds behind it are shared out among the falls.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

from holdfast.errors import HoldfastError
from holdfast.limits import BLOCK_TOKENS
from holdfast.rig.ask import complete
from holdfast.rig.calm import DISTURBED, Others, calm
from holdfast.rig.network import open_network
from holdfast.rig.node import Node
from holdfast.rig.pool import Pool, Silence
from holdfast.rig.process import wait_until
from holdfast.rig.report import Row, at_most, with_more
from holdfast.rig.server import (
    COVER_DEADLINE_MS,
    SPIN_S,
    Engine,
    EngineOptions,
    holdfast_kv_transfer,
    wait_all_ready,
)

TARGETS = 4
PROMPT_TOKENS = 2048
SHORT_TOKENS = BLOCK_TOKENS + 16
TTFT_GOAL = 1.05
OPEN_S = 30.0
RECOVERED_S = 90.0
FALLS = 3
AGAIN = 2
"""Times as many pairs as were asked for, at most, on a machine that others disturb."""

QUARTERS = 4
SEED = 20_26


class Course(NamedTuple):
    """What is measured: a made model's folder and vocabulary, rounds, and whom to tell of it."""

    made: Path
    vocabulary: int
    rounds: int
    tell: Callable[[str], None]


class Engines(NamedTuple):
    """One without Holdfast, and one behind a node with a pool."""

    alone: Engine
    behind: Engine


class Pair(NamedTuple):
    """Seconds to the first token of one prompt, without Holdfast and behind the pool."""

    alone_s: float
    behind_s: float


class Fall(NamedTuple):
    """One silence: the first request's seconds, how much later that was than alone, the rounds.

    `disturbed`: pairs that were left out.
    """

    first_s: float
    late_s: float
    pairs: Sequence[Pair]
    disturbed: int


class Bench:
    """The engines, the node and its pool; prompts that nobody has seen."""

    def __init__(self, engines: Engines, node: Node, pool: Pool, course: Course) -> None:
        self._engines, self._node, self._pool, self._course = engines, node, pool, course
        self._chance = random.Random(SEED)  # noqa: S311  # prompts, not secrets
        self._others = Others()

    def rows(self) -> Iterator[Row]:
        """Warm up, then let the targets fall silent in every way that there is."""
        before = sum(self._pool.blocks().values())
        self._course.tell("both engines warm up, and the pool is written to")
        for engine in self._engines:
            self._ttft_s(engine, self._prompt())
        self._pool.wait_holding(before + PROMPT_TOKENS // BLOCK_TOKENS)
        for silence in self._pool.silences():
            falls = [self._fall(silence, number) for number in range(FALLS)]
            yield _first_row(silence, falls)
            yield _ttft_row(silence, falls)

    def _fall(self, silence: Silence, number: int) -> Fall:
        """Let the targets fall silent once."""
        course, name = self._course, f"all targets {silence}, {number + 1} of {FALLS}"
        wait_until(self._node.process, self._all_closed, RECOVERED_S, "sure of its pool")
        rounds = course.rounds // FALLS + (number < course.rounds % FALLS)
        with self._pool.silent(silence):
            course.tell(f"{name}: the first request that meets them")
            prompt = self._prompt()
            before_s = self._ttft_s(self._engines.alone, prompt)
            first_s = self._ttft_s(self._engines.behind, prompt)
            after_s = self._ttft_s(self._engines.alone, self._prompt())
            wait_until(self._node.process, self._all_open, OPEN_S, "sure that its pool is silent")
            pairs = self._pairs(name, number, rounds)
        late_s = first_s - (before_s + after_s) / 2
        kept = calm(pairs, rounds)
        return Fall(first_s, late_s, kept, len(pairs) - len(kept))

    def _pairs(self, name: str, number: int, rounds: int) -> list[tuple[Pair, float]]:
        """Return pairs, and what share of the machine others had meanwhile."""
        found: list[tuple[Pair, float]] = []
        left = rounds
        while left and len(found) < AGAIN * rounds:
            self._course.tell(f"{name}: round {rounds - left + 1} of {rounds}")
            prompt, times = self._prompt(), {}
            self._others.share()
            for which in (0, 1) if (number + len(found)) % 2 == 0 else (1, 0):
                times[which] = self._ttft_s(self._engines[which], prompt)
            others = self._others.share()
            found.append((Pair(times[0], times[1]), others))
            left -= others <= DISTURBED
        return found

    def _ttft_s(self, engine: Engine, prompt: Sequence[int]) -> float:
        """Ask for one token; the other engine's worker has stopped spinning by then."""
        time.sleep(SPIN_S)
        return complete(engine, prompt, 1).ttft_s

    def _prompt(self, tokens: int = PROMPT_TOKENS) -> list[int]:
        return [self._chance.randrange(2, self._course.vocabulary) for _ in range(tokens)]

    def _asked(self) -> int:
        """Return how many members users' requests still go to; who is slow may be left out too."""
        members = self._node.members()
        return sum(each["phase"] == "closed" and not each["ejected"] for each in members)

    def _all_open(self) -> bool:
        """Send short prompts, each of which meets one target, until none is asked any more."""
        if self._asked():
            complete(self._engines.behind, self._prompt(SHORT_TOKENS), 1)
        return not self._asked()

    def _all_closed(self) -> bool:
        return self._asked() == len(self._node.members())


def mute_rows(folder: Path, course: Course) -> Iterator[Row]:
    """Start everything and measure; processes and network end with the iteration."""
    with ExitStack() as stack:
        network = stack.enter_context(open_network(folder / "network.log"))
        pool = Pool(stack, folder, network)
        course.tell(f"{TARGETS} targets, a host and two engines start, on {network.kind}")
        pool.start_targets(TARGETS)
        node = pool.start_host("host")
        engines = Engines(
            _start(stack, folder, course, "alone", {}),
            _start(stack, folder, course, "behind", holdfast_kv_transfer(node.address)),
        )
        wait_all_ready(engines)
        yield from Bench(engines, node, pool, course).rows()


def _start(
    stack: ExitStack, folder: Path, course: Course, name: str, flag: dict[str, object]
) -> Engine:
    options = EngineOptions(
        model=course.made, kv_transfer=flag, model_tokens_max=PROMPT_TOKENS + BLOCK_TOKENS
    )
    engine = Engine(name, options, folder / f"{name}.log")
    stack.enter_context(engine.process)
    return engine


def _first_row(silence: Silence, falls: Sequence[Fall]) -> Row:
    late_s = median(fall.late_s for fall in falls)
    row = at_most(f"pool.{silence}.first", late_s, "s late", COVER_DEADLINE_MS / 1000)
    more: dict[str, object] = {
        "first_s": median(fall.first_s for fall in falls),
        "worst_s": max(fall.late_s for fall in falls),
        "falls": len(falls),
    }
    return with_more(row, more)


def _ttft_row(silence: Silence, falls: Sequence[Fall]) -> Row:
    pairs = [pair for fall in falls for pair in fall.pairs]
    if len(pairs) < QUARTERS:
        raise HoldfastError(f"{len(pairs)} rounds were measured, {QUARTERS} must; raise --rounds")
    ratios = [pair.behind_s / pair.alone_s for pair in pairs]
    row = at_most(f"pool.{silence}.ttft", median(ratios), "x without", TTFT_GOAL)
    more: dict[str, object] = {
        "alone_s": median(pair.alone_s for pair in pairs),
        "behind_s": median(pair.behind_s for pair in pairs),
        "quartiles": [quantiles(ratios, n=QUARTERS)[at] for at in (0, 2)],
        "worst": max(ratios),
        "rounds": len(pairs),
        "disturbed": sum(fall.disturbed for fall in falls),
    }
    return with_more(row, more)
