"""Links share fairly: checked against the plain arithmetic of who moves when."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.sim.link import SharedLink, Writer


def drain(link: SharedLink, starts: list[tuple[float, float]]) -> dict[int, float]:
    """Run (start, bytes) transfers to their ends; when each ended."""
    ends: dict[int, float] = {}
    for number, (at_s, nbytes) in enumerate(starts):
        while link.next_end() <= at_s:
            at = link.next_end()
            ends[link.finish(at)] = at
        link.start(at_s, nbytes, number)
    while len(link):
        at = link.next_end()
        ends[link.finish(at)] = at
    return ends


def test_one_transfer_takes_bytes_over_bandwidth():
    assert drain(SharedLink(10.0), [(1.0, 50.0)]) == {0: 6.0}


def test_two_transfers_share_and_the_rest_goes_faster():
    # both at 5 B/s until the shorter ends at 4, then 10 B/s for what is left of the longer
    assert drain(SharedLink(10.0), [(0.0, 20.0), (0.0, 60.0)]) == {0: 4.0, 1: 8.0}


def test_a_late_transfer_slows_the_first():
    assert drain(SharedLink(10.0), [(0.0, 40.0), (2.0, 10.0)]) == {1: 4.0, 0: 5.0}


def test_no_transfer_gets_more_than_its_own_limit():
    assert drain(SharedLink(100.0, 5.0), [(0.0, 10.0), (0.0, 20.0)]) == {0: 2.0, 1: 4.0}


def test_a_cancelled_transfer_gives_its_share_back():
    link = SharedLink(10.0)
    link.start(0.0, 100.0, 1)
    link.start(0.0, 100.0, 2)
    assert link.cancel(4.0, 1) == pytest.approx(80.0)
    assert link.next_end() == pytest.approx(12.0)
    assert link.cancel(5.0, 1) == 0.0


def test_queued_bytes_are_the_bytes_not_yet_transferred():
    link = SharedLink(10.0)
    assert link.queued_bytes(0.0) == 0.0
    link.start(0.0, 30.0, 1)
    link.start(0.0, 50.0, 2)
    assert link.queued_bytes(4.0) == pytest.approx(40.0)


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(1, 50)), min_size=1, max_size=12))
def test_a_link_is_never_idle_and_never_too_fast(steps):
    at_s, starts = 0.0, []
    for gap, nbytes in steps:
        at_s += gap
        starts.append((at_s, nbytes))
    ends = drain(SharedLink(7.0), starts)
    assert sorted(ends) == list(range(len(starts)))
    busy_until = 0.0
    for at, nbytes in starts:  # the last end of any fair order is that of one after another
        busy_until = max(busy_until, at) + nbytes / 7.0
    assert max(ends.values()) == pytest.approx(busy_until)
    for number, (at, nbytes) in enumerate(starts):
        assert ends[number] >= at + nbytes / 7.0 - 1e-9


def test_a_writer_refuses_what_would_wait_too_long():
    writer = Writer(10.0, 2.0)
    assert writer.free_bytes(0.0) == 20.0
    writer.write(0.0, 15.0)
    assert writer.free_bytes(0.0) == pytest.approx(5.0)
    assert writer.free_bytes(1.0) == pytest.approx(15.0)
    assert Writer(math.inf, 1.0).free_bytes(0.0) == math.inf
