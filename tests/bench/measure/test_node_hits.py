"""A store that demotes what its disk evicts serves a trace as one with a larger disk does."""

import numpy as np
import pytest

from holdfast.sim.trace import Requests, arrange
from holdfast_bench.measure.demoted_hits import LadderBlocks
from holdfast_bench.measure.node_hits import (
    demoted_store_hits,
    hits_beside_simulator,
    summed_store_hits,
)

SESSIONS, TURNS, BLOCKS = 12, 3, 8
SMALL = LadderBlocks(host=24, disk=32, far=200)
"""Memory and disk hold less than all sessions, which recur in a cycle; the folder holds them."""


@pytest.fixture
def trace():
    """Sessions in turns, each with the same chain every time."""
    numbers = [session * BLOCKS for _ in range(TURNS) for session in range(SESSIONS)]
    counts = np.full(len(numbers), BLOCKS, np.int64)
    requests = Requests(
        np.arange(len(numbers), dtype=np.float64),
        counts * 4,
        np.ones(len(numbers), np.int64),
        np.full(len(numbers), -1, np.int32),
        np.full(len(numbers), np.nan),
    )
    ids = np.array([first + n for first in numbers for n in range(BLOCKS)], np.int64)
    return arrange("made", 4, requests, counts, ids)


def test_a_shared_folder_serves_what_the_disk_of_a_store_evicted(trace, tmp_path):
    found = demoted_store_hits(trace, SMALL, tmp_path / "store")
    assert found.token_hit == pytest.approx((TURNS - 1) / TURNS)
    assert found.by_tier["files"] > 0
    assert not (tmp_path / "store").exists()


def test_a_store_without_a_second_tier_has_one_disk_of_the_summed_capacity(trace, tmp_path):
    found = summed_store_hits(trace, SMALL, tmp_path / "store")
    assert found.token_hit == pytest.approx((TURNS - 1) / TURNS)
    assert "files" not in found.by_tier


def test_the_hits_of_a_store_stand_beside_a_larger_disk_and_the_simulator(trace, tmp_path):
    store, simulated = hits_beside_simulator("hits", trace, SMALL, tmp_path)
    assert (store.what, simulated.what) == ("hits", "hits.simulated")
    assert store.ok
    assert simulated.ok
    assert simulated.limit == store.value
    assert simulated.more["disk_alone"] < simulated.value
