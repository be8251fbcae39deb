"""`holdfast bench kinds` judges the gain of each kind of model, on given times."""

import pytest

from holdfast.errors import ConfigError
from holdfast_bench.cli.bench import kinds
from holdfast_bench.harness import kind_models
from holdfast_bench.scenarios.model_kinds import KindTimes

pytest.importorskip("rich")

FULL = kind_models.FULL_TOKEN_BYTES * kinds.TOKENS


@pytest.fixture
def measured(monkeypatch, tmp_path, engine_is_here, reported):
    """Run the bench on given times instead of real engines; return status and rows."""

    def run(times, *options):
        monkeypatch.setattr(kinds.kind_models, "make", lambda _: tmp_path)
        monkeypatch.setattr(kinds.document, "tokenizer_of", lambda _: None)
        monkeypatch.setattr(kinds.document, "read_tokens", lambda *args: [0] * args[2])
        monkeypatch.setattr(kinds.model_kinds, "measure", lambda *_: times)
        return reported("bench", "kinds", *options)

    return run


def test_each_kind_has_its_gain_and_its_bytes_beside_full_attention(measured):
    times = KindTimes([3.0, 3.3, 3.0], [0.1, 0.1, 0.2], 0, FULL, FULL / 4)
    status, rows = measured(times)
    assert status == 0
    shown = {row["what"]: (row["value"], row["goal"], row["ok"]) for row in rows}
    for kind in ("full", "window", "half_window", "recurrent"):
        assert shown[f"kinds.{kind}.warm.4096"] == (pytest.approx(30.0), 10.0, True)
        assert shown[f"kinds.{kind}.stored"] == (1.0, None, None)
        assert shown[f"kinds.{kind}.fetched"] == (0.25, None, None)


def test_a_small_gain_misses_the_goal_and_a_missed_context_has_no_verdict(measured):
    slow = KindTimes([1.0] * 3, [0.5] * 3, 0, FULL, FULL)
    status, rows = measured(slow, "--kind", "window")
    assert (status, rows[0]["ok"]) == (1, False)
    missed = KindTimes([1.0] * 3, [1.0] * 3, 2, FULL, 0)
    status, rows = measured(missed, "--kind", "window")
    assert (status, rows[0]["ok"], rows[0]["missed"]) == (0, None, 2)


def test_a_model_of_an_unknown_kind_cannot_be_made():
    with pytest.raises(ConfigError, match=r"'sparse' is not one.*full, window"):
        kind_models.make("sparse")


def test_a_quick_run_measures_one_kind(measured):
    _, rows = measured(KindTimes([3.0], [0.1], 0, FULL, FULL), "--quick")
    assert {row["what"].split(".")[1] for row in rows} == {kinds.QUICK_KIND}
