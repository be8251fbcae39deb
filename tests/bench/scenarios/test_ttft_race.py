"""The race is run in pairs, in changing order, and judges answers and origins."""

from types import SimpleNamespace

import pytest

from holdfast.errors import HoldfastError
from holdfast_bench.harness.completion import CompletionAnswer, MeasuredCompletion, TokenSources
from holdfast_bench.harness.server import EngineCooldown
from holdfast_bench.scenarios import first_token, throughput, ttft_race

PROMPT = [3] * 1040
RIGHT = CompletionAnswer((1, 2, 3, 4), (), 1.0)
WRONG = CompletionAnswer((9, 2, 3, 4), (), 1.0)
COLD, HOST, DISK = (
    TokenSources(1040, 0, {}),
    TokenSources(16, 0, {"host": 1024}),
    TokenSources(16, 0, {"disk": 1024}),
)


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
        portable=FakeEngine("portable", log, node),
        lmcache=None,
        node=node,
        rest=EngineCooldown(),
    )

    def ask(engine, prompt, _):
        if len(prompt) != len(PROMPT):
            return None
        log.append(engine.name)
        tokens = COLD if engine.node is None else HOST if engine.node.in_memory else DISK
        if engine.node is not None:
            engine.node.in_memory = True
        return MeasuredCompletion(RIGHT, tokens)

    monkeypatch.setattr(ttft_race, "ask", ask)
    monkeypatch.setattr(ttft_race, "wait_asking", lambda *_: None)
    monkeypatch.setattr(ttft_race, "wait_fetching", lambda *_: None)
    monkeypatch.setattr("holdfast_bench.harness.server.time.sleep", lambda _: log.append("rest"))
    return track


def test_every_round_has_one_time_of_each_kind_and_no_miss(track):
    times = ttft_race.race(track, PROMPT, 3, lambda _: None)
    assert times.cold == times.host == times.disk == [1.0] * 3
    assert times.missed == {"host": 0, "disk": 0}
    assert times.lmcache == []


def test_the_order_changes_each_round_and_caches_are_emptied_first(track, log):
    ttft_race.race(track, PROMPT, 2, lambda _: None)
    asked = [name for name in log if name in ("alone", "behind")]
    assert asked == ["alone", "behind", "alone", "behind", "behind", "behind", "behind", "alone"]
    assert log[-2:] == ["alone forgets", "alone"]


def test_a_request_is_sent_when_the_other_engine_is_idle(track, log):
    ttft_race.race(track, PROMPT, 2, lambda _: None)
    order = " ".join(name for name in log if "forgets" not in name)
    assert order == "alone rest behind rest alone rest behind behind behind behind rest alone"


def test_a_miss_is_counted_and_its_time_kept(track, monkeypatch):
    monkeypatch.setattr(ttft_race, "ask", lambda *_: MeasuredCompletion(RIGHT, COLD))
    times = ttft_race.race(track, PROMPT, 3, lambda _: None)
    assert times.missed == {"host": 3, "disk": 3}
    assert len(times.host) == 3


def test_a_wrong_answer_ends_the_race(track, monkeypatch):
    def ask(engine, *_):
        return MeasuredCompletion(WRONG if engine.node else RIGHT, COLD)

    monkeypatch.setattr(ttft_race, "ask", ask)
    with pytest.raises(HoldfastError, match="the output differs"):
        ttft_race.race(track, PROMPT, 1, lambda _: None)


def test_layouts_are_compared_in_changing_order_after_a_warm_up(track, log):
    times = ttft_race.compare_layouts(track, PROMPT, 3, lambda _: None)
    assert times.exact == times.portable == [1.0] * 3
    assert times.missed == {"exact": 0, "portable": 0}
    asked = [name for name in log if name in ("behind", "portable")]
    rounds = ["behind", "portable", "portable", "behind", "behind", "portable"]
    assert asked == ["behind"] * 2 + ["portable"] * 2 + rounds
    assert log[-2:] == ["portable forgets", "portable"]


def test_a_context_of_a_layout_that_is_missed_is_counted(track, monkeypatch):
    def ask(engine, *_):
        return MeasuredCompletion(RIGHT, COLD if engine.name == "portable" else HOST)

    monkeypatch.setattr(ttft_race, "ask", ask)
    times = ttft_race.compare_layouts(track, PROMPT, 2, lambda _: None)
    assert times.missed == {"exact": 0, "portable": 2}


def test_a_gain_is_the_median_over_the_pairs():
    assert ttft_race.gain([2.0, 3.0, 40.0], [1.0, 1.0, 1.0]) == 3.0
    with pytest.raises(ValueError, match="zip"):
        ttft_race.gain([1.0], [])


def test_throughput_prompts_are_new_in_each_round_and_equal_in_number(track, monkeypatch):
    asked = []
    monkeypatch.setattr(
        throughput, "complete", lambda engine, prompt, _: asked.append((engine.name, tuple(prompt)))
    )
    found = throughput.measure(track, 32_000, 2, lambda _: None)
    assert len(found.alone) == len(found.behind) == 2
    assert len({prompt for _, prompt in asked}) == len(asked) == 3 * 2 * throughput.REQUESTS
    assert {len(prompt) for _, prompt in asked} == {throughput.PROMPT_TOKENS}


@pytest.mark.parametrize(("clients", "requests"), first_token.REQUESTS.items())
def test_first_token_prompts_are_new_and_the_engines_alternate(
    track, monkeypatch, clients, requests
):
    asked = []

    def complete(engine, prompt, tokens):
        assert tokens == 1
        asked.append((engine.name, tuple(prompt)))
        return RIGHT

    monkeypatch.setattr(first_token, "complete", complete)
    monkeypatch.setattr(first_token, "PROMPT_TOKENS", 32)
    found = first_token.measure(track, 32_000, clients, 2, lambda _: None)
    assert found.alone == found.behind == [[1.0] * requests] * 2
    assert len({prompt for _, prompt in asked}) == len(asked)
    names = [name for name, _ in asked[::requests]]
    assert names == ["alone", "behind", "behind", "alone"]


def test_overhead_is_the_median_over_the_pairs():
    pairs = throughput.ThroughputPairs([10.0, 20.0, 10.0], [10.1, 20.4, 19.0])
    request_tokens = throughput.REQUESTS * (throughput.PROMPT_TOKENS + throughput.ANSWER_TOKENS)
    assert pairs.overhead == pytest.approx(0.02)
    assert pairs.tokens_per_s([2.0]) == request_tokens / 2
