"""The shared contract holds for memory and for a pool, and notices a tier that breaks it."""

import math
import time

import pytest

from holdfast.blocks.envelope import read_header
from holdfast.errors import Outcome
from holdfast.testing.memory import SharedMemoryTier
from holdfast.testing.shared_tier_contract import SharedTierContract
from holdfast.tiers.pool.members import Member
from holdfast.tiers.pool.tier import PoolOptions, PoolTier
from holdfast.wire.target import Found, Got, Held


class Memory:
    """A far side in this process, and the tiers that use it."""

    def __init__(self):
        self.records = {}
        self.tiers = []
        self.answers = True

    def tier(self, kind=SharedMemoryTier):
        self.tiers.append(kind(self.records))
        self.tiers[-1].answers = self.answers
        return self.tiers[-1]

    def _answer(self, answers):
        self.answers = answers
        for tier in self.tiers:
            tier.answers = answers

    def kill(self):
        self.records.clear()
        self._answer(False)

    def stall(self):
        self._answer(False)

    def wake(self):
        self._answer(True)

    def restart(self):
        self._answer(True)

    def close(self):
        pass


class TestSharedMemoryTier(SharedTierContract):
    def make_far_side(self, folder):
        return Memory()

    def make_tier(self, far_side):
        return far_side.tier()


class Targets:
    """Three targets in memory, that every client reaches."""

    def __init__(self):
        self.records = [{} for _ in range(3)]
        self.mood = "well"

    def kill(self):
        for records in self.records:
            records.clear()
        self.mood = "dead"

    def stall(self):
        self.mood = "stalled"

    def wake(self):
        self.mood = "well"

    def restart(self):
        self.mood = "well"

    def close(self):
        pass


class Target:
    """One of them, as a pool reaches it."""

    epoch = 0

    def __init__(self, targets, number):
        self.targets = targets
        self.records = targets.records[number]

    def _trouble(self, deadline_s):
        if self.targets.mood == "stalled":
            time.sleep(deadline_s)
            return Outcome.LATE
        return Outcome.GONE if self.targets.mood == "dead" else None

    def put(self, records, deadline_s, heard=None):
        if trouble := self._trouble(deadline_s):
            return [trouble] * len(records)
        for record in records:
            self.records[read_header(record)[0].key] = bytes(record)
        return [Outcome.OK] * len(records)

    def get(self, world, keys, into, deadline_s, heard=None):
        if trouble := self._trouble(deadline_s):
            return Got(0, trouble)
        for number, (key, buffer) in enumerate(zip(keys, into, strict=True)):
            if len(self.records.get(key, b"")) != len(buffer):
                return Got(number, Outcome.MISS)
            buffer[:] = self.records[key]
        return Got(len(keys), Outcome.OK)

    def exist(self, world, keys, deadline_s):
        if trouble := self._trouble(deadline_s):
            return Held(bytes(len(keys)), trouble)
        return Held(bytes(key in self.records for key in keys), Outcome.OK)

    def delete(self, world, keys, deadline_s):
        if trouble := self._trouble(deadline_s):
            return Found(0, trouble)
        return Found(sum(self.records.pop(key, None) is not None for key in keys), Outcome.OK)

    def stats(self, deadline_s):
        return {}, self._trouble(deadline_s) or Outcome.OK

    def close(self):
        pass


class Source:
    def watch(self, told):
        told([Member(id=f"t{n}", address=f"tcp://10.0.0.{n}:7000") for n in range(3)])

    def trouble(self):
        return ""

    def close(self):
        pass


class TestPoolTier(SharedTierContract):
    deadline_s = 1.5

    def make_far_side(self, folder):
        return Targets()

    def make_tier(self, far_side):
        def reach(member):
            return Target(far_side, int(member.id[1:]))

        return PoolTier(Source(), reach, PoolOptions(deadline_s=1.5, ask_s=1.5))


# A contract that lets anything through proves nothing.


class Forgetful(SharedMemoryTier):
    def free(self, places):
        gone = [key for key, (place, _) in self.records.items() if place in places]
        for key in gone:
            del self.records[key]


class Optimist(SharedMemoryTier):
    def held(self, world, keys, start, within_s=math.inf):
        return sum(key in self.records for key in keys[start:]) * self._is_there()


class Boastful(SharedMemoryTier):
    def known(self, batch):
        return [True] * len(batch)


class Misdirected(SharedMemoryTier):
    def read(self, batch):
        keys = [get.key for get in batch]
        return super().read(
            [g._replace(key=k) for g, k in zip(batch, keys[1:] + keys[:1], strict=True)]
        )


class Deaf(SharedMemoryTier):
    def _is_there(self):
        return not self._closed


class Fragile(SharedMemoryTier):
    def write(self, batch):
        if not self.answers:
            raise ConnectionError("gone")
        return super().write(batch)


class Scribbling(SharedMemoryTier):
    def write(self, batch):
        outcomes = super().write(batch)
        for put in batch:
            put.record[:16] = bytes(16)
        return outcomes


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (Forgetful, "test_freeing_forgets_nothing"),
        (Optimist, "test_the_leading_run_is_counted_up_to_a_hole"),
        (Misdirected, "test_what_is_not_there_is_a_miss"),
        (Scribbling, "test_buffers_stay_the_callers"),
    ],
)
def test_the_contract_notices(broken, test):
    with pytest.raises((AssertionError, ValueError)):
        getattr(TestSharedMemoryTier(), test)(broken({}))


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (Boastful, "test_what_is_known_is_there"),
        (Deaf, "test_a_dead_far_side_is_an_outcome_in_time"),
        (Fragile, "test_a_dead_far_side_is_an_outcome_in_time"),
    ],
)
def test_the_contract_notices_what_a_dead_far_side_does(broken, test):
    far_side = Memory()
    tier = far_side.tier(broken)
    with pytest.raises((AssertionError, ConnectionError)):
        getattr(TestSharedMemoryTier(), test)(tier, far_side)
