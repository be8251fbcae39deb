"""`holdfast bench traces` holds what it counts against what others published."""

import pytest

from holdfast.cli import main
from holdfast_bench.cli.bench import traces

pytest.importorskip("rich")


@pytest.fixture(autouse=True)
def _no_clock(monkeypatch):
    """Speed is no matter of a test."""
    monkeypatch.setattr(traces, "SPEED_GOAL", 0.0)


@pytest.fixture
def figures(reported):
    """Run `bench traces TRACE`, timing once; returns status and rows by name."""

    def run(trace):
        status, rows = reported("bench", "traces", trace, "--rounds", "1")
        return status, {row["what"]: row for row in rows}

    return run


def test_published_curves_are_met(figures) -> None:
    status, rows = figures("synthetic")
    assert status == 0
    assert [rows[f"synthetic.lru_{share}%"]["ok"] for share in (1, 5, 10, 25, 50)] == [True] * 5
    assert rows["synthetic.lru_half"]["limit"] > rows["synthetic.lru_half"]["value"] > 0.32
    assert "synthetic.ttl_300_s" in rows
    assert "synthetic.ttl_3600_s" not in rows  # the trace is shorter


def test_a_figure_out_of_tolerance_is_exit_code_1(figures, monkeypatch) -> None:
    monkeypatch.setitem(traces.SURVEY, "synthetic", (0.05, 0.155, 0.26, 0.443, 0.589))
    status, rows = figures("synthetic")
    assert status == 1
    assert rows["synthetic.lru_1%"]["ok"] is False


def test_a_trace_that_can_not_be_read_is_refused(tmp_path, capsys) -> None:
    status = main(["bench", "traces", str(tmp_path / "nothing")])
    assert status == 2
    assert "neither a file nor a shipped trace" in capsys.readouterr().err


def test_the_rows_of_a_users_trace_carry_its_file_name(figures, tmp_path) -> None:
    line = b'{"timestamp": 0, "input_length": 64, "output_length": 1, "hash_ids": [1]}\n'
    (tmp_path / "mine.jsonl").write_bytes(line * 3)
    status, rows = figures(tmp_path / "mine.jsonl")
    assert status == 0
    assert rows["mine.infinite"]["value"] == 2 / 3
    assert "mine.curve" not in rows  # too small to say anything about speed
