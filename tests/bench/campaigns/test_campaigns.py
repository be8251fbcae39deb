"""A slice of every campaign: the same command that anyone can run for as long as they like."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.errors import Outcome
from holdfast.store import sealing, verify
from holdfast.testing import payloads
from holdfast_bench.campaigns import chaos, chaos_proxy, flips, reopened, torn, workload
from holdfast_bench.campaigns.campaign import CAMPAIGNS, CampaignBudget

pytest.importorskip("rich")

SLICES = {
    "crash": 100,
    "flips": 1_500,
    "reopened": 2_000,
    "torn": 750,
    "injected": 750,
    "durable": 40,
    "forged": 20_000,
    "timing": 10_000,
    "fuzz": 2_000,
    "locks": 2_000,
    "chaos": len(chaos.FAULTS),
}
"""How much of each; the longest comes first."""

ALONE = ("timing", "chaos")
"""These depend on the clock: no other campaign of this file runs beside them."""

LATE = re.compile(r"a (write|held|read) took |[\d.]+ s until requests to ")
"""Failures of `chaos` that a busy machine causes; `make soak` counts them."""


def wrong(rows):
    """Return the failures that no busy machine explains."""
    return [words for row in rows for words in row["failures"] if not LATE.match(words)]


def ended_well(ended, name):
    """Return whether a campaign found no failure; `chaos` may have found late calls."""
    return ended.returncode == 0 or (name.startswith("chaos") and ended.returncode == 1)


def run_part(name, faults, folder):
    """In a process of its own: here, all threads wait while a million objects are gone through."""
    figures = folder / "soak.json"
    options = ["--faults", str(faults), "--folder", str(folder), "--json", str(figures)]
    command = [sys.executable, "-m", "holdfast", "soak", name, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def slices(request, tmp_path_factory):
    """The process of each campaign that is asked for, ended, and its folder."""
    tests = [item for item in request.session.items if "slices" in item.fixturenames]
    asked = {test.callspec.params["name"] for test in tests}
    folders = {name: tmp_path_factory.mktemp("soak") for name in asked}  # short: sockets are in it
    budget = [name for name in SLICES if name not in ALONE], ALONE
    ended = {}
    for names, at_once in zip(budget, (len(os.sched_getaffinity(0)), 1), strict=True):
        with ThreadPoolExecutor(at_once) as pool:
            for name in (name for name in names if name in asked):
                ended[name] = pool.submit(run_part, name, SLICES[name], folders[name])
    return {name: (ended[name].result(), folders[name]) for name in asked}


@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    ("name", "campaign"), [(campaign.name, campaign) for campaign in CAMPAIGNS]
)
def test_a_short_run_of_every_campaign_serves_no_wrong_bytes(name, campaign, slices):
    ended, folder = slices[name]
    assert ended_well(ended, name), ended.stdout + ended.stderr
    rows = json.loads((folder / "soak.json").read_text())["rows"]
    assert wrong(rows) == []
    assert sum(row["tried"] for row in rows) >= 0.9 * SLICES[name]
    assert [row["what"] for row in rows] == [f"soak.{result}" for result in campaign.results()]


@pytest.mark.parametrize(
    ("part", "faults"),
    [
        ("flips.wire", 200),
        ("injected.tier", 200),
        ("timing.store.control", 200),
        ("chaos.calls", 1),
    ],
)
def test_a_part_runs_alone(part, faults, tmp_path_factory):
    folder = tmp_path_factory.mktemp("soak")  # short: sockets are in it
    ended = run_part(part, faults, folder)
    assert ended_well(ended, part), ended.stdout + ended.stderr
    (row,) = json.loads((folder / "soak.json").read_text())["rows"]
    assert wrong([row]) == []
    assert row["what"] == f"soak.{part}"
    assert row["tried"] >= faults


def test_the_flips_campaign_detects_a_check_that_accepts_everything(tmp_path, monkeypatch):
    monkeypatch.setattr(sealing.Sealing, "check_and_open", lambda *_: Outcome.OK)
    monkeypatch.setattr(verify, "verify", lambda *_: Outcome.OK)
    budget = CampaignBudget(tries=30, seed=1, folder=tmp_path)
    results = list(flips.run(budget))
    plain = [
        result for result in results if result.what in ("flips.host", "flips.disk", "flips.pool")
    ]
    assert len(plain) == 3
    assert all(result.failed for result in plain)
    assert "was served wrong" in results[0].failures[0]


def test_disk_campaigns_detect_records_served_without_verification(tmp_path, monkeypatch):
    monkeypatch.setattr(workload.pack, "verify", lambda *_: Outcome.OK)
    budget = CampaignBudget(tries=300, seed=1, folder=tmp_path)
    assert any(result.failed for result in (*reopened.run(budget), *torn.run(budget)))


def test_the_chaos_campaign_detects_a_reader_that_does_not_verify_records(tmp_path, monkeypatch):
    monkeypatch.setattr(payloads.pack, "verify", lambda *_: Outcome.OK)
    is_on = tuple(fault for fault in chaos.FAULTS if fault.name == "garbage")
    monkeypatch.setattr(chaos, "FAULTS", is_on)
    # Told so that the frame stands and the record in it does not: every such read then comes.
    monkeypatch.setattr(
        chaos_proxy, "_randomized", lambda data: data[:4096] + bytes(len(data[4096:]))
    )
    failures = []
    for seed in range(5):  # on a busy machine, answers of a whole round may be late, and none read
        budget = CampaignBudget(tries=2, seed=seed, folder=tmp_path / str(seed))
        *_, blocks = chaos.run(budget)
        failures += blocks.failures
        if failures:
            break
    assert any("a wrong byte" in words for words in failures)
