"""The bench of stripes loses a target, and finds every context whole."""

from holdfast_bench.harness.network import LoopbackNetwork
from holdfast_bench.measure import stripes


def test_contexts_survive_a_lost_target_at_less_than_a_third_more_bytes(monkeypatch):
    monkeypatch.setattr(stripes, "PREFIX_BLOCKS", 384)
    monkeypatch.setattr(stripes, "PREFIXES", 3)
    whole, written = stripes.survival_rows()
    assert (whole.what, whole.value) == ("pool.stripe.whole", 1.0)
    assert written.value is not None
    assert 1.0 < written.value <= 1.3


def test_without_links_of_limited_rate_the_speed_is_a_row_that_says_why(monkeypatch, tmp_path):
    monkeypatch.setattr(stripes, "open_network", lambda _: _Opened())
    [row] = stripes.speed_rows(tmp_path)
    assert row.value is None


class _Opened:
    def __enter__(self):
        return LoopbackNetwork()

    def __exit__(self, *_):
        pass
