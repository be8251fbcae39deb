"""The campaign of failing system calls counts what struck, and lives as its seed says."""

import contextlib
import random
import subprocess
from pathlib import Path

import pytest

from holdfast.testing import injected
from holdfast.testing.campaign import Order


@pytest.fixture
def order(tmp_path):
    return Order(tries=4, seed=1, folder=tmp_path, target=None)


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


def test_what_strikes_nothing_is_not_tried_and_ends(order, lives):
    lives[1]["struck"] = False
    tally = injected._in_system_calls(order)
    assert tally.tried == 0
    assert set(tally.counts) == {"struck nothing", "clean rejects"}
    assert "82 rounds, and no more than 0 faults" in tally.failures
    assert any("too few hit" in words for words in tally.failures)


def test_a_disk_that_is_not_formatted_is_not_tried(order, lives):
    lives[1].update(status=2, said="opening 0: ConfigError: no room")
    tally = injected._in_system_calls(order)
    assert (tally.tried, tally.failures) == (0, ["82 rounds, and no more than 0 faults"])
    assert tally.counts["clean rejects"] == sum(
        tally.counts[f"struck {kind}"] for kind in injected.CALLS
    )


def test_a_disk_that_is_refused_later_is_tried(order, lives):
    lives[1].update(status=2, said="opening 1: ConfigError: it can not be written")
    tally = injected._in_system_calls(order)
    assert (tally.tried, tally.counts["clean rejects"], tally.failures) == (4, 4, [])


def test_a_life_that_is_refused_unstruck_is_wrong(order, lives):
    lives[1].update(struck=False, status=2, said="opening 1: ConfigError: it can not be written")
    assert "it can not be written" in injected._in_system_calls(order).failures[0]


def test_another_seed_makes_other_lives(order, lives):
    injected._in_system_calls(order)
    injected._in_system_calls(order._replace(seed=2))
    assert lives[0] == [f"{seed}/{number}" for seed in (1, 2) for number in range(4) for _ in "ab"]


def test_every_kind_of_call_is_drawn(order):
    drawn = [injected.Strike.drawn(random.Random(n), n) for n in range(200)]
    assert {strike.kind for strike in drawn} == set(injected.CALLS)
    assert any(s.kind == "fdatasync" and s.inject.endswith("when=3") for s in drawn)


@pytest.fixture
def _strace():
    """Skip, saying why, where there is no strace that works and none can be installed."""
    if not injected.shutil.which("strace"):
        install = ["apt-get", "install", "-y", "--no-install-recommends", "strace"]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(install, capture_output=True, timeout=240, check=False)
    if why := injected._why_not(injected.shutil.which("strace")):
        pytest.skip(why)


@pytest.mark.usefixtures("_strace")
def test_strikes_hit_a_disk_that_holds_something(order):
    tally = injected._in_system_calls(order._replace(tries=2))
    assert (tally.tried, tally.failures) == (2, [])
    assert tally.counts["struck pwritev"] == tally.counts["struck preadv"] == 1
