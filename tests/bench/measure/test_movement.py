"""`holdfast bench movement` moves records between real tiers, and each row has a limit."""

from contextlib import closing

import numpy as np
import pytest

from holdfast.errors import HoldfastError, Outcome
from holdfast.limits import GIB
from holdfast.sim.trace import Requests, arrange
from holdfast.testing.memory import MemoryTier
from holdfast_bench.measure import demoted_hits, movement


class FullTier(MemoryTier):
    """A tier that has no room."""

    def write(self, batch):
        self.free([put.place for put in batch])
        return [Outcome.FULL] * len(batch)


def test_each_kind_of_move_has_a_limit_of_the_same_run(tmp_path):
    rows = [
        movement.save_row(tmp_path / "save", rounds=1),
        *movement.move_rows(tmp_path / "moves", MemoryTier(GIB), "memory", rounds=1),
    ]
    assert [row.what for row in rows] == [
        "movement.save.disk",
        "movement.demotion.disk.memory",
        "movement.promotion.memory.disk",
    ]
    assert all(row.value and row.limit and row.ratio for row in rows)


def test_reads_beside_moves_are_compared_with_reads_alone(tmp_path):
    row = movement.beside_row(tmp_path, rounds=1)
    assert row.value
    assert row.limit
    assert row.more["reads"]


def test_moves_that_fail_end_the_measurement(tmp_path):
    with closing(movement.MovingStore(MemoryTier(GIB), FullTier(GIB))) as store:
        keys, _ = store.save()
        store.remove(keys, movement.HOST)
        store.demote(keys)
        with pytest.raises(HoldfastError, match="holds 0 of 32 blocks"):
            store.check_on(keys, movement.FAR)


def test_an_object_tier_makes_up_for_a_part_of_a_disk():
    chains = [[session * 10 + n for n in range(10)] for session in range(60)] * 3
    counts = np.array([len(chain) for chain in chains], np.int64)
    requests = Requests(
        np.arange(len(chains), dtype=np.float64),
        counts * 4,
        np.ones(len(chains), np.int64),
        np.full(len(chains), -1, np.int32),
        np.full(len(chains), np.nan),
    )
    order = [n for session in range(60) for n in (session, session + 60, session + 120)]
    ids = np.array([block for n in order for block in chains[n]], np.int64)
    trace = arrange("made", 4, requests, counts, ids)
    found = demoted_hits.demoted_hits(trace, demoted_hits.LadderBlocks.of(trace))
    assert 0 < found.alone <= found.demoted
    assert found.summed
