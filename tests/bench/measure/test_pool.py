"""Transfers to a target are timed, and checked after their timing."""

import os
from types import SimpleNamespace

import pytest

from holdfast.blocks.envelope import read_header
from holdfast.buffers import aligned_buffer
from holdfast.errors import HoldfastError, Outcome
from holdfast.limits import KIB, MIB
from holdfast_bench.measure import pool
from holdfast_bench.measure.pool import BATCH, SINGLES_PER_ROUND, PoolBench, RecordBatch

NBYTES = 64 * KIB


class KeepingTarget:
    """A client that keeps records in this process, and refuses the put numbered `refused`."""

    def __init__(self):
        self.records, self.puts, self.refused = {}, 0, 0

    def put(self, records, _):
        self.puts += 1
        if self.puts == self.refused:
            return [Outcome.FULL] * len(records)
        self.records |= {read_header(record)[0].key: bytes(record) for record in records}
        return [Outcome.OK] * len(records)

    def get(self, namespace, keys, into, _):
        for key, place in zip(keys, into, strict=True):
            place[:] = self.records[key]
        return SimpleNamespace(blocks=len(keys))


@pytest.fixture
def target():
    return KeepingTarget()


@pytest.fixture
def bench(target):
    process = SimpleNamespace(pid=os.getpid())
    plain = SimpleNamespace(get=lambda *_: None, put=lambda *_: None, process=process)
    pool = SimpleNamespace(
        pick=lambda nbytes, count: [memoryview(bytearray(nbytes)) for _ in range(count)]
    )
    return PoolBench(SimpleNamespace(client=target, process=process), plain, pool, rounds=1)


@pytest.fixture
def records(target):
    batch = RecordBatch(NBYTES, aligned_buffer(8 * MIB))
    batch.fill(target)
    return batch


def test_single_transfers_have_a_get_and_a_put_row(bench, records):
    rows = bench.singles(records, NBYTES)
    assert [row.what for row in rows] == ["pool.get.64KiB", "pool.put.64KiB"]


def test_every_key_that_a_get_may_name_was_put(bench, target):
    """Records get new keys when all were used, which may be between two single puts."""
    records = RecordBatch(NBYTES, aligned_buffer(40 * (NBYTES + 4 * KIB)))
    records.fill(target)
    for _ in range(3):
        bench.singles(records, NBYTES)
    assert set(records._held) <= target.records.keys()


def test_without_nixl_there_is_a_row_that_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(pool.TransferBuffers, "wait", lambda *_: None)
    [row] = pool.nixl_rows(tmp_path, 1)
    assert (row.what, row.value) == ("pool.nixl", None)
    assert "NIXL is not installed" in row.more["why"]


@pytest.mark.parametrize("number", [1, 2, SINGLES_PER_ROUND])
def test_a_single_put_that_is_not_accepted_is_an_error(bench, records, target, number):
    target.refused = target.puts + number
    with pytest.raises(HoldfastError, match="the target did not accept 1 records: 1 full"):
        bench.singles(records, NBYTES)


def test_the_row_of_a_batch_has_the_cpu_time_of_both_ends(bench, records):
    get, *_ = bench.batches(records, NBYTES)
    assert get.what == f"pool.get.64KiBx{BATCH}"
    ends = ("local_cpu_s_per_gb", "remote_cpu_s_per_gb")
    assert get.more.keys() >= {*ends, *(f"plain_{end}" for end in ends)}
