"""Measure plans on a real engine: against recomputing, and against every other cut.

The best cut is found by trying every one; then it is measured again, with contexts of its own, and
that is what the plan is held against. The smallest of several medians is small by luck, too: a plan
that takes that very cut would come out slower than it. Half of the second measurement is made
before the plan's and half behind it, so that a machine that becomes slower, or quicker, is not in
the comparison; and the plan's is made in two halves as well, each behind a node that has just
started: contexts get slower once the memory is used up that it brought in ahead.

Against recomputing, like is compared with like: an engine that is asked again at once still spins
from the time before, which costs a short context a tenth. So of two contexts each engine is asked
for one behind the other engine, and for one behind itself. Contexts beside which others of the
machine computed are left out. Two engines that do the very same differ by a twentieth for as long
as they live: where the goal is no further off than that, several couples are asked.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple, TypeAlias

from holdfast.errors import HoldfastError
from holdfast.limits import BLOCK_TOKENS, GIB, MIB
from holdfast.rig.ask import ask
from holdfast.rig.calm import Others, calm
from holdfast.rig.model import SHAPES
from holdfast.rig.node import Node
from holdfast.rig.process import wait_until
from holdfast.rig.report import Row, at_most, with_more
from holdfast.rig.server import (
    Engine,
    EngineOptions,
    Rest,
    holdfast_kv_transfer,
    wait_all_ready,
)

TAIL_TOKENS = 16
PLACES = ("host", "disk", "slow")
RECOMPUTE_GOAL = 1.05
CUT_GOAL = 1.10
CUTS = (0.0, 0.25, 0.5, 0.75, 1.0)
SLOW = 0.5
"""How fast the slow disk is read, as a share of what would make fetching as quick as computing."""

TEACHING = (128, 256, 512, 1024, 2048)
MEETING = (256, 512, 1024, 2048)
CLEARED_S = 10.0
CONNECTED_S = 30.0
SAVED_S = (10.0, 20.0)
"""How long contexts may take to the disk after an engine was asked, and was asked again."""

SHORT_TOKENS = 512
SHORT_TIMES = 3
"""A short context takes tens of milliseconds, as a disturbance does: it gets more rounds."""

SHORTEST_TOKENS = 128
SHORTEST_TIMES = 8
"""Of so short a context ten pairs on a quiet machine gave ratios from 0.74 to 1.27: the median of
15 would say by chance whether it is above 1.05."""

LONG_TOKENS = 4096
LONG_ROUNDS = 4
"""A long context takes seconds, of which a disturbance is a smaller share: fewer rounds will do."""

SLOW_COUPLES = 3
"""Behind the slow disk both engines compute, and the goal is near: so many couples are asked."""

CUT_ROUNDS_MIN = 4
"""Of each cut that is tried."""

BESIDE_ROUNDS_MIN = 10
"""Of the plan and of the best cut beside it: medians of four of the very same cut were a seventh
apart."""

Sample: TypeAlias = tuple[tuple[float, int], float]
"""Seconds to the first token and tokens fetched; the share of the machine others had meanwhile."""

HOST_BYTES = 3 * GIB
DISK_BYTES = 8 * GIB


class Held(NamedTuple):
    """A context, and how many leading blocks of it are held."""

    prompt: Sequence[int]
    blocks: int


class Pair(NamedTuple):
    """Seconds to the first token as planned and computed, and tokens fetched for the former."""

    planned_s: float
    computed_s: float
    fetched: int


Round: TypeAlias = tuple[Pair, float]
"""A pair, and the share of the machine others had meanwhile."""


class Course(NamedTuple):
    """What is measured: a model's name and folder, tokens of the contexts, rounds of each."""

    model: str
    made: Path
    lengths: Sequence[int]
    cut_lengths: Sequence[int]
    rounds: int
    tell: Callable[[str], None]

    def rounds_at(self, tokens: int) -> int:
        """Return how many rounds a context of this length gets; an even number."""
        if tokens <= SHORT_TOKENS:
            times = SHORTEST_TIMES if tokens <= SHORTEST_TOKENS else SHORT_TIMES
            rounds = times * self.rounds
        else:
            rounds = self.rounds if tokens < LONG_TOKENS else min(self.rounds, LONG_ROUNDS)
        return rounds + rounds % 2


class Bench:
    """Two engines, one alone and one behind a node that is started anew as it is needed."""

    def __init__(self, stack: ExitStack, folder: Path, course: Course) -> None:
        self._stack = stack
        self._folder = folder
        self._course = course
        self._chance = random.Random(folder.name)  # noqa: S311  # texts that nobody has seen
        self._slow_bytes_per_s = 0
        self._rest = Rest()
        self.node = self._start("disk", "best")
        stack.callback(self._stop)
        self.alone, self.behind = self._start_engines()
        self.probe = self.text(BLOCK_TOKENS)
        self.teach()

    def text(self, tokens: int) -> list[int]:
        """Return a prompt of so many tokens and a tail, seen by nobody before."""
        vocabulary = range(16, SHAPES[self._course.model].vocabulary - 16)
        return self._chance.choices(vocabulary, k=tokens + TAIL_TOKENS)

    def ttft_s(self, engine: Engine, prompt: Sequence[int]) -> tuple[float, int]:
        """Ask without the engine's own cache: seconds to the first token, tokens fetched."""
        self._rest.before(engine)
        engine.reset_prefix_cache()
        asked = ask(engine, prompt, 1)
        return asked.answer.ttft_s, asked.tokens.fetched_total

    def rest(self) -> None:
        """Return when neither engine spins from the time before."""
        self._rest.everywhere()

    def save(self, prompts: Sequence[Sequence[int]]) -> None:
        """Compute these behind the node, until it has them on disk.

        An engine gives a block up that the node has no room for in time: it is asked once more.
        """
        blocks = self.node.blocks_on_disk() + sum(len(each) // BLOCK_TOKENS for each in prompts)
        for within_s in SAVED_S:
            for prompt in prompts:
                self.ttft_s(self.behind, prompt)
            with suppress(HoldfastError):
                self.node.wait_on_disk(blocks, within_s)
                return
        self.node.wait_on_disk(blocks)

    def renew(self) -> None:
        """Have another couple of engines; the first long prompts are behind them."""
        for engine in (self.alone, self.behind):
            engine.process.stop()
        self.alone, self.behind = self._start_engines()
        for engine in (self.alone, self.behind):
            for tokens in MEETING:
                self.ttft_s(engine, self.text(tokens))

    def clear(self) -> None:
        """Have the node hold nothing but the probe: all that is asked would not fit its disk."""
        self.node.drop_all()
        wait_until(self.node.process, lambda: not self.node.blocks_on_disk(), CLEARED_S, "empty")
        self.save([self.probe])

    def teach(self) -> None:
        """Let the node see how fast the engine computes, and how fast its disk is."""
        taught = [self.text(tokens) for tokens in (*TEACHING, *TEACHING)]
        for prompt in taught[: len(TEACHING)]:
            self.ttft_s(self.alone, prompt)
        self.save([self.probe, *taught])
        seconds, _ = self.ttft_s(self.alone, self.text(2048))
        self._slow_bytes_per_s = int(SLOW * self.node.token_bytes() * 2048 / seconds)

    def move(self, place: str, plan: str) -> None:
        """Start the node anew, warm from its disk and with nothing in memory."""
        self._stop()
        self.node = self._start(place, plan)
        self.node.wait_recovered()

        def heard() -> bool:
            self.ttft_s(self.behind, self.probe)
            return bool(self.node.plans()["plans"])

        wait_until(self.behind.process, heard, CONNECTED_S, "asking its node")

    def _start_engines(self) -> tuple[Engine, Engine]:
        tokens_max = max(self._course.lengths) + 1024
        engines = []
        for name, flag in (("alone", {}), ("behind", holdfast_kv_transfer(self.node.address))):
            options = EngineOptions(
                model=self._course.made, kv_transfer=flag, model_tokens_max=tokens_max
            )
            engines.append(Engine(name, options, self._folder / f"{name}.log"))
            self._stack.enter_context(engines[-1].process)
        wait_all_ready(engines)
        alone, behind = engines
        return alone, behind

    def _stop(self) -> None:
        self.node.process.stop()

    def _start(self, place: str, plan: str) -> Node:
        disk: dict[str, object] = {
            "kind": "disk",
            "path": str(self._folder / "node" / "disk"),
            "capacity": DISK_BYTES,
        }
        if place == "slow":
            disk["read_limit"] = max(MIB, self._slow_bytes_per_s)
        tiers = [{"kind": "host", "capacity": HOST_BYTES}, disk]
        return Node(self._folder / "node", settings={"plan": plan, "tiers": tiers})


def plan_rows(
    stack: ExitStack, folder: Path, course: Course, places: Sequence[str] = PLACES
) -> Iterator[Row]:
    """Yield what plans gain and cost at each length, from each place; then against other cuts."""
    bench = Bench(stack, folder, course)
    for place in places:
        yield from _against_recompute(bench, place, course)
        for length in course.cut_lengths:
            yield _against_cuts(bench, place, length, course)


def _against_recompute(bench: Bench, place: str, course: Course) -> Iterator[Row]:
    couples = SLOW_COUPLES if place == "slow" else 1
    found: dict[int, list[list[Round]]] = {length: [] for length in course.lengths}
    for couple in range(couples):
        if couple:
            course.tell(f"{place}: couple {couple + 1} of {couples} starts")
            bench.renew()
        bench.clear()
        for length, rounds in _rounds_of(bench, place, course):
            found[length].append(rounds)
    for length, asked in found.items():
        yield _recompute_row(place, length, asked)


def _rounds_of(bench: Bench, place: str, course: Course) -> Iterator[tuple[int, list[Round]]]:
    """Yield each length, and what one couple of engines took for contexts of it."""
    texts = {n: [bench.text(n) for _ in range(course.rounds_at(n))] for n in course.lengths}
    course.tell(f"{place}: contexts of each length are saved")
    for each in texts.values():
        bench.save(each)
    if place != "host":
        _meet(bench, place)
    others = Others()
    for length, prompts in texts.items():
        rounds: list[Round] = []
        for turn in range(0, len(prompts), 2):
            course.tell(f"{place}: {length} tokens, round {turn + 1} of {len(prompts)}")
            others.share()
            pairs = _like_with_like(bench, *prompts[turn : turn + 2])
            share = others.share()
            rounds += [(pair, share) for pair in pairs]
        yield length, rounds


def _like_with_like(bench: Bench, one: Sequence[int], other: Sequence[int]) -> tuple[Pair, Pair]:
    """Ask for two contexts; each pair was asked of two engines in the same state.

    The one behind the node was asked last.
    """
    again, tokens = bench.ttft_s(bench.behind, one)
    rested_alone, _ = bench.ttft_s(bench.alone, one)
    again_alone, _ = bench.ttft_s(bench.alone, other)
    rested, other_tokens = bench.ttft_s(bench.behind, other)
    return Pair(again, again_alone, tokens), Pair(rested, rested_alone, other_tokens)


def _recompute_row(place: str, length: int, found: Sequence[Sequence[Round]]) -> Row:
    """Compare each couple of engines for itself; the figure is the mean of theirs."""
    calmest = [calm(rounds, len(rounds) // 2) for rounds in found]
    ratios = [median(pair.planned_s / pair.computed_s for pair in each) for each in calmest]
    pairs = [pair for each in calmest for pair in each]
    more: dict[str, object] = {
        "source": place,
        "tokens": length,
        "planned_s": median(pair.planned_s for pair in pairs),
        "recompute_s": median(pair.computed_s for pair in pairs),
        "fetched": median(pair.fetched for pair in pairs),
        "rounds": len(pairs),
        "disturbed": sum(map(len, found)) - len(pairs),
        "couples": ratios,
    }
    return with_more(at_most("plan.recompute", mean(ratios), "x", RECOMPUTE_GOAL), more)


def _meet(bench: Bench, place: str) -> None:
    """Start from this disk and let the node meet it: a first fetch from a new medium is a guess."""
    prompts = [bench.text(length) for length in MEETING]
    bench.save(prompts)
    bench.move(place, "best")
    for prompt in prompts:
        bench.ttft_s(bench.behind, prompt)


def _against_cuts(bench: Bench, place: str, length: int, course: Course) -> Row:
    """Find the best cut, measure it anew, and the plan's own cut of contexts held whole."""
    rounds = max(course.rounds_at(length), CUT_ROUNDS_MIN)
    cuts = sorted({round(share * length / BLOCK_TOKENS) for share in CUTS})
    course.tell(f"{place}: {length} tokens, cut after {', '.join(map(str, cuts))} blocks")
    bench.clear()
    searched = [Held(bench.text(length), cut) for _ in range(rounds) for cut in cuts]
    found: dict[int, list[Sample]] = {cut: [] for cut in cuts}
    for (_, cut), asked in zip(searched, _asked(bench, place, "held", searched), strict=True):
        found[cut].append(asked)
    times = {cut: _median_s(each) for cut, each in found.items()}
    best = min(times, key=lambda cut: times[cut])
    course.tell(f"{place}: {length} tokens, the plan beside a cut after {best} blocks")
    half = max(rounds, BESIDE_ROUNDS_MIN) // 2
    halves: dict[str, list[list[Sample]]] = {"held": [], "best": []}
    for plan in ("held", "best", "best", "held"):
        blocks = best if plan == "held" else length // BLOCK_TOKENS
        contexts = [Held(bench.text(length), blocks) for _ in range(half)]
        halves[plan].append(_asked(bench, place, plan, contexts))
    best_s, planned_s = (mean(map(_median_s, halves[plan])) for plan in ("held", "best"))
    planned = [tokens for samples in halves["best"] for (_, tokens), _ in samples]
    more: dict[str, object] = {
        "source": place,
        "tokens": length,
        "planned_s": planned_s,
        "planned_cut": median(planned) / BLOCK_TOKENS,
        "best_cut": best,
        "best_s": best_s,
        "cuts_s": {str(cut): seconds for cut, seconds in times.items()},
        "rounds": rounds,
        "beside": 2 * half,
    }
    return with_more(at_most("plan.cut", planned_s / best_s, "x", CUT_GOAL), more)


def _median_s(samples: Sequence[Sample]) -> float:
    return median(seconds for seconds, _ in calm(samples, (len(samples) + 1) // 2))


def _asked(bench: Bench, place: str, plan: str, contexts: Sequence[Held]) -> list[Sample]:
    """Have leading blocks of contexts at a place, behind a node that plans so; ask each once."""
    parts = [held.prompt[: held.blocks * BLOCK_TOKENS + TAIL_TOKENS] for held in contexts]
    kept = [part for part in parts if len(part) > TAIL_TOKENS]
    if place == "host":
        bench.move("disk", plan)  # what is saved after it is in memory
        bench.save(kept)
    else:
        bench.save(kept)
        bench.move(place, plan)
    others = Others()
    return [(bench.ttft_s(bench.behind, held.prompt), others.share()) for held in contexts]
