"""The durable campaign finds a store that acknowledges too early, and none in a right one."""

import pytest

from holdfast_bench.campaigns import durable
from holdfast_bench.campaigns.campaign import CampaignBudget


@pytest.fixture
def budget(tmp_path):
    return CampaignBudget(tries=6, seed=1, folder=tmp_path)


def test_nothing_that_was_acknowledged_is_lost_by_kills(budget):
    (result,) = durable.run(budget)
    assert (result.tried, result.failures) == (6, [])
    assert result.counts["contexts found again"] > 6


def test_a_store_that_acknowledges_before_it_writes_is_found_out(budget, monkeypatch):
    monkeypatch.setattr(durable, "sync", lambda _store, _namespace, keys, _deadline_s: len(keys))
    (result,) = durable.run(budget._replace(tries=3))
    assert any(words.partition(": ")[2].startswith("lost durable/") for words in result.failures)
