"""Two domains take memory from each other, an engine and a node are killed; no byte is wrong."""

import pytest

torch = pytest.importorskip("torch")

from holdfast.errors import HoldfastError  # noqa: E402
from holdfast_bench.measure.gpu import shared_node  # noqa: E402
from holdfast_bench.measure.gpu.paged_engine import PagedEngine  # noqa: E402
from holdfast_bench.measure.gpu.shared_node import DomainEngine  # noqa: E402


def test_domains_share_locked_memory_and_survive_kills(measured):
    found = measured(shared_node)
    assert {what: row.goal for what, row in found.items()} == {
        "gpu.recalls.compared": None,
        "gpu.killed_engine.memory_back": 2.0,
        "gpu.killed_node.again": None,
    }
    compared = found["gpu.recalls.compared"]
    assert compared.value >= shared_node.TOY_ALL_BLOCKS
    assert compared.more["locked_mib"] > 0
    assert found["gpu.killed_engine.memory_back"].more["blocks"] == shared_node.TOY_BLOCKS


def test_a_block_with_wrong_bytes_ends_the_phase(measured, monkeypatch):
    load = PagedEngine.fetch_held

    def late(engine, keys):
        found = load(engine, keys)
        engine.tensors[-1][0] += 1
        return found

    monkeypatch.setattr(PagedEngine, "fetch_held", late)
    with pytest.raises(HoldfastError, match="blocks of context 1 came with wrong bytes"):
        measured(shared_node)


def test_kills_for_which_no_time_is_left_are_named(measured):
    found = measured(shared_node, until_s=0.0)
    assert found["gpu.killed_engine.memory_back"].more == {"why": "no time was left"}


def test_the_engine_to_be_killed_says_when_it_saves(monkeypatch, capsys):
    saved = []

    def save(_, seed):
        saved.append(seed)
        if seed:
            raise KeyboardInterrupt

    monkeypatch.setattr(DomainEngine, "__init__", lambda *_: None)
    monkeypatch.setattr(DomainEngine, "save", save)
    with pytest.raises(KeyboardInterrupt):
        shared_node.main(["unix:///nowhere", "--rehearse"])
    assert (saved, capsys.readouterr().out) == ([0, 1], "saving\n")
