"""A member is blamed for what it does, not for a slow line or for what we have not sent yet."""

import time

from holdfast.clock import ManualClock
from holdfast.errors import Outcome
from holdfast.testing.payloads import namespace_of
from holdfast.tiers.base import TierGet, segment_place
from holdfast.tiers.breaker import BreakerOptions
from holdfast.tiers.pool.health import HealthOptions
from holdfast.wire.remote.client import BlockCount, ReceivedRecords


def test_progress_of_a_long_write_keeps_the_breaker_closed(fleet) -> None:
    one = fleet(1, health=HealthOptions(breaker=BreakerOptions(stall_s=0.3)))
    breaker = one.pool.health._targets["t0"].breaker

    clock = breaker._clock = ManualClock(time.monotonic())

    def put(records, deadline_s, on_progress=None):
        for _ in range(10):
            clock.advance(0.25)  # twice that without progress would open it
            on_progress(breaker._options.progress_bytes)
            assert one.pool.reachable()
        return [Outcome.OK] * len(records)

    one.targets["t0"].put = put
    assert one.write(one.chain(1, 1)) == [Outcome.OK]
    assert breaker.opened == 0


def test_a_request_not_sent_in_time_is_late_and_no_failure_of_the_member(fleet) -> None:
    one = fleet(1)
    chain = one.chain(1, 3)
    one.targets["t0"].put = lambda records, *_: [Outcome.UNSENT] * len(records)
    one.targets["t0"].get = lambda *_: ReceivedRecords(0, Outcome.UNSENT)
    for _ in range(5):
        assert one.write(chain) == one.read(chain) == [Outcome.LATE] * 3
    assert one.pool.reachable()
    assert one.pool.usage().failures == 0
    assert one.pool.health.reports()[0].failure_share == 0


def test_blocks_received_before_a_request_could_not_be_sent_are_kept(fleet) -> None:
    one = fleet(1)
    chain = one.chain(1, 3)
    one.write(chain)
    get = one.targets["t0"].get

    def half(namespace, keys, into, *rest):
        got = get(namespace, keys[:2], into[:2], *rest)
        return got._replace(outcome=Outcome.UNSENT)

    one.targets["t0"].get = half
    assert one.read(chain) == [Outcome.OK, Outcome.OK, Outcome.LATE]


def test_a_member_has_as_long_for_a_deletion_as_for_a_write(fleet) -> None:
    """A target that keeps records in a bucket answers once the bucket knows of the deletion."""
    one, asked = fleet(1, deadline_s=60.0, ask_s=0.25), []
    chain = one.chain(1, 3)
    one.write(chain)

    def delete(namespace, keys, deadline_s):
        asked.append(deadline_s)
        return BlockCount(len(keys), Outcome.OK)

    one.targets["t0"].delete = delete
    namespace = namespace_of(8_000)
    places = [segment_place(chain.segment(depth)) for depth in range(3)]
    one.pool.delete(
        [
            TierGet(place, key, memoryview(b""), namespace)
            for place, key in zip(places, chain.keys, strict=True)
        ]
    )
    assert min(asked) > 0.25
