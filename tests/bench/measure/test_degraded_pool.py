"""The measurements of a pool in trouble, small: each row is there and says what it is about."""

from types import SimpleNamespace

import pytest

from holdfast.errors import HoldfastError
from holdfast_bench.measure import degraded_pool, pool
from holdfast_bench.measure.degraded_pool import trouble_rows


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(pool, "HOST_BYTES", 64 << 20)
    for name, value in [("CHAINS", 40), ("HOT_CHAINS", 2), ("READS", 40), ("LATE_WARM_UP_S", 0.2)]:
        monkeypatch.setattr(degraded_pool, name, value)
    for name, value in [("MUTE_S", 0.2), ("LATE_READS", 40), ("TRIES", 1)]:
        monkeypatch.setattr(degraded_pool, name, value)


def test_a_join_a_late_target_and_mute_ones_have_their_rows(tmp_path):
    rows = {row.what: row for row in trouble_rows(tmp_path)}
    assert rows.keys() == {"pool.join.dip", "pool.late.p99", "pool.mute.opens", "pool.mute.ask"}
    join = rows["pool.join.dip"]
    assert 0 <= join.value <= join.more["dip_without_two_epochs"]
    assert 0 < join.more["dip_without_two_epochs"] < 0.6
    assert rows["pool.late.p99"].more["without_ms"] > 100
    assert rows["pool.mute.ask"].more["asked"] > 0


def test_circuit_breakers_that_do_not_open_are_an_error(monkeypatch):
    monkeypatch.setattr(degraded_pool, "OPENS_S_MAX", 0.0)
    health = SimpleNamespace(trusted=lambda name: name == "t1")
    tier = SimpleNamespace(health=health)
    silent = SimpleNamespace(tier=tier, targets=["t0", "t1"], ask=lambda _: 0.0)
    with pytest.raises(HoldfastError, match="requests still go to t1, silent for 0 s"):
        degraded_pool._opened_s(silent, iter(()))
