"""The campaign that damages bytes on the wire counts what met a byte."""

from holdfast.cli.soak import open_target
from holdfast.testing import flips
from holdfast.testing.campaign import Order


def test_a_burst_that_meets_no_byte_is_not_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(flips.NoisyLine, "arm", lambda *_: None)
    order = Order(tries=1, seed=1, folder=tmp_path, target=open_target)
    tally = flips._strike_the_wire(order)
    assert (tally.tried, tally.counts["harmless"]) == (0, 0)
    assert tally.counts["missed the line"] == 58
    assert tally.failures == ["58 rounds, and no more than 0 faults"]
