"""The shared contract holds for memory and for a pool, and notices a tier that breaks it."""

import math
import time

import pytest

from holdfast.blocks.envelope import read_header
from holdfast.blocks.namespace import Namespace, namespace_of
from holdfast.errors import Outcome
from holdfast.membership.members import Member
from holdfast.testing.memory import SharedMemoryTier
from holdfast.testing.shared_tier_contract import SharedTierContract
from holdfast.tiers.base import HeldAnswer
from holdfast.tiers.pool.tier import PoolTier, PoolTierOptions
from holdfast.wire.remote.client import BlockCount, HeldFlags, ReceivedRecords, TargetClient


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
    def make_remote_side(self, folder):
        return Memory()

    def make_tier(self, remote_side):
        return remote_side.tier()


class Targets:
    """Targets in memory, that every client reaches."""

    def __init__(self, count=3):
        self.records = [{} for _ in range(count)]
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


class Target(TargetClient):
    """One of them, as a pool reaches it."""

    def __init__(self, targets, number):
        super().__init__("tcp://10.0.0.1:7000")
        self.targets = targets
        self.records = targets.records[number]

    def _trouble(self, deadline_s):
        if self.targets.mood == "stalled":
            time.sleep(deadline_s)
            return Outcome.LATE
        return Outcome.GONE if self.targets.mood == "dead" else None

    def put(self, records, deadline_s, on_progress=None):
        if trouble := self._trouble(deadline_s):
            return [trouble] * len(records)
        for record in records:
            header = read_header(record)[0]
            self.records[namespace_of(header), header.key] = bytes(record)
        return [Outcome.OK] * len(records)

    def get(self, namespace, keys, into, deadline_s, on_progress=None):
        if trouble := self._trouble(deadline_s):
            return ReceivedRecords(0, trouble)
        for number, (key, buffer) in enumerate(zip(keys, into, strict=True)):
            record = self.records.get((namespace, key), b"")
            if not 0 < len(record) <= len(buffer):
                return ReceivedRecords(number, Outcome.MISS)
            buffer[: len(record)] = record
        return ReceivedRecords(len(keys), Outcome.OK)

    def exist(self, namespace, keys, deadline_s):
        if trouble := self._trouble(deadline_s):
            return HeldFlags(bytes(len(keys)), trouble)
        return HeldFlags(bytes((namespace, key) in self.records for key in keys), Outcome.OK)

    def delete(self, namespace, keys, deadline_s):
        if trouble := self._trouble(deadline_s):
            return BlockCount(0, trouble)
        return BlockCount(
            sum(self.records.pop((namespace, key), None) is not None for key in keys), Outcome.OK
        )

    def suspect(self, namespace, keys, deadline_s):
        return BlockCount(0, self._trouble(deadline_s) or Outcome.OK)  # none of them is damaged

    def use(self, namespace, keys, deadline_s):
        return BlockCount(0, self._trouble(deadline_s) or Outcome.OK)

    def may(self):
        return ("read", "write", "delete")

    def probe(self, deadline_s):
        return self._trouble(deadline_s) or Outcome.OK

    def close(self):
        pass


class Source:
    def __init__(self, count=3):
        self.count = count

    def watch(self, on_members):
        numbers = range(self.count)
        on_members([Member(id=f"t{n}", address=f"tcp://10.0.0.{n}:7000") for n in numbers])

    def trouble(self):
        return ""

    def close(self):
        pass


class TestPoolTier(SharedTierContract):
    deadline_s = 1.5

    def make_remote_side(self, folder):
        return Targets()

    def make_tier(self, remote_side):
        def reach(member):
            return Target(remote_side, int(member.id[1:]))

        return PoolTier(Source(), reach, PoolTierOptions(deadline_s=1.5, ask_s=1.5))


class TestStripedPoolTier(SharedTierContract):
    """Blocks are spread over five members, with parity."""

    deadline_s = 1.5

    def make_remote_side(self, folder):
        return Targets(5)

    def make_tier(self, remote_side):
        def reach(member):
            return Target(remote_side, int(member.id[1:]))

        return PoolTier(Source(5), reach, PoolTierOptions(deadline_s=1.5, ask_s=1.5))


# A contract that lets anything through proves nothing.


class Optimist(SharedMemoryTier):
    def held(self, namespace, keys, start, within_s=math.inf):
        return sum((namespace, key) in self.records for key in keys[start:]) * self._is_reachable()


class WithoutNamespaces(SharedMemoryTier):
    """Names records by key alone."""

    ONE = Namespace(bytes(16), bytes(16), 65_000, 128)

    def write(self, batch):
        outcomes = super().write(batch)
        for (namespace, key), record in list(self.records.items()):
            del self.records[namespace, key]
            self.records[self.ONE, key] = record
        return outcomes

    def read(self, batch):
        return super().read([get._replace(namespace=self.ONE) for get in batch])

    def held(self, namespace, keys, start, within_s=math.inf):
        return super().held(self.ONE, keys, start, within_s)

    def delete(self, batch):
        super().delete([get._replace(namespace=self.ONE) for get in batch])


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
    def _is_reachable(self):
        return not self._closed


class Vague(SharedMemoryTier):
    def ask(self, namespace, keys, start, within_s=math.inf):
        return HeldAnswer(self.held(namespace, keys, start) if within_s else 0, Outcome.OK)


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
        (Optimist, "test_the_leading_run_is_counted_up_to_a_hole"),
        (Misdirected, "test_what_is_not_there_is_a_miss"),
        (Scribbling, "test_buffers_stay_the_callers"),
        (WithoutNamespaces, "test_the_same_key_in_two_namespaces_is_two_records"),
        (WithoutNamespaces, "test_one_batch_deletes_in_each_namespace_what_it_names_there"),
    ],
)
def test_the_contract_detects_a_broken_shared_tier(broken, test):
    with pytest.raises((AssertionError, ValueError)):
        getattr(TestSharedMemoryTier(), test)(broken({}))


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (Boastful, "test_blocks_that_were_not_written_are_not_known"),
        (Vague, "test_no_answer_is_distinct_from_a_miss"),
        (Deaf, "test_a_dead_remote_side_is_an_outcome_in_time"),
        (Fragile, "test_a_dead_remote_side_is_an_outcome_in_time"),
    ],
)
def test_the_contract_detects_wrong_behaviour_with_a_dead_remote_side(broken, test):
    remote_side = Memory()
    tier = remote_side.tier(broken)
    with pytest.raises((AssertionError, ConnectionError)):
        getattr(TestSharedMemoryTier(), test)(tier, remote_side)
