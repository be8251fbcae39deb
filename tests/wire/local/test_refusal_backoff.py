"""A client that a node refused asks rarely, and at once when the node was started again."""

from types import SimpleNamespace

import pytest

from holdfast.wire.local import refusal_backoff
from holdfast.wire.local.refusal_backoff import REFUSED_S, RefusalBackoff


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(refusal_backoff, "time", SimpleNamespace(monotonic=lambda: now.s))
    return now


@pytest.fixture
def backoff(tmp_path):
    (tmp_path / "node.sock").touch()
    return RefusalBackoff(f"unix://{tmp_path}/node.sock", 1.0)


def refused(backoff, clock):
    """Be refused; return the time until the next attempt is due."""
    backoff.connecting()
    backoff.refused()
    began_s = clock.s
    while not backoff.due():
        clock.s += 0.25
    return clock.s - began_s


def test_each_refusal_doubles_the_delay_up_to_a_minute(backoff, clock):
    delays = [refused(backoff, clock) for _ in range(10)]
    for delay_s, least_s in zip(delays, [1, 2, 4, 8, 16, 32, *[REFUSED_S] * 4], strict=True):
        assert least_s <= delay_s <= 1.25 * least_s + 0.25
    assert len(set(delays[-4:])) > 1, "all engines of a machine would ask together"


def test_an_accepted_session_resets_the_backoff(backoff, clock):
    for _ in range(5):
        refused(backoff, clock)
    backoff.accepted()
    assert backoff.due()
    assert refused(backoff, clock) <= 1.5


def test_a_restarted_node_is_retried_at_once(backoff, clock, tmp_path):
    for _ in range(8):
        refused(backoff, clock)
    backoff.connecting()
    backoff.refused()
    assert not backoff.due()
    (tmp_path / "node.sock").rename(tmp_path / "old.sock")
    (tmp_path / "node.sock").touch()
    assert backoff.due()
    assert refused(backoff, clock) <= 1.5
