"""An engine is held against itself without Holdfast, in the same state."""

import random
from pathlib import Path

import pytest

from holdfast_bench.cli.bench import plan
from holdfast_bench.cli.bench.plan import COUPLES, NOWHERE, PARTS, PLACES, TIMES_MAX
from holdfast_bench.harness.completion import NO_HINT
from holdfast_bench.harness.standard_error import CONCLUSIVE_ERROR
from holdfast_bench.measure import plan_load
from holdfast_bench.measure.engine_pair import BYPASS, TAIL_TOKENS, EnginePairSettings


class SpinBench:
    """Two engines, of which one that is asked again at once takes a tenth longer.

    `worse`: how much longer the one with a connector takes, couple by couple; `planned`: how much
    longer than that it takes with a plan.
    """

    alone, behind = "alone", "behind"

    def __init__(self, *worse, planned=1.0):
        self.worse, self.planned = list(worse or [1.0]), planned
        self.last, self.asked, self.drawn, self.did = "behind", [], 0, []

    def restart_engines(self):
        del self.worse[0]

    def drop_contexts(self):
        self.did.append("clear")

    def probe_tier(self, place):
        self.did.append(f"meet {place}")

    def place_contexts(self, place, how, prompts):
        self.last = "behind"
        self.did.append(f"{len(prompts)} {place}")

    def text(self, tokens):
        self.drawn += 1
        return [self.drawn] * (tokens + TAIL_TOKENS)

    def wait_idle(self):
        self.last = None

    def ttft_s(self, engine, prompt, hint=NO_HINT):
        spins, self.last = engine == self.last, engine
        way = "alone" if engine == "alone" else "bypass" if hint == BYPASS else "planned"
        self.asked.append((prompt[0], way))
        seconds = {"alone": 1.0, "bypass": self.worse[0], "planned": self.worse[0] * self.planned}
        return (1.1 if spins else 1.0) * seconds[way], 0


@pytest.mark.parametrize("rounds", [3, 4, 5])
def test_the_plan_ratio_excludes_the_slowdown_of_an_engine_used_twice(rounds):
    """One way first and the other first by turns would be 10 % off, whichever came first."""
    for planned in (1.0, 1.04):
        bench = SpinBench(1.2, planned=planned)
        settings = EnginePairSettings("small", Path(), [128], (), rounds, lambda _: None)
        row = plan._against_recompute(bench, "host", 128, settings)
        assert row.value == pytest.approx(planned), "not the engine's own share of 1.2"
        assert row.more["rounds"] == len(bench.asked) / 2 == settings.rounds_at(128)
        assert sorted(set(bench.asked)) == sorted(bench.asked), "each once both ways"
        assert {way for _, way in bench.asked} == {"planned", "bypass"}


def test_the_cost_of_a_connector_is_the_mean_over_several_engine_pairs():
    bench = SpinBench(1.01, 1.0, 1.02, 9.0, planned=9.0)
    row = plan._connector_row(bench, EnginePairSettings("small", Path(), (), (), 4, lambda _: None))
    assert row.more["couples"] == pytest.approx([1.01, 1.0, 1.02])
    assert row.value == pytest.approx(1.01)
    assert len(bench.asked) == 2 * 3 * row.more["rounds"]


def test_inconsistent_engine_pairs_are_followed_by_more_up_to_a_limit():
    bench = SpinBench(*[1.2, 0.9] * 20)
    row = plan._connector_row(bench, EnginePairSettings("small", Path(), (), (), 4, lambda _: None))
    assert len(row.more["couples"]) == COUPLES[1]
    assert row.more["standard_error"] == pytest.approx(0.15 / 7**0.5)


def test_requests_are_repeated_until_their_ratio_is_conclusive():
    """Two pairs in three are off by 10 % and more, either way."""

    class Noisy(SpinBench):
        def ttft_s(self, engine, prompt, hint=NO_HINT):
            seconds, tokens = super().ttft_s(engine, prompt, hint)
            return seconds * rng.lognormvariate(0, 0.1), tokens

    rng = random.Random(1)
    settings = EnginePairSettings("small", Path(), (), (), 8, lambda _: None)
    unknown = plan._against_recompute(Noisy(planned=1.05), "host", 1024, settings)
    assert unknown.more["rounds"] == TIMES_MAX * settings.rounds_at(1024)
    assert unknown.more["standard_error"] > CONCLUSIVE_ERROR
    known = plan._against_recompute(Noisy(planned=0.3), "host", 1024, settings)
    assert known.more["rounds"] == settings.rounds_at(1024)


def test_at_most_half_of_the_pairs_are_left_out_as_disturbed(shares):
    settings = EnginePairSettings("small", Path(), (), (), 8, lambda _: None)
    for busy, left in (([0.0, 0.5], 8), ([0.4, 0.5], 8), ([0.01, 0.04], 16)):
        shares[:] = [share for each in busy * 4 for share in (0.0, each)]
        row = plan._against_recompute(SpinBench(planned=0.3), "host", 256, settings)
        assert (row.more["rounds"], row.more["disturbed"]) == (left, 16 - left)


@pytest.mark.parametrize(("place", "held"), [*((each, 8) for each in PLACES), (NOWHERE, 0)])
def test_contexts_are_placed_on_the_named_tier_after_it_is_cleared(place, held):
    bench = SpinBench()
    plan._against_recompute(
        bench, place, 1024, EnginePairSettings("small", Path(), (), (), 8, print)
    )
    assert bench.did == ["clear", f"{held} {'disk' if place == NOWHERE else place}"]


def test_only_the_parts_that_were_named_are_measured(monkeypatch):
    bench = SpinBench()
    monkeypatch.setattr(plan, "EnginePair", lambda *_: bench)
    monkeypatch.setattr(plan, "_against_recompute", lambda _, place, n, __: f"{place} {n}")
    monkeypatch.setattr(plan, "against_cuts", lambda _, place, n, __: f"{place} cut {n}")
    monkeypatch.setattr(plan, "_connector_row", lambda *_: "connector")
    monkeypatch.setattr(
        plan.plan_load, "under_load", lambda _, place, tokens, n, __: f"{place} {n} at once"
    )
    settings = EnginePairSettings("small", Path(), (128, 512), (512,), 5, print)

    def rows(*parts):
        return list(plan.plan_rows(None, Path(), settings, parts))

    assert rows("slow", "connector") == ["slow 128", "slow 512", "slow cut 512", "connector"]
    assert bench.did == ["meet slow"]
    assert rows("nowhere") == ["nowhere 512"]
    loads = [f"{place} {n} at once" for place in ("disk", "slow") for n in (1, 4, 16)]
    assert rows("load") == loads
    assert len(rows(*PARTS)) == 4 * 3 + 1 + 1 + len(loads)


def test_plans_under_load_are_held_against_the_better_of_both_other_ways(monkeypatch):
    seconds = {("best", ""): 1.5, ("held", ""): 3.0, ("held", "bypass"): 2.0}
    asked = []

    class Bursts(SpinBench):
        behind, fetched = "engine", 0

        def place_contexts(self, place, how, prompts):
            super().place_contexts(place, how, prompts)
            self.planner = how

        def restart_node(self, place, how):
            self.did.append(f"restart {place}")
            self.planner = how

        def burst_s(self, engine, prompts, hint=NO_HINT):
            way = self.planner, "bypass" if hint == BYPASS else ""
            asked.append(way)
            self.fetched += 384 * len(prompts) if way == planned else 0
            return [seconds[way]] * len(prompts)

    planned, fetched, computed = list(seconds)
    bench = Bursts()
    monkeypatch.setattr(plan_load, "fetched_tokens", lambda _: bench.fetched)
    settings = EnginePairSettings("small", Path(), (), (), 8, lambda _: None)
    row = plan_load.under_load(bench, "slow", 512, 8, settings)
    assert row.value == pytest.approx(1.5 / 2.0)
    assert (row.more["at_once"], row.more["bursts"]) == (8, 4)
    assert (row.more["fetched_share"], row.more["standard_error"]) == (3 / 4, 0)
    turns = [planned, fetched, computed, computed, fetched, planned]
    assert asked == [way for way in turns for _ in range(2)], "two bursts of each in each turn"
    assert bench.did == ["clear", "32 slow", "restart slow", "restart slow"]
