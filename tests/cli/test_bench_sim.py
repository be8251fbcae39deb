"""`holdfast bench sim` judges the simulator by published figures."""

import json

import pytest

from holdfast.cli import bench_sim, main

pytest.importorskip("rich")


def test_every_figure_has_a_row_and_a_verdict(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_sim, "TRACES", ("synthetic",))
    monkeypatch.setattr(bench_sim, "SPEED_GOAL", 0.0)  # speed is no matter of a test
    monkeypatch.setattr(bench_sim, "ROUNDS", 1)
    out = tmp_path / "sim.json"
    assert main(["bench", "sim", "--json", str(out)]) == 0
    rows = {row["what"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["synthetic.one_tier_5860"]["value"] == pytest.approx(0.315, abs=0.001)
    assert rows["synthetic.together"]["published"] == 2.36
    assert rows["h20.pool"]["ok"] is True
    assert rows["synthetic.speed"]["value"] > 0
