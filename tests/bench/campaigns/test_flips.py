"""The campaign that damages bytes on the wire counts what met a byte."""

from holdfast_bench.campaigns import flips
from holdfast_bench.campaigns.campaign import CampaignBudget
from holdfast_bench.cli.soak import open_target


def test_a_burst_that_meets_no_byte_is_not_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(flips.NoisyLine, "arm", lambda *_: None)
    budget = CampaignBudget(tries=1, seed=1, folder=tmp_path, target=open_target)
    result = flips._strike_the_wire(budget)
    assert (result.tried, result.counts["harmless"]) == (0, 0)
    assert result.counts["hit no byte"] == 58
    assert result.failures == ["58 rounds made only 0 faults"]
