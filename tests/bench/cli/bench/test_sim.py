"""`holdfast bench sim` judges the simulator by published figures."""

import pytest

from holdfast_bench.cli.bench import sim

pytest.importorskip("rich")


def test_every_figure_has_a_row_and_a_verdict(reported, monkeypatch):
    monkeypatch.setattr(sim, "TRACES", ("synthetic",))
    monkeypatch.setattr(sim, "SPEED_GOAL", 0.0)  # speed is no matter of a test
    status, found = reported("bench", "sim", "--quick", "--rounds", "1")
    rows = {row["what"]: row for row in found}
    assert status == 0
    assert rows["synthetic.one_tier_5860"]["value"] == pytest.approx(0.315, abs=0.001)
    assert rows["synthetic.together"]["published"] == 2.36
    assert rows["h20.pool"]["ok"] is True
    assert rows["fetch_rule.h800"]["published"] == 18.6
    assert rows["synthetic.speed"]["value"] > 0
