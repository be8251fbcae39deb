"""The durable campaign finds a store that acknowledges too early, and none in a right one."""

import pytest

from holdfast.limits import MIB
from holdfast.store.store import Store
from holdfast.testing.faulty import FaultyTier, InjectedFault
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.tier import DiskTier
from holdfast_bench.campaigns import durable
from holdfast_bench.campaigns.campaign import CampaignBudget
from holdfast_bench.campaigns.crash import HOST_BYTES, SECRET


@pytest.fixture
def budget(tmp_path):
    return CampaignBudget(tries=6, seed=1, folder=tmp_path)


def test_nothing_that_was_acknowledged_is_lost_by_kills(budget):
    (result,) = durable.run(budget)
    assert (result.tried, result.failures) == (6, [])
    assert result.counts["contexts found again"] > 6


def test_a_store_that_acknowledges_before_it_writes_is_found_out(budget, monkeypatch):
    def open_with_slow_writes(folder, disk_bytes):
        disk = DiskTier(DiskConfig(path=str(folder), capacity_bytes=disk_bytes, region_bytes=MIB))
        slow = FaultyTier(disk, 0, {InjectedFault.DELAY_WRITE: 1.0}, delay_s=600.0)
        store = Store(HOST_BYTES, [slow], {"default": SECRET})
        store.start()
        return store

    monkeypatch.setattr(durable, "open_store", open_with_slow_writes)
    monkeypatch.setattr(durable, "sync", lambda _store, _namespace, keys, _deadline_s: len(keys))
    (result,) = durable.run(budget._replace(tries=3))
    assert any(words.partition(": ")[2].startswith("lost durable/") for words in result.failures)
