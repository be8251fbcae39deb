"""Plans are measured on contexts that really are where they are said to be."""

import random
from pathlib import Path
from statistics import median

import pytest

from holdfast.errors import HoldfastError
from holdfast.limits import BLOCK_TOKENS
from holdfast.rig.measure import plan
from holdfast.rig.measure.plan import (
    BESIDE_ROUNDS_MIN,
    PLACES,
    SAVED_S,
    TAIL_TOKENS,
    Bench,
    Course,
)

PROMPTS = [[7] * (2 * BLOCK_TOKENS + TAIL_TOKENS), [8] * (BLOCK_TOKENS + TAIL_TOKENS)]


class FakeNode:
    """Has every block on disk but those that an engine gave up; waits for none."""

    def __init__(self, given_up):
        self.blocks = 5
        self.given_up = given_up

    def blocks_on_disk(self):
        return self.blocks

    def wait_on_disk(self, blocks, within_s=60.0):
        if self.blocks < blocks:
            raise HoldfastError(f"not holding {blocks} blocks within {within_s:g} s")


@pytest.fixture
def save():
    """Save PROMPTS with an engine that gives blocks up so often; returns how often it was asked."""

    def run(times):
        bench, asked = object.__new__(Bench), []
        bench.node, bench.behind = FakeNode(times), "behind"

        def ttft_s(engine, prompt):
            assert engine == "behind"
            asked.append(prompt)
            if prompt is PROMPTS[-1]:
                bench.node.given_up -= 1
                bench.node.blocks = 8 if bench.node.given_up < 0 else 7
            return 1.0, 0

        bench.ttft_s = ttft_s
        bench.save(PROMPTS)
        return len(asked) // len(PROMPTS)

    return run


def test_contexts_that_were_given_up_are_computed_again(save):
    assert save(0) == 1
    assert save(1) == 2


def test_contexts_that_are_given_up_every_time_end_the_run(save):
    with pytest.raises(HoldfastError, match="not holding 8 blocks"):
        save(len(SAVED_S))


def test_long_contexts_get_fewer_rounds_and_short_ones_more():
    course = Course("small", Path(), (), (), 5, print)
    assert [course.rounds_at(n) for n in (128, 256, 512, 1024, 2048, 8192)] == [40, 16, 16, 6, 6, 4]


class SpinBench:
    """Two engines alike, of which one that is asked again at once takes a tenth longer.

    How much slower the one behind a node is, differs from couple to couple.
    """

    alone, behind = "alone", "behind"

    def __init__(self, *worse):
        self.worse, self.last, self.asked, self.drawn = list(worse or [1.0]), "behind", [], 0
        self.cleared = 0

    def renew(self):
        del self.worse[0]

    def clear(self):
        self.cleared += 1

    def move(self, place, plan):
        self.last = "behind"

    def text(self, tokens):
        self.drawn += 1
        return [self.drawn] * (tokens + TAIL_TOKENS)

    def save(self, prompts):
        self.last = "behind"

    def ttft_s(self, engine, prompt):
        spins, self.last = engine == self.last, engine
        self.asked.append((engine, prompt[0]))
        return (1.1 if spins else 1.0) * (self.worse[0] if engine == "behind" else 1.0), 0


@pytest.mark.parametrize("rounds", [3, 4, 5])
def test_an_engine_that_still_spins_is_held_against_one_that_does(shares, rounds):
    """One engine first and the other first by turns would be 10 % off, whichever came first."""
    for worse in (1.0, 1.04):
        bench = SpinBench(worse)
        course = Course("small", Path(), [128], (), rounds, lambda _: None)
        (row,) = plan._against_recompute(bench, "host", course)
        assert row.value == pytest.approx(worse)
        assert row.more["rounds"] == len(bench.asked) / 2 == course.rounds_at(128)
        assert sorted(set(bench.asked)) == sorted(bench.asked), "each once by both"


def test_behind_the_slow_disk_the_mean_of_three_couples_counts(shares):
    bench = SpinBench(1.06, 0.94, 1.03)
    course = Course("small", Path(), [1024], (), 4, lambda _: None)
    (row,) = plan._against_recompute(bench, "slow", course)
    assert row.more["couples"] == pytest.approx([1.06, 0.94, 1.03])
    assert row.value == pytest.approx(1.01)
    assert row.more["rounds"] == 3 * course.rounds_at(1024) == 12
    assert bench.cleared == 3, "the contexts of all would not fit"


def test_pairs_that_others_disturb_are_left_out_but_not_more_than_half(shares):
    course = Course("small", Path(), [4096], (), 4, lambda _: None)
    for busy, left in (([0.0, 0.5], 2), ([0.4, 0.5], 2), ([0.01, 0.04], 4)):
        shares[:] = [0.0, busy[0], 0.0, busy[1]]
        (row,) = plan._against_recompute(SpinBench(), "host", course)
        assert (row.more["rounds"], row.more["disturbed"]) == (left, 4 - left)


class CutBench:
    """An engine whose time depends on what is held, how it is planned, and the hour."""

    behind = "behind"

    def __init__(self, takes, noise, drift=0.0):
        self.takes, self.dice, self.noise, self.drift = takes, random.Random(1), noise, drift
        self.held, self.plan, self.moves, self.asked, self.drawn = {}, "best", [], [], 0
        self.in_memory, self.cleared = set(), 0

    def clear(self):
        self.cleared += 1
        self.held.clear()
        self.in_memory.clear()

    def text(self, tokens):
        self.drawn += 1
        return [self.drawn] * (tokens + TAIL_TOKENS)

    def save(self, prompts):
        self.held |= {prompt[0]: len(prompt) // BLOCK_TOKENS for prompt in prompts}
        self.in_memory.update(prompt[0] for prompt in prompts)

    def move(self, place, plan):
        self.plan = plan
        self.moves.append((place, plan))
        self.in_memory.clear()

    def ttft_s(self, engine, prompt):
        held = self.held.get(prompt[0], 0)
        self.asked.append((self.plan, held, prompt[0] in self.in_memory))
        cut, seconds = self.takes(self.plan, held)
        slower = 1.0 + self.drift * len(self.asked)
        return seconds * slower * self.dice.lognormvariate(0, self.noise), cut * BLOCK_TOKENS


def best_of(plan, held):
    """The more is fetched the better; the planner fetches all."""
    return held, 0.05 + 0.03 * (4 - held)


def cut_row(takes, noise, drift=0.0, place="disk", rounds=5):
    bench = CutBench(takes, noise, drift)
    course = Course("small", Path(), (), (), rounds, lambda _: None)
    return plan._against_cuts(bench, place, 512, course), bench


def test_a_plan_that_takes_one_of_equal_cuts_is_not_worse_than_the_luckiest():
    """The smallest of five medians is small by luck; measured anew it is like the others."""
    ratios, lucky = [], []
    for seed in range(40):
        bench = CutBench(lambda plan, held: (held, 0.06), noise=0.2)
        bench.dice.seed(seed)
        course = Course("small", Path(), (), (), 5, lambda _: None)
        row = plan._against_cuts(bench, "disk", 512, course)
        ratios.append(row.value)
        lucky.append(row.more["planned_s"] / min(row.more["cuts_s"].values()))
    assert median(ratios) == pytest.approx(1.0, abs=0.04)
    assert median(lucky) > 1.05


@pytest.mark.parametrize("place", ["host", "disk", "slow"])
def test_a_plan_that_is_worse_than_another_cut_is_told(place):
    def takes(plan, held):
        return (2, 0.11) if plan == "best" else best_of(plan, held)

    row, _ = cut_row(takes, noise=0.03, place=place)
    assert row.value == pytest.approx(0.11 / 0.05, rel=0.1)
    assert (row.ok, row.more["best_cut"], row.more["planned_cut"]) == (False, 4, 2)


def test_a_machine_that_becomes_slower_is_not_in_the_comparison():
    row, bench = cut_row(best_of, noise=0.0, drift=0.01)
    assert row.value == pytest.approx(1.0, abs=0.02)
    assert [plan for _, plan in bench.moves] == ["held", "held", "best", "best", "held"]


@pytest.mark.parametrize("place", PLACES)
def test_memory_that_gets_slower_as_it_fills_is_not_in_the_comparison(place):
    """A node's first memory was brought in ahead: later contexts behind it are slower."""

    class Filling(CutBench):
        def move(self, place, plan):
            super().move(place, plan)
            self.first = len(self.asked)

        def ttft_s(self, engine, prompt):
            filled = len(self.asked) - self.first
            seconds, tokens = super().ttft_s(engine, prompt)
            return seconds * (1.0 if filled < 4 else 1.5), tokens

    bench = Filling(best_of, noise=0.0)
    course = Course("small", Path(), (), (), 5, lambda _: None)
    row = plan._against_cuts(bench, place, 512, course)
    assert row.value == pytest.approx(1.0)
    assert row.more["planned_s"] > best_of("best", 4)[1], "some of both were slower"
    assert row.more["beside"] == 16


def test_a_cut_that_others_disturb_is_not_the_worse_for_it(shares):
    """Beside two of five rounds of the plan's they compute; a round of the search has five cuts."""
    rounds, cuts, half = 4, 5, BESIDE_ROUNDS_MIN // 2
    busy = [0.0] * (rounds * cuts + half) + [0.5, 0.0] * 2
    shares += busy

    def disturbed(self, engine, prompt):
        asked = len(self.asked)
        seconds, tokens = CutBench.ttft_s(self, engine, prompt)
        return seconds * (3.0 if asked < len(busy) and busy[asked] else 1.0), tokens

    bench = CutBench(best_of, 0.0)
    bench.ttft_s = disturbed.__get__(bench)
    course = Course("small", Path(), (), (), 1, lambda _: None)
    row = plan._against_cuts(bench, "disk", 512, course)
    assert row.more["rounds"] == rounds
    assert row.value == pytest.approx(1.0)


@pytest.mark.parametrize("place", ["host", "disk", "slow"])
def test_what_is_said_to_be_in_memory_is_and_nothing_else(place):
    _, bench = cut_row(best_of, noise=0.0, place=place)
    assert {there for plan, held, there in bench.asked if held} == {place == "host"}
    assert {at for at, _ in bench.moves} == {"slow" if place == "slow" else "disk"}
    assert bench.cleared == 1, "what was asked before, too, would not fit"
