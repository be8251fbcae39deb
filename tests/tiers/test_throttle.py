"""A throttled tier keeps every promise of its inner one, and its pace."""

import threading

from holdfast.testing.memory import MemoryTier
from holdfast.testing.tier_contract import TierContract
from holdfast.tiers.base import Get
from holdfast.tiers.host import Budget, HostTier
from holdfast.tiers.throttle import Throttled

MIB = 1 << 20


class TestThrottledTier(TierContract):
    """With all the time in the world it is the tier it wraps."""

    def make_tier(self, folder, capacity_bytes):
        return Throttled(HostTier(Budget(capacity_bytes)), 1e12)


class Clock:
    def __init__(self):
        self.at, self.slept = 100.0, []

    def now(self):
        return self.at

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.at += seconds


def gets(tier, count, nbytes):
    places = tier.reserve([nbytes] * count).places
    return [Get(place, bytes(16), memoryview(bytearray(nbytes)), None) for place in places]


def test_reads_wait_for_their_turn_and_an_idle_tier_saves_nothing_up():
    clock = Clock()
    tier = Throttled(MemoryTier(8 * MIB), MIB, clock.now, clock.sleep)
    batch = gets(tier, 4, MIB // 4)
    tier.read(batch)
    tier.read(batch[:2])
    clock.at += 10.0
    tier.read(batch[:1])
    assert clock.slept == [1.0, 0.5, 0.25]


def test_threads_share_the_pace():
    clock, done = Clock(), []
    inner = MemoryTier(8 * MIB)
    tier = Throttled(inner, MIB, clock.now, done.append)
    batch = gets(tier, 1, MIB)
    threads = [threading.Thread(target=tier.read, args=(batch,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == [1.0, 2.0, 3.0]
