"""The whole demo with a tiny model: real node, real engines, every step right."""

import json

import pytest

from holdfast.cli import main
from holdfast_bench.harness import model

pytest.importorskip("vllm")
pytest.importorskip("rich")


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_every_step_of_the_demo_is_right(tmp_path, monkeypatch):
    monkeypatch.setattr(model, "default_folder", lambda name: tmp_path / name)
    figures = tmp_path / "demo.json"
    # A tiny model may compute sooner than a busy machine reads: the plans have tests of their own.
    options = ["--model", "tiny", "--tokens", "2048", "--plan", "held", "--json", str(figures)]
    status = main(["demo", *options, "--keep", str(tmp_path)])
    rows = {row["what"]: row for row in json.loads(figures.read_text())["rows"]}
    assert [name for name, row in rows.items() if not row["equal"]] == []
    assert status == 0
    assert rows.pop("cold")["fetched_tokens"] == 0
    assert {name: row["fetched_tokens"] for name, row in rows.items()} == {
        "warm": 2048,
        "engine_restart": 2048,
        "node_restart": 2048,
        "second_engine": 2048,
        "follow_up": 2048,
    }
    assert rows["warm"]["tier"] == "host"
    assert rows["node_restart"]["tier"] == "disk"
    assert rows["node_restart"]["reason"].startswith("fetch all 16 blocks from disk")
