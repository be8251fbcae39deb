"""`holdfast soak`: what it runs, for how long, and what it says of it."""

import json
import logging
import signal
import sys

import pytest

from holdfast.cli import main
from holdfast_bench.campaigns.campaign import Campaign, CampaignBudget, CampaignResult
from holdfast_bench.cli import soak

pytest.importorskip("rich")


@pytest.fixture(autouse=True)
def _as_it_was():
    interval, log = sys.getswitchinterval(), logging.getLogger("holdfast")
    level = log.level
    yield
    sys.setswitchinterval(interval)
    log.setLevel(level)


PARTS = ("up", "of.wood", "of.stone")


@pytest.fixture
def campaign(monkeypatch):
    """Put one campaign in the place of all: it fails as often as its seed says."""

    class Module:
        @staticmethod
        def run(order):
            for name, parts in (("made.up", 1), ("made.of.wood", 2), ("made.of.stone", 2)):
                result = CampaignResult(name, "tries")
                for _ in order.share(parts).rounds(result):
                    result.tried += 1
                    wrong = name == "made.up" and result.tried <= order.seed
                    result.expect(not wrong, f"try {result.tried} was wrong")
                yield result

    monkeypatch.setattr(soak, "CAMPAIGNS", (Campaign("made", "up", 8, "tries", PARTS),))
    monkeypatch.setattr(soak, "import_module", lambda name: Module)


def test_soak_reports_tries_failures_and_the_bound(campaign, reported, tmp_path, capsys):
    status, (row, *_) = reported("soak", "--seed", "0", "--folder", tmp_path)
    assert status == 0
    assert (row["what"], row["value"], row["goal"], row["ok"]) == ("soak.made.up", 0, 0, True)
    assert (row["tried"], row["of"], row["seed"], row["failures"]) == (8, "tries", 0, [])
    assert row["bound_95"] == pytest.approx(3 / 8)
    assert "soak.made.up" in capsys.readouterr().out


def test_a_single_verdict_over_many_samples_has_no_failure_rate_bound():
    result = CampaignResult("made.up", "samples")
    result.tried, result.each_may_fail = 300, False
    assert soak.row_of(result, 1, 1.0).more["bound_95"] is None


def test_a_campaign_whose_rounds_make_no_tries_ends(campaign, tmp_path):
    order = CampaignBudget(tries=2, seed=1, folder=tmp_path)
    result = CampaignResult("made.up", "tries")
    rounds = len(list(order.rounds(result)))
    assert (rounds, result.failures) == (66, ["66 rounds made only 0 tries"])


def test_one_wrong_answer_fails_the_soak_and_is_printed(campaign, tmp_path, capsys):
    assert main(["soak", "made", "--faults", "5", "--seed", "2", "--folder", str(tmp_path)]) == 1
    assert "soak.made.up: try 2 was wrong" in capsys.readouterr().err


def test_the_minutes_option_bounds_a_soak(campaign, tmp_path):
    assert main(["soak", "--minutes", "0.001", "--seed", "0", "--folder", str(tmp_path)]) == 0


def test_an_interrupted_soak_ends_after_its_round_and_reports_its_tries(
    campaign, tmp_path, monkeypatch, capsys
):
    """Hours of a campaign are not lost with Ctrl-C, and neither is the report of an earlier run."""
    rounds = CampaignBudget.rounds

    def interrupted(self, result):
        for rng in rounds(self, result):
            yield rng
            if result.tried == 3:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(CampaignBudget, "rounds", interrupted)
    before = signal.getsignal(signal.SIGINT)
    target = tmp_path / "soak.json"
    target.write_text("the report of an earlier run")
    options = ["--seed", "1", "--folder", str(tmp_path), "--json", str(target)]
    assert main(["soak", *options]) == 130
    document = json.loads((tmp_path / "soak.json.part").read_text())
    assert document["broken_off"] is True
    assert [(row["what"], row["tried"]) for row in document["rows"]] == [("soak.made.up", 3)]
    assert target.read_text() == "the report of an earlier run"
    said = capsys.readouterr().err
    assert "stops after this round" in said
    assert "soak.made.up: try 1 was wrong" in said
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("error", "status"), [(OSError(28, "No space"), 1), (KeyboardInterrupt, 130)]
)
def test_rows_before_an_error_or_a_second_interrupt_are_kept(
    campaign, tmp_path, monkeypatch, error, status
):
    rounds = CampaignBudget.rounds

    def broken(self, result):
        yield from rounds(self, result)
        if result.what == "made.of.wood":
            raise error

    monkeypatch.setattr(CampaignBudget, "rounds", broken)
    target = tmp_path / "soak.json"
    options = ["--seed", "0", "--folder", str(tmp_path), "--json", str(target)]
    assert main(["soak", *options]) == status
    document = json.loads((tmp_path / "soak.json.part").read_text())
    assert [row["what"] for row in document["rows"]] == ["soak.made.up"]
    assert not target.exists()


@pytest.mark.parametrize(
    ("options", "tried"),
    [
        (["made.up"], {"up": 8}),
        (["made.of"], {"of.wood": 4, "of.stone": 4}),
        (["made.of.stone"], {"of.stone": 4}),
        (["made.of.stone", "--faults", "6"], {"of.stone": 6}),
        (["made", "--faults", "6"], {"up": 6, "of.wood": 3, "of.stone": 3}),
        (["made.up", "made.of.wood"], {"up": 8, "of.wood": 4}),
        (["made.up", "made.up"], {"up": 8}),
    ],
)
def test_a_part_makes_its_share_of_the_tries_or_the_requested_number(
    campaign, reported, tmp_path, options, tried
):
    status, rows = reported("soak", *options, "--seed", "0", "--folder", tmp_path)
    assert status == 0
    assert [(row["what"].removeprefix("soak.made."), row["tried"]) for row in rows] == list(
        tried.items()
    )


@pytest.mark.parametrize("part", ["made.of.iron", "made.o", "made.", "made.up.there"])
def test_an_unknown_part_is_refused_before_the_work(campaign, tmp_path, monkeypatch, capsys, part):
    monkeypatch.setattr(soak, "import_module", None)
    assert main(["soak", "made.up", part, "--seed", "1", "--folder", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"campaign '{part}' is unknown" in said
    assert "made.up, made.of.wood, made.of.stone" in said
    assert "wrong" not in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["nothing"], "campaign 'nothing' is unknown; choose from: flips"),
        (["--faults", "0"], "--faults: 0 is not above 0; raise it"),
        (["--minutes", "-1"], "--minutes: -1 is not above 0; raise it"),
        (["--minutes", "nan"], "--minutes: nan is not above 0; raise it"),
    ],
)
def test_an_invalid_soak_option_is_a_usage_error(options, words, capsys):
    assert main(["soak", *options]) == 2
    assert words in capsys.readouterr().err
