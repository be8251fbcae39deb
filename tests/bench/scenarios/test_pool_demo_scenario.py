"""The pool's steps: real targets and hosts, engines that only save and fetch, strict verdicts."""

import os
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from holdfast.errors import ConfigError, HoldfastError
from holdfast.limits import BLOCK_TOKENS
from holdfast_bench.harness import pool as pool_rig
from holdfast_bench.harness import server
from holdfast_bench.harness.completion import CompletionAnswer, MeasuredCompletion, TokenSources
from holdfast_bench.scenarios import pool_demo_scenario
from holdfast_bench.scenarios.demo_scenario import DEMO_COVER_DEADLINE_MS, DemoSettings, Prompts
from holdfast_bench.scenarios.pool_demo_scenario import (
    CONTEXTS,
    PoolStep,
    check_targets,
    walk,
)

TOKENS = 2 * BLOCK_TOKENS
ANSWER = CompletionAnswer((1, 2), (), 0.5)


@pytest.fixture
def setting(tmp_path, monkeypatch, fake_engine):
    """Settings of the demo, with engines that need no model."""
    monkeypatch.setattr(server, "VllmServer", fake_engine)
    for limit in ("DEADLINE_S", "ASK_S"):  # on a busy machine, nothing is late
        monkeypatch.setattr(pool_rig, limit, 60.0)
    monkeypatch.setattr(server, "wait_all_ready", lambda _: None)
    monkeypatch.setattr(pool_demo_scenario, "ask", lambda engine, prompt, _: engine.ask(prompt))
    prompts = [
        Prompts([1000 * number + i for i in range(TOKENS)], [7] * 9, [8] * 9)
        for number in range(4 * CONTEXTS)
    ]
    return DemoSettings(tmp_path, Path("none"), "auto", prompts, "held", lambda _: None, targets=3)


def test_another_host_fetches_saved_contexts_after_targets_die_and_join(setting):
    with closing(walk(setting)) as demo:
        steps = {step.name: step for step in demo}
    assert list(steps) == ["prefill_on_a", "served_on_b", "target_killed", "target_joined"]
    assert [(step.name, step.cause, step.tiers) for step in steps.values() if not step.ok] == []
    all_tokens = CONTEXTS * TOKENS
    assert steps["prefill_on_a"].fetched_tokens == 0
    assert (steps["served_on_b"].fetched_tokens, steps["served_on_b"].tiers) == (
        all_tokens,
        ["pool"],
    )
    before, after = steps["served_on_b"].spread, steps["target_killed"].spread
    [dead] = before.keys() - after.keys()
    assert 0 < before[dead] < CONTEXTS
    assert steps["target_killed"].fetched_tokens == all_tokens - before[dead] * TOKENS
    joined = steps["target_joined"]
    assert joined.fetched_tokens == len(joined.asked) * TOKENS
    assert joined.spread.keys() == {*after, "target-4"}
    assert joined.spread["target-4"] > 0
    for host in ("host-a", "host-b"):
        assert "plan: held" in (setting.folder / host / "node.yaml").read_text()


def test_keys_and_tokens_are_for_their_owner_only(setting):
    with closing(walk(setting)) as demo:
        next(demo)
        for name in ("domain.key", "token.key", "token"):
            assert (setting.folder / name).stat().st_mode & 0o777 == 0o600
        config = (setting.folder / "target-1" / "node.yaml").read_text()
        assert "key_file" in config


def test_the_pool_demo_runs_without_root_and_ends_its_processes(setting, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    started = []
    node = pool_rig.NodeUnderTest
    monkeypatch.setattr(
        pool_rig, "NodeUnderTest", lambda *a, **k: started.append(node(*a, **k)) or started[-1]
    )
    with closing(walk(setting)) as demo:
        next(demo)
        assert len(started) == 5
        members = (setting.folder / "members.yaml").read_text()
        assert members.count("tcp://127.0.0.1:") == 3
        assert all(each.process.running for each in started)
    assert not any(each.process.running for each in started)


def test_the_engines_of_the_pool_demo_have_the_demo_cover_deadline(setting, monkeypatch):
    started = []
    monkeypatch.setattr(
        pool_demo_scenario,
        "start_engines",
        lambda _stack, _setting, kv_transfers: started.extend(kv_transfers.values()) or (1, 2),
    )
    hosts: Any = SimpleNamespace(start_host=lambda name, _: SimpleNamespace(address=name))
    with ExitStack() as stack:
        pool_demo_scenario._PoolDemo(stack, setting, hosts)
    extra = [kv_transfer["kv_connector_extra_config"] for kv_transfer in started]
    assert [each["holdfast"] for each in extra] == ["host-a", "host-b"]
    assert {each["cover_deadline_ms"] for each in extra} == {DEMO_COVER_DEADLINE_MS}


def test_targets_that_hold_less_than_they_were_given_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(pool_rig, "WAIT_TIMEOUT_S", 0.1)
    pool = pool_rig.PoolUnderTest.__new__(pool_rig.PoolUnderTest)
    pool.targets, pool._folder = {}, tmp_path
    with pytest.raises(HoldfastError, match=r"the targets hold 0 blocks of 8 after 0 s"):
        pool.wait_holding(8)


@pytest.mark.parametrize("targets", [-1, 0, 1, 17])
def test_a_pool_of_fewer_than_2_or_more_than_16_targets_is_refused(targets):
    with pytest.raises(ConfigError, match=rf"--pool: {targets} targets, not from 2 to 16"):
        check_targets(targets)


def step(fetched, *tokens, equal=True):
    return PoolStep(
        "served_on_b",
        [MeasuredCompletion(ANSWER, each) for each in tokens],
        equal,
        fetched,
        token_bytes=1e6,
    )


HIT, MISS = TokenSources(40, 0, {"pool": 1024}), TokenSources(1064, 0, {})


@pytest.mark.parametrize(
    ("given", "ok"),
    [
        (step(2048, HIT, HIT), True),
        (step(1024, HIT, MISS), True),
        (step(0, MISS, MISS), True),
        (step(2048, HIT, MISS), False),
        (step(0, HIT, MISS), False),
        (step(2048, HIT, HIT, equal=False), False),
        (step(2048, HIT, TokenSources(40, 0, {"host": 1024})), False),
    ],
)
def test_a_step_is_ok_only_if_equal_and_fetched_completely_from_the_pool(given, ok):
    assert given.ok is ok


def test_a_step_has_the_mean_ttft_summed_tokens_and_the_speed_of_hits():
    slow = msgspec.structs.replace(ANSWER, ttft_s=1.5)
    asked = [MeasuredCompletion(ANSWER, HIT), MeasuredCompletion(slow, MISS)]
    both = PoolStep("x", asked, True, 1024, token_bytes=1e6)
    assert both.ttft_s == 1.0
    assert (both.computed_tokens, both.fetched_tokens) == (1104, 1024)
    assert both.gb_per_s == pytest.approx(1024 * 1e6 / 0.5 / 1e9)
    assert step(0, MISS).gb_per_s is None
