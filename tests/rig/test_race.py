"""The race is run in pairs, in changing order, and judges answers and origins."""

from types import SimpleNamespace

import pytest

from holdfast.errors import HoldfastError
from holdfast.rig import load, race
from holdfast.rig.ask import Answer, Asked, Tokens
from holdfast.rig.server import Rest

PROMPT = [3] * 1040
RIGHT = Answer((1, 2, 3, 4), (), 1.0, 1.1)
WRONG = Answer((9, 2, 3, 4), (), 1.0, 1.1)
COLD, HOST, DISK = Tokens(1040, 0, {}), Tokens(16, 0, {"host": 1024}), Tokens(16, 0, {"disk": 1024})


class FakeNode:
    """Forgets its memory when it is restarted, as a real one does."""

    def __init__(self):
        self.in_memory = False

    def blocks_on_disk(self):
        return 9

    def last_plan(self):
        return 0

    def wait_on_disk(self, blocks):
        assert blocks <= 18

    def wait_idle(self):
        pass

    def restart(self):
        self.in_memory = False


class FakeEngine:
    def __init__(self, name, log, node=None):
        self.name, self.log, self.node = name, log, node

    def reset_prefix_cache(self):
        self.log.append(f"{self.name} forgets")


@pytest.fixture
def log():
    return []


@pytest.fixture
def track(log, monkeypatch):
    node = FakeNode()
    track = SimpleNamespace(
        alone=FakeEngine("alone", log),
        behind=FakeEngine("behind", log, node),
        lmcache=None,
        node=node,
        rest=Rest(),
    )

    def ask(engine, prompt, _):
        if len(prompt) != len(PROMPT):
            return None
        log.append(engine.name)
        tokens = COLD if engine.node is None else HOST if engine.node.in_memory else DISK
        if engine.node is not None:
            engine.node.in_memory = True
        return Asked(RIGHT, tokens)

    monkeypatch.setattr(race, "ask", ask)
    monkeypatch.setattr(race, "wait_asking", lambda *_: None)
    monkeypatch.setattr(race, "wait_fetching", lambda *_: None)
    monkeypatch.setattr("holdfast.rig.server.time.sleep", lambda _: log.append("rest"))
    return track


def test_every_round_has_one_time_of_each_kind_and_no_miss(track):
    times = race.race(track, PROMPT, 3, lambda _: None)
    assert times.cold == times.host == times.disk == [1.0] * 3
    assert times.missed == {"host": 0, "disk": 0}
    assert times.lmcache == []


def test_the_order_changes_each_round_and_caches_are_emptied_first(track, log):
    race.race(track, PROMPT, 2, lambda _: None)
    asked = [name for name in log if name in ("alone", "behind")]
    assert asked == ["alone", "behind", "alone", "behind", "behind", "behind", "behind", "alone"]
    assert log[-2:] == ["alone forgets", "alone"]


def test_an_engine_is_asked_when_the_other_has_come_to_rest(track, log):
    race.race(track, PROMPT, 2, lambda _: None)
    order = " ".join(name for name in log if "forgets" not in name)
    assert order == "alone rest behind rest alone rest behind behind behind behind rest alone"


def test_a_miss_is_counted_and_its_time_kept(track, monkeypatch):
    monkeypatch.setattr(race, "ask", lambda *_: Asked(RIGHT, COLD))
    times = race.race(track, PROMPT, 3, lambda _: None)
    assert times.missed == {"host": 3, "disk": 3}
    assert len(times.host) == 3


def test_a_wrong_answer_ends_the_race(track, monkeypatch):
    def ask(engine, *_):
        return Asked(WRONG if engine.node else RIGHT, COLD)

    monkeypatch.setattr(race, "ask", ask)
    with pytest.raises(HoldfastError, match="the output differs"):
        race.race(track, PROMPT, 1, lambda _: None)


def test_a_gain_is_the_median_over_the_pairs():
    assert race.gain([2.0, 3.0, 40.0], [1.0, 1.0, 1.0]) == 3.0
    with pytest.raises(ValueError, match="zip"):
        race.gain([1.0], [])


def test_loads_are_new_each_time_and_equal_for_both(track, monkeypatch):
    asked = []
    monkeypatch.setattr(
        load, "complete", lambda engine, prompt, _: asked.append((engine.name, tuple(prompt)))
    )
    found = load.measure(track, 32_000, 2, lambda _: None)
    assert len(found.alone) == len(found.behind) == 2
    assert len({prompt for _, prompt in asked}) == len(asked) == 3 * 2 * load.REQUESTS
    assert {len(prompt) for _, prompt in asked} == {load.PROMPT_TOKENS}


def test_overhead_is_the_median_over_the_pairs():
    pairs = load.Pairs([10.0, 20.0, 10.0], [10.1, 20.4, 19.0])
    assert pairs.overhead == pytest.approx(0.02)
    assert (
        pairs.tokens_per_s([2.0]) == load.REQUESTS * (load.PROMPT_TOKENS + load.ANSWER_TOKENS) / 2
    )
