"""The demo's options, verdict and figures; the demo itself runs in `scenarios/test_demo.py`."""

import json

import pytest

from holdfast import report
from holdfast.cli import main
from holdfast.errors import HoldfastError
from holdfast_bench.cli import demo, demo_steps, measuring
from holdfast_bench.harness.completion import CompletionAnswer, MeasuredCompletion, TokenSources
from holdfast_bench.scenarios.demo_scenario import DemoStep

pytest.importorskip("rich")


def answered(ttft_s):
    return CompletionAnswer((1, 2), (), ttft_s)


COLD = DemoStep(
    "cold", [MeasuredCompletion(answered(3.0), TokenSources(4136, 0, {}))], equal=True, fetched=0
)
WARM = DemoStep(
    "warm",
    [MeasuredCompletion(answered(0.1), TokenSources(40, 0, {"host": 4096}))],
    True,
    4096,
    token_bytes=20_480,
)
WRONG = DemoStep(
    "warm", [MeasuredCompletion(answered(0.1), TokenSources(40, 0, {"host": 4096}))], False, 4096
)
MISSED = DemoStep(
    "warm",
    [MeasuredCompletion(answered(3.0), TokenSources(4136, 0, {}))],
    True,
    4096,
    reason="fetch 32 of 32",
    cause="the connector: late: the node did not say",
)


@pytest.fixture
def walk(monkeypatch, engine_is_here, tmp_path):
    """Run the verb over given steps instead of real engines; return its exit code."""

    def setting(_args, folder, _tell):
        (folder / "engine-a.log").write_text("what the engine said")

    monkeypatch.setattr(demo, "_setting", setting)
    monkeypatch.setattr(measuring, "PRIVATE_PARENT", str(tmp_path))

    def run(steps, *options):
        monkeypatch.setattr(demo.demo_scenario, "walk", lambda _: (step for step in steps))
        return main(["demo", *options])

    return run


def test_a_demo_with_all_steps_right_is_exit_code_0(walk, capsys):
    assert walk([COLD, WARM]) == 0
    out = capsys.readouterr().out
    assert "30x sooner" in out
    assert "4096 from host" in out
    assert "Every output equals the engine's own, bit for bit" in " ".join(out.split())


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (WRONG, "output differs"),
        (MISSED, "output equal, not from the expected tier"),
        (MISSED, "warm: the connector: late: the node did not say."),
        (MISSED, "logs: "),
    ],
)
def test_a_wrong_output_or_a_missed_hit_is_exit_code_1(walk, capsys, bad, words):
    assert walk([COLD, bad]) == 1
    assert words in " ".join(capsys.readouterr().out.split())


def test_standard_output_holds_only_the_json_report(walk, capsys):
    walk([COLD, WARM], "--json", "-")
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["name"] == "demo"
    cold, warm = document["rows"]
    assert (cold["what"], cold["tier"], cold["fetched_tokens"], cold["gb_per_s"]) == (
        "cold",
        "",
        0,
        None,
    )
    assert warm["ttft_s"] == warm["value"] == 0.1
    assert warm["unit"] == "s"
    assert (warm["computed_tokens"], warm["fetched_tokens"], warm["tier"]) == (40, 4096, "host")
    assert warm["equal"] is True
    assert warm["reason"] == ""
    assert warm["ok"] is True
    assert "30x sooner" in captured.err


def test_a_report_that_cannot_be_written_is_noticed_before_the_work(walk, tmp_path, capsys):
    assert walk([COLD, WARM], "--json", str(tmp_path)) == 2
    assert "sooner" not in capsys.readouterr().out


def test_a_demo_without_vllm_installed_names_the_remedy(monkeypatch, capsys):
    monkeypatch.setattr(measuring, "find_spec", lambda _: None)
    assert main(["demo"]) == 2
    assert "vLLM is not installed here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tokens", "1000"], "--tokens: 1000 is not a multiple of 1024"),
        (["--model", "/nowhere"], "--model: '/nowhere' holds no tokenizer.json"),
        (["--document", "/nowhere"], "--document: cannot read '/nowhere'"),
    ],
)
def test_bad_options_name_value_and_remedy(options, words, capsys, monkeypatch, tmp_path):
    pytest.importorskip("vllm")
    monkeypatch.setattr(demo.model, "default_folder", lambda name: tmp_path / name)
    assert main(["demo", "--model", "tiny", *options]) == 2
    assert words in capsys.readouterr().err


def test_an_engine_that_dies_is_exit_code_1_with_its_message(monkeypatch, walk, capsys):
    def dies(_):
        raise HoldfastError("engine-a ended with status 1")
        yield

    assert walk([COLD]) == 0
    monkeypatch.setattr(demo.demo_scenario, "walk", dies)
    assert main(["demo"]) == 1
    assert "engine-a ended with status 1" in capsys.readouterr().err


def test_every_step_of_the_demo_has_a_description():
    assert list(demo.ONE_NODE.steps) == [
        "cold",
        "warm",
        "engine_restart",
        "node_restart",
        "second_engine",
        "follow_up",
    ]


def test_rows_follow_the_one_report_shape():
    document = json.loads(report.to_json(report.Report("demo", [demo_steps.row(WARM, COLD)])))
    assert {"what", "value", "unit", "limit", "ratio", "goal", "ok"} <= set(document["rows"][0])
