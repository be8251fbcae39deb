"""One conversation from engine to engine, with a tiny model: vLLM, transformers, vLLM again."""

import json

import pytest

from holdfast.cli import main
from holdfast_bench.harness import model
from holdfast_bench.peers import sglang_environment
from holdfast_bench.scenarios import engines_demo_scenario

pytest.importorskip("transformers")
pytest.importorskip("rich")


@pytest.fixture(autouse=True)
def without_sglang(request, monkeypatch):
    """Leave SGLang out, which takes minutes to start, except in the long test."""
    if not request.node.get_closest_marker("soak"):
        monkeypatch.setattr(sglang_environment, "installed", lambda: False)


def run_demo(folder, monkeypatch):
    """Return the report's rows by name; raise AssertionError unless the demo succeeded."""
    monkeypatch.setattr(model, "default_folder", lambda name: folder / name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    figures = folder / "demo.json"
    options = ["--engines", "--model", "tiny", "--tokens", "1024", "--plan", "held"]
    status = main(["demo", *options, "--json", str(figures), "--keep", str(folder / "kept")])
    rows = {row["what"]: row for row in json.loads(figures.read_text())["rows"]}
    assert status == 0, rows
    assert all(row["difference"] < 1e-3 for row in rows.values())
    return {name: (row["fetched_tokens"], row["tier"]) for name, row in rows.items()}


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_vllm_goes_on_behind_what_transformers_wrote_behind_what_vllm_wrote(tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    assert run_demo(tmp_path, monkeypatch) == {
        "vllm_reads": (0, ""),
        "transformers": (1024, "host"),
        "vllm": (1152, "host"),
    }


def test_without_vllm_a_model_that_is_loaded_again_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(engines_demo_scenario, "find_spec", lambda name: None)
    monkeypatch.setattr("holdfast_bench.cli.demo.find_spec", lambda name: None)
    assert run_demo(tmp_path, monkeypatch) == {
        "transformers_reads": (0, ""),
        "transformers": (1024, "host"),
    }


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_sglang_goes_on_behind_what_transformers_wrote(tmp_path, monkeypatch):
    sglang_environment.install()
    monkeypatch.setattr(engines_demo_scenario, "find_spec", lambda name: None)
    monkeypatch.setattr("holdfast_bench.cli.demo.find_spec", lambda name: None)
    assert run_demo(tmp_path, monkeypatch) == {
        "transformers_reads": (0, ""),
        "transformers": (1024, "host"),
        "sglang": (1024, "storage"),
    }
