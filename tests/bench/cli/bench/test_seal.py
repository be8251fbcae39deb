"""The figures of sealing have the shape of all figures, and come from blocks really sealed."""

import pytest

from holdfast.limits import MIB
from holdfast_bench.cli.bench import seal
from holdfast_bench.measure import disk


@pytest.fixture(autouse=True)
def small(monkeypatch):
    sizes = {"BLOCKS": 2, "BATCH": 2, "DISK_CONTEXTS": 8, "DISK_BYTES": 96 * MIB}
    for name, value in sizes.items():
        monkeypatch.setattr(seal, name, value)
    monkeypatch.setattr(disk, "BATCH", seal.BATCH)


def test_a_core_is_measured_beside_the_cipher_alone():
    rows = seal.core_rows(1)
    assert [row.what for row in rows] == ["seal.seal", "seal.open", "seal.core"]
    for row in rows[:2]:
        assert row.value > 0
        assert row.ratio == pytest.approx(row.value / row.limit)
    assert rows[2].value == min(row.value for row in rows[:2])
    assert rows[2].ok is (rows[2].value >= seal.CORE_GOAL)


def test_a_disk_is_measured_beside_one_that_is_not_sealed(tmp_path):
    rows = seal.disk_rows(tmp_path, 1)
    assert [row.what for row in rows] == ["seal.disk.write", "seal.disk.fetch"]
    assert all(row.value > 0 and row.goal == seal.TIER_GOAL for row in rows)
    images = [(tmp_path / name / "blocks.holdfast").read_bytes() for name in ("sealed", "plain")]
    once_round = seal.DISK_BYTES // (seal.BATCH * seal.PAYLOAD_BYTES)
    last = once_round + seal.DISK_PASSES + seal.DISK_CONTEXTS
    key = disk.chain_of(last, 2).keys[0]
    assert [key * 64 in image for image in images] == [False, True]


def test_a_pool_is_measured_beside_one_that_is_not_sealed(tmp_path, monkeypatch):
    targets = []

    class Kept(seal.TargetUnderTest):
        def __exit__(self, *error):
            targets.append(self.client.stats(5)[0])
            super().__exit__(*error)

    monkeypatch.setattr(seal, "TargetUnderTest", Kept)
    rows = seal.pool_rows(tmp_path, 1)
    assert [row.what for row in rows] == ["seal.pool.write", "seal.pool.fetch"]
    assert all(row.value > 0 and row.goal == seal.TIER_GOAL for row in rows)
    assert all(row.more["plain_cpu_s_per_gb"] > 0 for row in rows)
    writes = seal.PASSES + 1 + seal.POOL_CONTEXTS  # one that is written and not fetched
    assert targets[0].blocks == 2 * writes * seal.BATCH, "of both stores, under names of their own"
