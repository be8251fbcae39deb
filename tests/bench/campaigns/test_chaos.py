"""The chaos campaign ends what it started."""

import pytest

from holdfast_bench.campaigns import chaos
from holdfast_bench.campaigns.campaign import CampaignBudget


def test_a_pool_whose_users_cannot_start_is_closed(tmp_path, monkeypatch):
    closed = []

    class Pool:
        def __init__(self, folder, count):
            pass

        def close(self):
            closed.append("pool")

    def no_users(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(chaos, "ChaosPool", Pool)
    monkeypatch.setattr(chaos, "ChaosUsers", no_users)
    with pytest.raises(RuntimeError, match="start new thread"):
        list(chaos.run(CampaignBudget(tries=1, seed=1, folder=tmp_path)))
    assert closed == ["pool"]
