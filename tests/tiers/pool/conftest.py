"""Pools over targets in memory, and servers that members register with, run by the tests."""

import random
import threading
import time

import msgspec
import pytest

from holdfast.blocks.envelope import header_of_record, read_header
from holdfast.blocks.key import Chain
from holdfast.buffers import aligned_buffer
from holdfast.codec.pack import check_without_key, pack, payload, verify
from holdfast.errors import Outcome, RefusedError
from holdfast.membership.members import Member, MemberState
from holdfast.membership.membership import MembershipOptions
from holdfast.testing.payloads import header_of, namespace_of, payload_of
from holdfast.tiers.base import TierGet, TierPut, segment_place
from holdfast.tiers.breaker import BreakerOptions
from holdfast.tiers.pool.health import HealthOptions
from holdfast.tiers.pool.tier import PoolTier, PoolTierOptions
from holdfast.wire.remote.client import BlockCount, HeldFlags, ReceivedRecords, TargetClient

NAMESPACE = namespace_of(8_000)
QUICK = PoolTierOptions(
    deadline_s=60.0,  # a busy machine is not what these targets are judged by
    ask_s=60.0,
    stripe_targets=1,  # tests of stripes set it
    membership=MembershipOptions(dead_after_s=0.0, ramp_s=0.0, transient_s=0.0, unseen_s=0.0),
    health=HealthOptions(breaker=BreakerOptions(failures=2, pause_s=30.0), slow_factor=1e9),
)


class FakeTarget(TargetClient):
    """A target in memory that can be dead, slow or rude."""

    def __init__(self) -> None:
        super().__init__("tcp://10.0.0.1:7000")
        self.records = {}
        self.mood = "well"
        self.slow_s = 0.2
        self.calls = 0
        self.callers = []
        self.used = []

    def put(self, records, deadline_s, on_progress=None):
        if not self._answers():
            return [Outcome.GONE] * len(records)
        for record in records:
            self.records[read_header(record)[0].key] = bytes(record)
        return [Outcome.OK] * len(records)

    def get(self, namespace, keys, into, deadline_s, on_progress=None):
        if not self._answers():
            return ReceivedRecords(0, Outcome.GONE)
        for number, (key, buffer) in enumerate(zip(keys, into, strict=True)):
            if not self._has(namespace, key):
                return ReceivedRecords(number, Outcome.MISS)
            record = self.records[key]
            buffer[: len(record)] = record
        return ReceivedRecords(len(keys), Outcome.OK)

    def exist(self, namespace, keys, deadline_s):
        if not keys:  # the pool's own question whether an idle member is there
            return HeldFlags(b"", Outcome.GONE if "dead" in self.mood else Outcome.OK)
        if not self._answers():
            return HeldFlags(bytes(len(keys)), Outcome.GONE)
        return HeldFlags(bytes(self._has(namespace, key) for key in keys), Outcome.OK)

    def delete(self, namespace, keys, deadline_s):
        return BlockCount(sum(self.records.pop(key, None) is not None for key in keys), Outcome.OK)

    def use(self, namespace, keys, deadline_s):
        self.used += [key for key in keys if self._has(namespace, key)]
        return BlockCount(len(keys), Outcome.OK)

    def suspect(self, namespace, keys, deadline_s):
        damaged = [
            key
            for key in keys
            if key in self.records
            and check_without_key(memoryview(self.records[key]), key, namespace) is Outcome.CORRUPT
        ]
        return self.delete(namespace, damaged, deadline_s)

    def may(self):
        return ("read", "write", "delete")

    def probe(self, deadline_s):
        return Outcome.OK if self._answers() else Outcome.GONE

    def close(self) -> None:
        pass

    def _has(self, namespace, key) -> bool:
        header = header_of_record(self.records.get(key, b""))
        return header is not None and header.fingerprint == namespace.fingerprint

    def _answers(self) -> bool:
        self.calls += 1
        self.callers.append(threading.current_thread())
        if "slow" in self.mood:
            time.sleep(self.slow_s)
        if self.mood == "rude":
            raise RefusedError("go away")
        return "dead" not in self.mood


class Source:
    """Members as the test says."""

    def watch(self, on_members) -> None:
        self.told = on_members

    def trouble(self) -> str:
        return ""

    def close(self) -> None:
        pass


class Fleet:
    """A pool over fake targets."""

    def __init__(self, count: int, options: PoolTierOptions) -> None:
        self.targets = {f"t{i}": FakeTarget() for i in range(count)}
        self.source = Source()
        self.pool = PoolTier(self.source, lambda member: self.targets[member.id], options)
        self.announce(self.targets)

    def announce(self, names, draining=()) -> None:
        self.source.told(
            [
                Member(
                    id=name,
                    address=f"tcp://10.0.0.{int(name[1:]) + 1}:7000",
                    state=MemberState.DRAINING if name in draining else MemberState.SERVING,
                )
                for name in names
            ]
        )

    def chain(self, seed: int, blocks: int) -> Chain:
        chain = Chain(b"k" * 32, NAMESPACE.fingerprint, 1)
        rng = random.Random(seed)
        chain.extend([rng.randrange(1000) for _ in range(blocks)])
        return chain

    def write(self, chain: Chain) -> list[Outcome]:
        return self.pool.write(self.puts(chain))

    def puts(self, chain: Chain) -> list[TierPut]:
        return [TierPut(place, record) for place, record in self.records(chain)]

    def records(self, chain: Chain):
        for depth, key in enumerate(chain.keys):
            record = aligned_buffer(NAMESPACE.slot_bytes)
            payload(record, NAMESPACE.raw_bytes)[:] = payload_of(key, NAMESPACE.raw_bytes)
            header = header_of(NAMESPACE, key, chain.parent(depth), depth)
            header = header._replace(segment=chain.segment(depth))
            pack(record, header)
            yield segment_place(chain.segment(depth)), record

    def read(self, chain: Chain) -> list[Outcome]:
        gets = [
            TierGet(
                segment_place(chain.segment(depth)),
                key,
                aligned_buffer(NAMESPACE.slot_bytes),
                NAMESPACE,
            )
            for depth, key in enumerate(chain.keys)
        ]
        outcomes = self.pool.read(gets)
        for get, outcome in zip(gets, outcomes, strict=True):
            if outcome is Outcome.OK:
                sizes = (NAMESPACE.fingerprint, NAMESPACE.raw_bytes)
                assert verify(get.into, get.key, *sizes) is Outcome.OK
        return outcomes


@pytest.fixture
def fleet():
    """Call to get a pool of so many targets; changes are to its options."""
    made = []

    def make(count: int = 4, **changes) -> Fleet:
        made.append(Fleet(count, msgspec.structs.replace(QUICK, **changes)))
        return made[-1]

    yield make
    for one in made:
        one.pool.close()
