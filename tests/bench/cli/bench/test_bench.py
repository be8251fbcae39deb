"""`holdfast bench` finds its subject, and each subject judges by its goals."""

import contextlib
import json

import msgspec
import pytest

from holdfast import report
from holdfast.cli import main
from holdfast.errors import ConfigError
from holdfast.limits import MIB
from holdfast_bench.cli import bench, measuring
from holdfast_bench.cli.bench import seal, vllm
from holdfast_bench.scenarios import ttft_race
from holdfast_bench.scenarios.first_token import FirstTokenPairs
from holdfast_bench.scenarios.throughput import ThroughputPairs
from holdfast_bench.scenarios.ttft_race import LayoutTimes, RaceTimes

pytest.importorskip("rich")

FAST = RaceTimes(
    cold=[3.0, 3.0, 3.3, 3.0, 3.0],
    host=[0.1, 0.1, 0.1, 0.1, 0.1],
    disk=[0.2, 0.2, 0.2, 0.2, 0.2],
    lmcache=[0.12, 0.12, 0.12, 0.12, 0.12],
    missed={"host": 0, "disk": 1},
)
LONG = RaceTimes(cold=[8.0] * 5, host=[0.2] * 5, disk=[0.4] * 5, missed={"host": 0, "disk": 0})
LAYOUTS = LayoutTimes([0.1] * 5, [0.11] * 5, {"exact": 0, "portable": 0})
FIRST = FirstTokenPairs([[1.0, 2.0, 4.0, 3.0]] * 4, [[1.01, 2.02, 4.04, 3.03]] * 4)
EVEN = ThroughputPairs([10.0, 10.0, 11.0], [10.1, 10.1, 11.1])


@pytest.fixture
def measured(monkeypatch, tmp_path, engine_is_here, reported):
    """Run `bench vllm` on given times instead of real engines; return status and rows."""

    def run(times, pairs, *options, first_tokens=FIRST, layouts=LAYOUTS):
        monkeypatch.setattr(vllm.model, "make", lambda _: tmp_path)
        monkeypatch.setattr(vllm.ttft_race, "lay_track", lambda *_: None)
        monkeypatch.setattr(vllm.document, "tokenizer_of", lambda _: None)
        monkeypatch.setattr(vllm.document, "read_tokens", lambda *args: [0] * args[2])
        races = iter(times)
        asked = []

        def race(_track, prompt, _rounds, _tell):
            asked.append(len(prompt))
            return next(races)

        monkeypatch.setattr(vllm.ttft_race, "race", race)
        monkeypatch.setattr(vllm.ttft_race, "compare_layouts", lambda *_: layouts)
        monkeypatch.setattr(vllm.throughput, "measure", lambda *_: pairs)
        monkeypatch.setattr(vllm.first_token, "measure", lambda *_: first_tokens)
        status, rows = reported("bench", "vllm", *options)
        assert asked == [4096 + 16, 8192 + 16][: len(times)]
        return status, rows

    return run


def row_of(rows, what):
    (row,) = [row for row in rows if row["what"] == what]
    return row


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
        ("vllm.portable.4096", "host", 1.15, True),
        ("vllm.overhead", None, 2.0, True),
        *[
            (f"vllm.first_token.{clients}.{figure}", None, 1.02, True)
            for clients in (1, 2, 8)
            for figure in ("mean", "p90")
        ],
    ]
    host, disk, peer = rows[:3]
    assert host["value"] == pytest.approx(30.0)
    assert (host["cold_s"], host["warm_s"], host["rounds"]) == (3.0, 0.1, 5)
    assert disk["missed"] == 1
    assert peer["value"] == pytest.approx(1.2)
    assert row_of(rows, "vllm.portable.4096")["value"] == pytest.approx(1.1)
    overhead, _, p90 = rows[6:9]
    assert (overhead["value"], overhead["unit"]) == (pytest.approx(1.0), "%")
    assert p90["value"] == pytest.approx(4.04 / 4.0)
    assert (p90["alone_s"], p90["requests"], p90["rounds"]) == (4.0, 16, 4)
    assert p90["standard_error"] == pytest.approx(0)


def test_a_missed_goal_is_exit_code_1(measured):
    slow = RaceTimes(cold=[3.0] * 5, host=[0.2] * 5, disk=[0.2] * 5, missed={"host": 0, "disk": 0})
    status, rows = measured([slow, LONG], EVEN)
    assert status == 1
    assert [row["what"] for row in rows if row["ok"] is False] == ["vllm.warm.4096"]


def test_a_peer_with_misses_is_not_judged(measured):
    missed = FAST.missed | {ttft_race.PEER: 2}
    loads = ThroughputPairs([10.0] * 5, [10.1] * 5)
    status, rows = measured([msgspec.structs.replace(FAST, missed=missed), LONG], loads)
    assert status == 0
    [peer] = [row for row in rows if row["what"] == "vllm.lmcache.4096"]
    assert (peer["missed"], peer["goal"], peer["ok"]) == (2, None, None)
    assert row_of(rows, "vllm.overhead")["standard_error"] == pytest.approx(0)


def test_portable_blocks_that_are_late_are_exit_code_1_and_missed_ones_are_not_judged(measured):
    late = LayoutTimes([0.1] * 5, [0.12] * 5, {"exact": 0, "portable": 0})
    status, rows = measured([FAST, LONG], EVEN, layouts=late)
    assert (status, row_of(rows, "vllm.portable.4096")["ok"]) == (1, False)
    missed = msgspec.structs.replace(late, missed={"exact": 0, "portable": 1})
    status, rows = measured([FAST, LONG], EVEN, layouts=missed)
    assert (status, row_of(rows, "vllm.portable.4096")["ok"]) == (0, None)


def test_too_much_overhead_is_exit_code_1(measured):
    status, rows = measured([FAST, LONG], ThroughputPairs([10.0] * 3, [10.3] * 3))
    assert status == 1
    assert row_of(rows, "vllm.overhead")["ok"] is False


def test_a_first_token_that_is_later_without_reuse_is_exit_code_1(measured):
    late = FirstTokenPairs([[1.0, 4.0]] * 4, [[1.0, 4.5]] * 4)
    status, rows = measured([FAST, LONG], EVEN, first_tokens=late)
    assert status == 1
    missed = [row["what"] for row in rows if row["ok"] is False]
    assert len(missed) == 6
    assert all("vllm.first_token" in what for what in missed)


def test_quick_leaves_out_the_longest_context(measured):
    status, rows = measured([FAST], EVEN, "--quick")
    assert status == 0
    names = {row["what"] for row in rows if "first_token" not in row["what"]}
    assert names == {"vllm.warm.4096", "vllm.lmcache.4096", "vllm.portable.4096", "vllm.overhead"}


TIMED = sorted(bench.SUBJECTS.keys() - {"policies"})
"""Subjects whose figures differ from run to run."""


@pytest.mark.parametrize("subject", TIMED)
def test_too_few_rounds_are_refused_before_the_work(subject, capsys):
    assert main(["bench", subject, "--rounds", "0"]) == 2
    assert "--rounds: 0 is fewer than " in capsys.readouterr().err


@pytest.mark.parametrize("subject", ["pool", "quota", "seal", "tiers"])
def test_a_missing_folder_is_refused_with_its_path(subject, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("holdfast_bench.cli.bench.seal.core_rows", lambda _: [])
    row = report.at_most("index", 1.0, "us")
    monkeypatch.setattr("holdfast_bench.measure.index.coverage_row", lambda _: row)
    monkeypatch.setattr("holdfast_bench.measure.index.plan_row", lambda _: row)
    assert main(["bench", subject, "--folder", str(tmp_path / "nowhere")]) == 2
    assert "nowhere: No such file or directory; name a folder" in capsys.readouterr().err


@pytest.mark.parametrize(("speed", "status"), [(9.0, 0), (7.0, 1)])
def test_standard_output_holds_only_the_json_report(speed, status, monkeypatch, capsys):
    rows = [report.at_least("seal.core", speed, "GB/s", 8.0)]
    monkeypatch.setattr("holdfast_bench.cli.bench.seal.need_cipher", lambda: None)
    monkeypatch.setattr("holdfast_bench.cli.bench.seal.core_rows", lambda _: rows)
    assert main(["bench", "seal", "--quick", "--json", "-"]) == status
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert document["name"] == "bench seal"
    assert [row["ok"] for row in document["rows"]] == [status == 0]
    assert "seal.core" in said.err


def test_a_bench_that_is_broken_off_keeps_what_it_measured(monkeypatch, tmp_path, capsys):
    def measure(_options, _status):
        yield report.at_least("seal.core", 5.5, "GB/s", goal=5)
        raise KeyboardInterrupt

    monkeypatch.setattr(seal, "measure", measure)
    target = tmp_path / "seal.json"
    target.write_text("the report of an earlier run")
    assert main(["bench", "seal", "--json", str(target)]) == 130
    document = json.loads((tmp_path / "seal.json.part").read_text())
    assert document["broken_off"] is True
    assert [(row["what"], row["value"]) for row in document["rows"]] == [("seal.core", 5.5)]
    assert target.read_text() == "the report of an earlier run"
    said = capsys.readouterr().out
    assert "holdfast bench seal, broken off" in said
    assert f"written until then: {target}.part" in said


def test_a_bench_that_never_began_leaves_nothing(monkeypatch, tmp_path):
    def measure(_options, _status):
        raise ConfigError("no such machine")
        yield

    monkeypatch.setattr(seal, "measure", measure)
    assert main(["bench", "seal", "--json", str(tmp_path / "seal.json")]) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("subject", ["calibrate", "engines", "plan", "vllm"])
def test_a_bench_without_vllm_installed_names_the_remedy(subject, monkeypatch, capsys):
    monkeypatch.setattr(measuring, "find_spec", lambda _: None)
    assert main(["bench", subject]) == 2
    assert "vLLM is not installed here: `make setup` brings its CPU build" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (".", "cannot write '.': Is a directory; choose"),
        ("/nowhere/x", "cannot write '/nowhere/x': No such file or"),
        ("-", "progress and results are printed there; name a file"),
    ],
)
def test_a_ladder_file_that_can_not_be_written_is_refused_before_the_work(target, words, capsys):
    assert main(["bench", "calibrate", "--out", target]) == 2
    assert words in capsys.readouterr().err


def test_a_bench_without_a_gpu_names_the_remedy(monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "gpu"]) == 2
    assert "no GPU that torch can use; run it where an engine does" in capsys.readouterr().err


@pytest.mark.parametrize("subject", bench.SUBJECTS)
def test_every_subject_shows_its_own_options(subject, capsys):
    with contextlib.suppress(SystemExit):
        main(["bench", subject, "--help"])
    out = capsys.readouterr().out
    assert f"holdfast bench {subject}" in out
    assert "--json" in out
    assert "--quick" in out


def test_an_unknown_subject_is_refused_with_the_known_subjects(capsys):
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


@pytest.mark.parametrize("subject", bench.SUBJECTS)
def test_the_help_of_each_subject_ends_with_the_exit_codes(capsys, subject):
    with pytest.raises(SystemExit):
        main(["bench", subject, "--help"])
    assert "exit codes: 0 all is well" in capsys.readouterr().out


def test_the_cost_of_metrics_is_measured_on_a_node_and_a_target_that_are_scraped(
    reported, monkeypatch, tmp_path_factory
):
    from holdfast_bench.cli.bench import metrics

    monkeypatch.setattr(metrics, "PASS_S", 0.2)
    monkeypatch.setattr(metrics, "RECORDS_BYTES", 256 * MIB)
    folder = tmp_path_factory.mktemp("m")  # short: a socket is in it
    _, rows = reported("bench", "metrics", "--rounds", "1", "--folder", folder)
    assert [row["what"] for row in rows] == [
        "metrics.counting",
        "metrics.scrape.cpu",
        "metrics.scraped",
        "metrics.scraped.disk",
        "metrics.scraped.save",
        "metrics.scraped.sealed",
        "metrics.scraped.get",
        "metrics.scraped.put",
    ]
    assert all(row["value"] > 0 for row in rows)
