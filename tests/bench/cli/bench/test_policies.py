"""`holdfast bench policies` replays the public traces and holds policies to what is known."""

from pathlib import Path

from holdfast.cli import main
from holdfast_bench.cli.bench import policies

TRACES = str(Path(__file__).resolve().parents[4] / "traces")
TAU = [subject for subject in policies.SUBJECTS if subject.name == "tau-bench"]


def test_every_policy_is_measured_beside_the_bound(monkeypatch, reported):
    monkeypatch.setattr(policies, "SUBJECTS", TAU)
    status, found = reported("bench", "policies", "--traces", TRACES)
    rows = {row["what"]: row for row in found}
    assert status == 0
    names = {"belady", "cost_aware.hinted", *policies.POLICIES}
    assert set(rows) == {f"tau-bench.{blocks}.{name}" for blocks in (30, 60) for name in names}
    assert abs(rows["tau-bench.60.leaf_lru"]["value"] - 0.859) < 0.001


def test_a_figure_that_misses_its_known_value_fails_the_run(monkeypatch, reported):
    wrong = TAU[0]._replace(known={30: (0.5, 0.611)})
    monkeypatch.setattr(policies, "SUBJECTS", (wrong,))
    status, rows = reported("bench", "policies", "--traces", TRACES)
    assert status == 1
    missed = [row["what"] for row in rows if row["ok"] is False]
    assert missed == ["tau-bench.30.leaf_lru"]


def test_a_folder_without_the_traces_is_named(tmp_path, capsys):
    assert main(["bench", "policies", "--traces", str(tmp_path)]) == 2
    assert "has no mooncake_conversation_trace.jsonl.gz" in capsys.readouterr().err
