"""Serving loads are the same for every server, and a session's turns build on each other."""

import threading
import time

import pytest

from holdfast_bench.harness.completion import CompletionAnswer
from holdfast_bench.scenarios import serving_loads
from holdfast_bench.scenarios.serving_loads import ServingPrompts, Sessions, run_crowd, run_sessions


class FakeEngine:
    """Answers every prompt with one token, and remembers the prompts in their order."""

    name = "fake"

    def __init__(self):
        self.prompts, self.forgot, self._lock = [], 0, threading.Lock()
        self.most_at_once = self._at_once = 0

    def reset_prefix_cache(self):
        self.forgot += 1

    def complete(self, prompt, max_tokens):
        with self._lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            self.prompts.append(list(prompt))
        time.sleep(0.01)
        with self._lock:
            self._at_once -= 1
        return CompletionAnswer((7,) * max_tokens, (), float(len(prompt)))


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(serving_loads, "complete", lambda engine, *asked: engine.complete(*asked))
    return FakeEngine()


def test_each_turn_is_the_conversation_before_it_with_the_answer_and_new_tokens(engine):
    times = run_sessions(engine, ServingPrompts(1, 100), Sessions(2, 3, 10, 4), clients=1)
    first, second, third = (engine.prompts[at] for at in (0, 2, 4))
    answer = [7] * serving_loads.ANSWER_TOKENS
    assert second[: len(first)] == first
    assert second[len(first) : -4] == answer
    assert third[: len(second)] == second
    assert times.first == [10.0, 10.0]
    assert times.later == [30.0, 30.0, 50.0, 50.0]


def test_the_longest_context_of_a_session_is_its_last_turn_with_the_answer(engine):
    sessions = Sessions(1, 3, 10, 4)
    run_sessions(engine, ServingPrompts(1, 100), sessions, clients=1)
    assert sessions.longest == len(engine.prompts[-1]) + serving_loads.ANSWER_TOKENS


def test_every_session_has_a_turn_before_any_has_the_next(engine):
    run_sessions(engine, ServingPrompts(1, 100), Sessions(4, 2, 10, 4), clients=1)
    assert [len(prompt) for prompt in engine.prompts] == [10] * 4 + [30] * 4


def test_no_more_requests_run_at_once_than_there_are_clients(engine):
    run_sessions(engine, ServingPrompts(1, 100), Sessions(8, 2, 10, 4), clients=2)
    assert engine.most_at_once <= 2


def test_equal_seeds_give_every_server_the_same_prompts():
    assert ServingPrompts(3, 1000).tokens(50) == ServingPrompts(3, 1000).tokens(50)
    assert ServingPrompts(3, 1000).tokens(50) != ServingPrompts(4, 1000).tokens(50)


def test_a_crowd_meets_an_engine_whose_own_cache_is_empty(engine):
    crowd = [[1, 2, n] for n in range(8)]
    assert run_crowd(engine, crowd) == [3.0] * 8
    assert engine.forgot == 1
    assert sorted(engine.prompts) == crowd
