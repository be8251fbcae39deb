"""`holdfast bench` finds its subject, and each subject judges by its goals."""

import contextlib
import json

import pytest

from holdfast.cli import bench, bench_vllm, main
from holdfast.rig.load import Pairs
from holdfast.rig.race import Times

pytest.importorskip("rich")

FAST = Times(
    cold=[3.0, 3.0, 3.3, 3.0, 3.0],
    host=[0.1, 0.1, 0.1, 0.1, 0.1],
    disk=[0.2, 0.2, 0.2, 0.2, 0.2],
    lmcache=[0.12, 0.12, 0.12, 0.12, 0.12],
    missed={"host": 0, "disk": 1},
)
LONG = Times(cold=[8.0] * 5, host=[0.2] * 5, disk=[0.4] * 5, missed={"host": 0, "disk": 0})
EVEN = Pairs([10.0, 10.0, 11.0], [10.1, 10.1, 11.1])


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Run `bench vllm` on given times instead of real engines; return status and rows."""

    def run(times, pairs):
        monkeypatch.setattr(bench_vllm, "need_engine", lambda: None)
        monkeypatch.setattr(bench_vllm.model, "make", lambda _: tmp_path)
        monkeypatch.setattr(bench_vllm.race, "lay_track", lambda *_: None)
        monkeypatch.setattr(bench_vllm.document, "tokenizer_of", lambda _: None)
        monkeypatch.setattr(bench_vllm.document, "read_tokens", lambda *args: [0] * args[2])
        races = iter(times)
        asked = []

        def race(_track, prompt, _rounds, _tell):
            asked.append(len(prompt))
            return next(races)

        monkeypatch.setattr(bench_vllm.race, "race", race)
        monkeypatch.setattr(bench_vllm.load, "measure", lambda *_: pairs)
        target = tmp_path / "x.json"
        status = main(["bench", "vllm", "--json", str(target)])
        assert asked == [4096 + 16, 8192 + 16]
        return status, json.loads(target.read_text())["rows"]

    return run


def test_gains_are_medians_over_pairs_and_meet_their_goals(measured):
    status, rows = measured([FAST, LONG], EVEN)
    assert status == 0
    shown = [(row["what"], row.get("source"), row["goal"], row["ok"]) for row in rows]
    assert shown == [
        ("vllm.warm.4096", "host", 20.0, True),
        ("vllm.warm.4096", "disk", 12.0, True),
        ("vllm.lmcache.4096", "host", 1.0, True),
        ("vllm.warm.8192", "host", 35.0, True),
        ("vllm.warm.8192", "disk", 18.0, True),
        ("vllm.overhead", None, 2.0, True),
    ]
    host, disk, peer = rows[:3]
    assert host["value"] == pytest.approx(30.0)
    assert (host["cold_s"], host["warm_s"], host["rounds"]) == (3.0, 0.1, 5)
    assert disk["missed"] == 1
    assert peer["value"] == pytest.approx(1.2)
    assert rows[-1]["value"] == pytest.approx(1.0)
    assert rows[-1]["unit"] == "%"


def test_a_missed_goal_is_exit_code_1(measured):
    slow = Times(cold=[3.0] * 5, host=[0.2] * 5, disk=[0.2] * 5, missed={"host": 0, "disk": 0})
    status, rows = measured([slow, LONG], EVEN)
    assert status == 1
    assert [row["what"] for row in rows if row["ok"] is False] == ["vllm.warm.4096"]


def test_too_much_overhead_is_exit_code_1(measured):
    status, rows = measured([FAST, LONG], Pairs([10.0] * 3, [10.3] * 3))
    assert status == 1
    assert rows[-1]["ok"] is False


def test_too_few_rounds_are_refused(capsys):
    assert main(["bench", "vllm", "--rounds", "2"]) == 2
    assert "--rounds: 2 is fewer than 5; raise it" in capsys.readouterr().err


@pytest.mark.parametrize("subject", bench.SUBJECTS)
def test_every_subject_shows_its_own_options(subject, capsys):
    with contextlib.suppress(SystemExit):
        main(["bench", subject, "--help"])
    out = capsys.readouterr().out
    assert f"holdfast bench {subject}" in out
    assert "--json" in out


def test_an_unknown_subject_is_answered_with_the_known_ones(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "weather"])
    assert ended.value.code == 2
    assert "tiers" in capsys.readouterr().err


def test_help_lists_subjects_and_exit_codes(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    out = capsys.readouterr().out
    assert all(name in out for name in bench.SUBJECTS)
    assert "exit codes" in out
