"""Ctrl-C at a terminal goes to a whole group of processes, and is no fault of what it ends."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from holdfast_bench.campaigns.campaign import CampaignBudget, CampaignResult
from holdfast_bench.campaigns.chaos_pool import ChaosTarget

pytest.importorskip("rich")


def _await(truth, seconds=120.0):
    end = time.monotonic() + seconds
    while not truth():
        assert time.monotonic() < end
        time.sleep(0.05)


@contextlib.contextmanager
def _soak(part, folder):
    argv = [sys.executable, "-m", "holdfast", "soak", part, "--faults", "500"]
    options = ["--folder", str(folder), "--json", str(folder / "soak.json")]
    process = subprocess.Popen(
        [*argv, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def folder(tmp_path_factory):
    """Return one with a short name: sockets are in it."""
    return tmp_path_factory.mktemp("soak")


def test_an_interrupt_of_the_group_is_no_failure(folder):
    with _soak("crash.node", folder) as process:
        _await(lambda: list(folder.rglob("node.sock")))
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 130
    assert not (folder / "soak.json").exists()
    rows = json.loads((folder / "soak.json.part").read_text())["rows"]
    assert [row["failures"] for row in rows] == [[]]
    assert rows[0]["tried"] >= 1


def _serving(folder):
    """Return the processes that serve a configuration in a folder."""
    listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True)
    return [int(line.split()[0]) for line in listed.stdout.splitlines() if f"{folder}/" in line
            and " serve " in line]  # fmt: skip


def test_a_soak_that_is_killed_leaves_no_node_behind(folder):
    with _soak("crash.node", folder) as process:
        _await(lambda: list(folder.rglob("node.sock")))
        process.kill()
    _await(lambda: not _serving(folder))


def test_a_target_runs_in_its_own_process_group(tmp_path):
    (tmp_path / "token.key").touch(0o600)
    (tmp_path / "token.key").write_bytes(bytes(32))
    target = ChaosTarget(tmp_path / "t0", tmp_path / "token.key")
    try:
        assert os.getpgid(target.process.pid) != os.getpgid(0)
    finally:
        target.close()


@pytest.mark.parametrize("stopped", [True, False])
def test_too_few_tries_are_not_a_failure_if_the_campaign_was_interrupted(stopped, tmp_path):
    budget = CampaignBudget(tries=1, seed=1, folder=tmp_path, stopped=lambda: stopped)
    result = CampaignResult("made.up", "tries")
    budget.expect_enough(result, False, "too few")
    assert result.failed == (not stopped)
