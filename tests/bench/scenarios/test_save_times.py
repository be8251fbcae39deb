"""The load on engines that save at different times, and what its rows compare."""

import json
from collections import Counter

import pytest

from holdfast.cli import main
from holdfast_bench.harness import model
from holdfast_bench.scenarios.save_times import (
    NEAR,
    QUICK_LOAD,
    SAVE_TIMES,
    SaveLoad,
    SaveTimeResult,
    SaveTimeSettings,
    rows_of,
    turn_order,
)


def rows(full, deferred):
    results = dict(zip(SAVE_TIMES, (full, deferred, deferred), strict=True))
    settings = SaveTimeSettings(None, model.SHAPES["tiny"], 1, QUICK_LOAD, print)
    return {row.what: row for row in rows_of(results, settings)}


def test_every_session_has_all_its_turns_in_an_order_that_is_always_the_same():
    load = SaveLoad()
    order = turn_order(load.sessions, 1)
    assert Counter(order) == dict.fromkeys(range(load.sessions.number), load.sessions.turns)
    assert order == turn_order(load.sessions, 1)
    assert order != turn_order(load.sessions, 2)


def test_most_turns_are_of_a_session_that_was_used_last():
    order = turn_order(SaveLoad().sessions, 1)
    near = [
        session in list(dict.fromkeys(reversed(order[:at])))[:NEAR]
        for at, session in enumerate(order)
    ]
    assert sum(near) > len(order) / 2


def test_half_the_bytes_with_equal_hits_meet_the_goals():
    found = rows(SaveTimeResult(200, 1000, 10), SaveTimeResult(90, 1010, 5))
    assert (found["saves.bytes"].ok, found["saves.computed"].ok) == (True, True)


def test_fewer_bytes_that_cost_hits_miss_a_goal():
    found = rows(SaveTimeResult(200, 1000, 10), SaveTimeResult(0, 1100, 0))
    assert (found["saves.bytes"].ok, found["saves.computed"].ok) == (True, False)


@pytest.mark.vllm
@pytest.mark.soak
def test_quick_runs_on_real_engines(tmp_path):
    pytest.importorskip("vllm")
    target = tmp_path / "saves.json"
    main(["bench", "saves", "--quick", "--json", str(target)])
    found = json.loads(target.read_text())["rows"]
    assert [row["what"] for row in found] == ["saves.bytes", "saves.computed"]
    assert all(row[f"{save}_bytes"] >= 0 for row in found[:1] for save in SAVE_TIMES)
