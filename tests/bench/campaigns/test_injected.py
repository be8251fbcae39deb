"""The campaign of failing system calls counts what struck, and lives as its seed says."""

import contextlib
import os
import random
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest

from holdfast_bench.campaigns import injected
from holdfast_bench.campaigns.campaign import CampaignBudget


@pytest.fixture
def budget(tmp_path):
    return CampaignBudget(tries=4, seed=1, folder=tmp_path)


@pytest.fixture
def lives(monkeypatch):
    """Put what is told of a life in the place of processes; return their seeds."""
    seeds = []
    told = {"struck": True, "status": 0, "said": ""}

    def life(argv, folder, seed):
        seeds.append(seed)
        if not argv:
            return 0, ""
        Path(argv[argv.index("-o") + 1]).write_text("= -1 EIO (INJECTED)" * told["struck"])
        return told["status"], told["said"]

    monkeypatch.setattr(injected, "_why_not", lambda strace: "")
    monkeypatch.setattr(injected.shutil, "which", lambda name: name)
    monkeypatch.setattr(injected, "_life", life)
    return seeds, told


def test_a_run_without_an_injected_fault_is_not_counted_and_ends(budget, lives):
    lives[1]["struck"] = False
    result = injected._in_system_calls(budget)
    assert result.tried == 0
    assert set(result.counts) == {"struck nothing", "clean rejects"}
    assert "82 rounds made only 0 faults" in result.failures
    assert any("too few of" in words for words in result.failures)


def test_a_disk_that_is_not_formatted_is_not_tried(budget, lives):
    lives[1].update(status=2, said="opening 0: ConfigError: no room")
    result = injected._in_system_calls(budget)
    assert (result.tried, result.failures) == (0, ["82 rounds made only 0 faults"])
    assert result.counts["clean rejects"] == sum(
        result.counts[f"struck {kind}"] for kind in injected.CALLS
    )


def test_a_disk_that_is_refused_later_is_tried(budget, lives):
    lives[1].update(status=2, said="opening 1: ConfigError: it cannot be written")
    result = injected._in_system_calls(budget)
    assert (result.tried, result.counts["clean rejects"], result.failures) == (4, 4, [])


def test_a_disk_refused_without_an_injected_fault_is_a_failure(budget, lives):
    lives[1].update(struck=False, status=2, said="opening 1: ConfigError: it cannot be written")
    assert "it cannot be written" in injected._in_system_calls(budget).failures[0]


def test_another_seed_makes_other_lives(budget, lives):
    injected._in_system_calls(budget)
    injected._in_system_calls(budget._replace(seed=2))
    assert lives[0] == [f"{seed}/{number}" for seed in (1, 2) for number in range(4) for _ in "ab"]


def test_every_kind_of_call_is_drawn(budget):
    drawn = [injected.Strike.drawn(random.Random(n), n) for n in range(200)]
    assert {strike.kind for strike in drawn} == set(injected.CALLS)
    assert any(s.kind == "fdatasync" and s.inject.endswith("when=3") for s in drawn)


def test_a_run_that_hangs_is_killed_together_with_its_traced_process(tmp_path, monkeypatch):
    """In the place of strace is a shell that starts a program and waits for it."""
    pid_file, program = tmp_path / "pid", []
    script = 'sleep 600 & echo $! > "$0.new"; mv "$0.new" "$0"; wait'
    communicate = subprocess.Popen.communicate

    def communicate_once_it_runs(process, *args, **options):
        while not program:
            assert process.poll() is None
            if pid_file.exists():
                program.append(os.pidfd_open(int(pid_file.read_text())))
            time.sleep(0.01)
        return communicate(process, *args, **options)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate_once_it_runs)
    monkeypatch.setattr(injected, "_LIFE_S", 0.01)
    wrapped = ["sh", "-c", script, str(pid_file)]
    assert injected._life(wrapped, tmp_path / "disk", "1/0") == (-1, "no end within 0.01 s")
    ended, _, _ = select.select(program, [], [], 60.0)
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(program[0], signal.SIGKILL)
    os.close(program[0])
    assert ended, "the program outlived its life"


@pytest.fixture
def _strace(find_program):
    """Skip, saying why, where there is no strace that works and none can be installed."""
    find_program("strace", "strace")
    if why := injected._why_not(injected.shutil.which("strace")):
        pytest.skip(why)


@pytest.mark.usefixtures("_strace")
def test_faults_are_injected_while_the_disk_holds_blocks(budget):
    result = injected._in_system_calls(budget._replace(tries=2))
    assert (result.tried, result.failures) == (2, [])
    assert result.counts["struck pwritev"] == result.counts["struck preadv"] == 1
