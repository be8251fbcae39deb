"""A calibration on a disturbed machine is refused, or comes out as on one at rest."""

import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.cli import main
from holdfast.errors import HoldfastError
from holdfast.limits import BLOCK_TOKENS
from holdfast.plan.cost import PrefillCost, TierEstimate
from holdfast_bench.cli.bench import calibrate
from holdfast_bench.measure import engine
from holdfast_bench.measure.engine_pair import TAIL_TOKENS, EnginePairSettings

PREFILL = PrefillCost(0.02, 4e-4, 6e-8)
TIERS = {"host": TierEstimate(0.05, 1.6e9), "disk": TierEstimate(0.06, 0.9e9)}
TOKEN_BYTES = 20_480.0
LENGTHS = (512, 1024, 2048, 3072, 4096)
ROUNDS = 7


class FakeBench:
    """An engine that is as quick as its costs say, but for `disturbed(place, number, seconds)`."""

    def __init__(self, disturbed, holes=0):
        self.disturbed, self.holes, self.asked = disturbed, holes, []
        self.alone, self.behind = "alone", "behind"
        self.node = SimpleNamespace(token_bytes=lambda: TOKEN_BYTES)
        self.in_memory, self.saved, self.drawn = set(), set(), 0
        self.rested = False

    def text(self, tokens):
        self.drawn += 1
        return (tokens, self.drawn)

    def save(self, prompts):
        self.saved.update(prompts)

    def drop_contexts(self):
        self.saved.clear()

    def restart_node(self, place, plan):
        assert (place, plan) == ("disk", "held")
        self.in_memory.clear()

    def wait_idle(self):
        self.rested = True

    def ttft_s(self, which, prompt):
        assert self.rested, "an engine that still spins takes longer"
        self.rested = False
        tokens, _ = prompt
        if which == "alone":
            place, seconds = "cold", PREFILL.seconds(tokens + TAIL_TOKENS)
        else:
            assert prompt in self.saved
            place = "host" if prompt in self.in_memory else "disk"
            self.in_memory.add(prompt)
            tier = TIERS[place].seconds(tokens * TOKEN_BYTES)
            seconds = tier + PREFILL.seconds(TAIL_TOKENS, tokens)
        self.asked.append((place, tokens))
        seconds = self.disturbed(place, len(self.asked), seconds)
        missing = place != "cold" and len(self.asked) <= self.holes
        return seconds, 0 if missing or place == "cold" else tokens // BLOCK_TOKENS * BLOCK_TOKENS


def measured(disturbed, holes=0):
    bench = FakeBench(disturbed, holes)
    return engine.measure(
        bench, EnginePairSettings("demo", Path(), LENGTHS, (), ROUNDS, lambda _: None)
    ), bench


def at_rest(place, number, seconds):
    return seconds


def test_every_round_measures_every_length_cold_and_from_each_tier():
    _, bench = measured(at_rest)
    one = [(place, n) for n in LENGTHS for place in ("cold", "disk", "host")]
    assert bench.asked == one * ROUNDS


def test_rounds_continue_behind_another_node_until_medians_are_conclusive():
    """With samples a third apart, seven rounds know a median to a tenth."""
    rng = random.Random(2)

    def disturbed(place, number, seconds):
        return seconds * rng.uniform(1.0, 1.6)

    found, bench = measured(disturbed)
    rounds, rest = divmod(len(bench.asked), ROUNDS * 3 * len(LENGTHS))
    assert rest == 0
    assert 1 < rounds <= engine.NODES_MAX
    assert found.cold[4096] == pytest.approx(1.3 * PREFILL.seconds(4096 + TAIL_TOKENS), rel=0.2)
    assert all(row.ok for row in off(found, 4096).values())


def off(found, tokens):
    """How far predictions of the length that was left out are off, by where it comes from."""
    lengths = tuple(n for n in LENGTHS if n != tokens)
    data = calibrate._ladder(found, lengths)
    return {row.what: row for row in calibrate._predictions(data, found, tokens)}


@pytest.mark.parametrize("share", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_stalls_and_a_slow_minute_change_no_prediction(seed, share):
    """Each tenth request is up to 80 ms late, and one round takes two and a half times as long.

    With one length after the other, and three rounds, memory came out 272 % off.
    """
    rng = random.Random(seed)
    per_round = 3 * len(LENGTHS)

    def disturbed(place, number, seconds):
        slow = 2.5 if number // per_round == 3 else 1.0
        return slow * seconds * rng.uniform(0.98, 1.02) + (
            rng.uniform(0.01, 0.08) if rng.random() < share else 0.0
        )

    found, _ = measured(disturbed)
    rows = off(found, 4096)
    assert list(rows) == ["calibrate.cold", "calibrate.host", "calibrate.disk"]
    assert all(row.value < 10.0 and row.ok for row in rows.values())


def test_samples_disturbed_by_other_processes_are_left_out(shares):
    """In three rounds of seven they take half of the machine; everything takes twice as long."""
    rounds = [0.0, 0.5, 0.5, 0.0, 0.5, 0.0, 0.0]
    for share in rounds:
        for _ in LENGTHS:
            shares += [0.0, share, share, share]
    per_round = 3 * len(LENGTHS)

    def disturbed(place, number, seconds):
        return seconds * (2.0 if rounds[(number - 1) // per_round] else 1.0)

    found, bench = measured(disturbed)
    assert len(bench.asked) == ROUNDS * per_round
    assert found.cold[4096] == pytest.approx(PREFILL.seconds(4096 + TAIL_TOKENS))
    assert all(row.value < 1.0 for row in off(found, 4096).values())


def test_rounds_that_disagree_are_refused():
    rng = random.Random(1)

    def disturbed(place, number, seconds):
        return seconds * (rng.uniform(1.0, 4.0) if place == "host" else 1.0)

    with pytest.raises(
        HoldfastError, match=r"512 tokens, host: .* standard error .* more than 10%; nothing"
    ):
        measured(disturbed)


def test_contexts_that_were_computed_after_all_are_no_fetches():
    with pytest.raises(HoldfastError, match=r"512 tokens, disk: 0 fetches were complete"):
        measured(at_rest, holes=10_000)


def test_a_length_that_contradicts_the_fit_in_every_round_is_refused():
    def disturbed(place, number, seconds):
        at = (number - 1) % (3 * len(LENGTHS))
        return 3 * seconds if at == 3 * LENGTHS.index(2048) else seconds

    found, _ = measured(disturbed)
    with pytest.raises(HoldfastError, match=r"tokens computed: .* by the fit to all"):
        off(found, 4096)


def test_a_refused_calibration_writes_no_ladder(tmp_path, monkeypatch, capsys):
    def refuse(bench, settings):
        raise HoldfastError("512 tokens, host: the fastest")

    monkeypatch.setattr(calibrate.engine, "measure", refuse)
    monkeypatch.setattr(calibrate, "EnginePair", lambda *_: None)
    monkeypatch.setattr(calibrate.model, "make", lambda name: tmp_path)
    monkeypatch.setattr(calibrate.measuring, "find_spec", lambda _: object())
    file = tmp_path / "ladder.yaml"
    assert main(["bench", "calibrate", "--out", str(file)]) == 1
    assert "512 tokens, host" in capsys.readouterr().err
    assert not file.exists()
