"""The campaign that damages records counts what met a byte, and waits that did not end."""

from types import SimpleNamespace

from holdfast.errors import HoldfastError
from holdfast.store.store import Store
from holdfast_bench.campaigns import flips
from holdfast_bench.campaigns.campaign import CampaignBudget


def test_a_burst_that_meets_no_byte_is_not_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(flips.NoisyLine, "arm", lambda *_: None)
    budget = CampaignBudget(tries=1, seed=1, folder=tmp_path)
    result = flips._strike_the_wire(budget)
    assert (result.tried, result.counts["harmless"]) == (0, 0)
    assert result.counts["hit no byte"] == 58
    assert result.failures == ["58 rounds made only 0 faults"]


def test_blocks_that_are_not_written_in_time_are_a_failure_of_their_round(tmp_path):
    class NeverWritten(flips.InMemory):
        def expose(self, keys):
            raise HoldfastError("blocks are still not written after 60 s")

    with Store(flips.HOST_BYTES, [], flips.SECRET) as store:
        store.start()
        budget = CampaignBudget(tries=1, seed=1, folder=tmp_path)
        result = flips._strike("flips.host", NeverWritten(store), budget)
    assert result.failed == 59  # of 58 rounds, and too few tries
    assert "blocks are still not written" in result.failures[0]


def test_without_a_cipher_each_sealed_part_says_why_it_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(flips, "seal", SimpleNamespace(missing=lambda: "no cipher"))
    results = list(flips._sealed(CampaignBudget(tries=1, seed=1, folder=tmp_path)))
    assert [(result.what, result.skipped) for result in results] == [
        ("flips.sealed.disk", "no cipher"),
        ("flips.sealed.pool", "no cipher"),
    ]
