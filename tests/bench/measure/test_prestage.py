"""The bench of prestages: a small context on a real node and target, and rows of made-up rounds."""

import pytest

from holdfast_bench.harness.network import LoopbackNetwork, NamespaceNetwork, open_network
from holdfast_bench.measure import prestage
from holdfast_bench.measure.prestage import BLOCKS, PrestageRound, prestage_rows
from holdfast_bench.measure.prestage_engine import EngineRound, engine_rows


def rows_of(*rounds):
    return {row.what: row for row in prestage.rows_of(rounds)}


def test_contexts_that_came_from_memory_and_seconds_gained_reach_the_goals():
    good = PrestageRound(2.0, 0.05, 0.052, 1.1, BLOCKS)
    rows = rows_of(good, good)
    assert rows["prestage.announced"].value == 1.0
    assert rows["prestage.announced.fetch"].ratio == pytest.approx(1.04)
    assert rows["prestage.queued.gain"].value == pytest.approx(0.9)
    assert all(row.ok for row in rows.values())


def test_a_context_that_came_late_misses_the_goals():
    late = PrestageRound(2.0, 0.05, 0.5, 1.9, BLOCKS - 1)
    assert not any(row.ok for row in rows_of(late, late).values())


def test_an_engine_whose_announced_context_is_as_fast_as_from_memory_reaches_the_goals():
    good = EngineRound(2.5, 0.30, 0.31, 2.6, 1.0)
    rows = {row.what: row for row in engine_rows([good, good])}
    assert rows["prestage.engine.announced"].ratio == pytest.approx(0.31 / 0.30)
    # Without a prestage, the first token would have come after the wait and the whole transfer.
    assert rows["prestage.engine.queued.gain"].value == pytest.approx(0.9)
    assert all(row.ok for row in rows.values())


def test_an_engine_that_fetches_only_at_its_turn_misses_the_goals():
    late = EngineRound(2.5, 0.30, 2.5, 3.4, 1.0)
    assert not any(row.ok for row in engine_rows([late, late]))


def test_without_links_of_their_own_nothing_is_measured(monkeypatch, tmp_path):
    class Alone:
        def __enter__(self):
            return LoopbackNetwork()

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(prestage, "open_network", lambda _: Alone())
    [row] = prestage_rows(tmp_path, 1)
    assert (row.value, row.ok) == (None, None)
    assert "need root, ip and tc" in str(row.more["why"])


def test_a_real_node_and_target_are_measured(monkeypatch, tmp_path):
    with open_network(tmp_path / "log") as network:
        if not isinstance(network, NamespaceNetwork):
            pytest.skip("network namespaces need root")
    monkeypatch.setattr(prestage, "BLOCKS", 8)
    monkeypatch.setattr(prestage, "WAIT_S", 0.1)
    rows = {row.what: row for row in prestage_rows(tmp_path, 1)}
    assert rows.keys() == {
        "prestage.announced", "prestage.announced.fetch", "prestage.queued.gain",
    }  # fmt: skip
    assert all(row.value is not None for row in rows.values())
