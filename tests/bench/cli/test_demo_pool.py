"""`demo --pool`: options, verdict and figures; its steps: `test_pool_demo_scenario.py`."""

import json

import pytest

from holdfast.cli import main
from holdfast_bench.cli import demo
from holdfast_bench.harness.completion import CompletionAnswer, MeasuredCompletion, TokenSources
from holdfast_bench.scenarios.pool_demo_scenario import PoolStep

pytest.importorskip("rich")

HIT, MISS = TokenSources(24, 0, {"pool": 1024}), TokenSources(1048, 0, {})


def step(name, fetched, *tokens, equal=True):
    asked = [MeasuredCompletion(CompletionAnswer((1,), (), 0.5), each) for each in tokens]
    spread = {"target-1": 1, "target-3": 1}
    return PoolStep(name, asked, equal, fetched, token_bytes=20_480.0, spread=spread)


COLD = step("prefill_on_a", 0, MISS, MISS)
SERVED = step("served_on_b", 2048, HIT, HIT)
KILLED = step("target_killed", 1024, HIT, MISS)
JOINED = step("target_joined", 2048, HIT, HIT)


@pytest.fixture
def walk(monkeypatch, engine_is_here):
    """Run the verb over given steps instead of real engines; return its exit code."""
    monkeypatch.setattr(demo, "_model", lambda name: name)
    monkeypatch.setattr(demo.pool_demo_scenario, "prompts_of_pool", lambda *given: [given])

    def run(steps, *options):
        def taken(setting):
            run.setting = setting
            yield from steps

        monkeypatch.setattr(demo.pool_demo_scenario, "walk", taken)
        return main(["demo", "--pool", "3", *options])

    return run


@pytest.mark.parametrize(("options", "plan"), [([], "best"), (["--plan", "held"], "held")])
def test_the_plan_option_sets_the_plan_of_the_hosts(walk, options, plan):
    assert walk([COLD], *options) == 0
    assert (walk.setting.plan, walk.setting.targets) == (plan, 3)


def test_a_pool_demo_with_all_steps_right_is_exit_code_0(walk, capsys):
    assert walk([COLD, SERVED, KILLED, JOINED]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "served_on_b 0.500 s: host B is asked about them; 48 tokens computed, 2048 from pool" in out
    )
    assert "Every output equals the engine's own, bit for bit" in out


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (step("served_on_b", 2048, HIT, HIT, equal=False), "output differs"),
        (step("served_on_b", 2048, HIT, MISS), "outputs equal, not from the expected tier"),
    ],
)
def test_a_wrong_output_or_a_missed_hit_is_exit_code_1(walk, capsys, bad, words):
    assert walk([COLD, bad]) == 1
    assert words in " ".join(capsys.readouterr().out.split())


def test_json_holds_every_figure_of_a_step(walk, capsys):
    walk([COLD, SERVED, KILLED, JOINED], "--json", "-")
    document = json.loads(capsys.readouterr().out)
    assert document["name"] == "demo pool"
    rows = {row["what"]: row for row in document["rows"]}
    assert list(rows) == list(demo.POOL.steps)
    killed = rows["target_killed"]
    assert (killed["ttft_s"], killed["contexts"], killed["tier"]) == (0.5, 2, "pool")
    assert (killed["computed_tokens"], killed["fetched_tokens"]) == (1072, 1024)
    assert killed["gb_per_s"] == pytest.approx(1024 * 20_480 / 0.5 / 1e9)
    assert killed["spread"] == {"target-1": 1, "target-3": 1}
    assert killed["equal"] is killed["ok"] is True
    assert rows["prefill_on_a"]["gb_per_s"] is None


def test_a_small_model_and_short_contexts_are_the_default(walk, monkeypatch):
    seen = []
    monkeypatch.setattr(demo, "_model", lambda name: seen.append(name) or name)
    monkeypatch.setattr(
        demo.pool_demo_scenario, "prompts_of_pool", lambda *given: seen.append(given) or []
    )
    walk([COLD])
    assert seen == ["small", ("small", None, 1024)]


@pytest.mark.parametrize("targets", ["0", "1", "99"])
def test_a_number_of_targets_out_of_range_is_refused(walk, capsys, targets):
    assert walk([COLD], "--pool", targets) == 2
    assert f"--pool: {targets} targets, not from 2 to 16" in capsys.readouterr().err
