"""The pool tier finds what it wrote, whoever comes, goes, stalls or lies."""

import random
import threading
import time

import msgspec
import pytest

from holdfast.blocks.envelope import read_header
from holdfast.blocks.key import Chain
from holdfast.buffers import aligned_buffer
from holdfast.codec.pack import pack, payload, verify
from holdfast.errors import Outcome, RefusedError
from holdfast.limits import SEGMENT_BLOCKS
from holdfast.testing.payloads import header_of, payload_of, record_of, world_of
from holdfast.tiers.base import Get, Put, Shared, segment_place
from holdfast.tiers.pool.breaker import BreakerOptions
from holdfast.tiers.pool.health import HealthOptions
from holdfast.tiers.pool.members import Member
from holdfast.tiers.pool.membership import MembershipOptions
from holdfast.tiers.pool.tier import PoolOptions, PoolTier
from holdfast.wire.target import Found, Got, Held

WORLD = world_of(8_000)
QUICK = PoolOptions(
    deadline_s=0.5,
    ask_s=0.5,
    membership=MembershipOptions(dead_after_s=0.0, ramp_s=0.0, fleeting_s=0.0),
    health=HealthOptions(breaker=BreakerOptions(failures=2, pause_s=30.0)),
)
RESTLESS = msgspec.structs.replace(
    QUICK, health=HealthOptions(breaker=BreakerOptions(failures=2, pause_s=0.1, pause_max_s=0.2))
)


class FakeTarget:
    """A target in memory that can be dead, slow or rude."""

    def __init__(self) -> None:
        self.epoch = 0
        self.records = {}
        self.mood = "well"
        self.calls = 0

    def put(self, records, deadline_s):
        if not self._answers():
            return [Outcome.GONE] * len(records)
        for record in records:
            self.records[read_header(record)[0].key] = bytes(record)
        return [Outcome.OK] * len(records)

    def get(self, world, keys, into, deadline_s):
        if not self._answers():
            return Got(0, Outcome.GONE)
        for number, (key, buffer) in enumerate(zip(keys, into, strict=True)):
            if key not in self.records:
                return Got(number, Outcome.MISS)
            buffer[:] = self.records[key]
        return Got(len(keys), Outcome.OK)

    def exist(self, world, keys, deadline_s):
        if not self._answers():
            return Held(bytes(len(keys)), Outcome.GONE)
        return Held(bytes(key in self.records for key in keys), Outcome.OK)

    def delete(self, world, keys, deadline_s):
        return Found(sum(self.records.pop(key, None) is not None for key in keys), Outcome.OK)

    def stats(self, deadline_s):
        return {}, Outcome.OK if self._answers() else Outcome.GONE

    def stage(self, world, keys, deadline_s):
        raise NotImplementedError

    def close(self) -> None:
        pass

    def _answers(self) -> bool:
        self.calls += 1
        if "slow" in self.mood:
            time.sleep(0.2)
        if self.mood == "rude":
            raise RefusedError("go away")
        return "dead" not in self.mood


class Source:
    """Members as the test says."""

    def watch(self, told) -> None:
        self.told = told

    def trouble(self) -> str:
        return ""

    def close(self) -> None:
        pass


class Fleet:
    """A pool over fake targets."""

    def __init__(self, count: int, options: PoolOptions) -> None:
        self.targets = {f"t{i}": FakeTarget() for i in range(count)}
        self.source = Source()
        self.pool = PoolTier(self.source, lambda member: self.targets[member.id], options)
        self.announce(self.targets)

    def announce(self, names) -> None:
        self.source.told(
            [Member(id=name, address=f"tcp://10.0.0.{int(name[1:]) + 1}:7000") for name in names]
        )

    def write(self, chain: Chain) -> list[Outcome]:
        return self.pool.write([Put(place, record) for place, record in self.records(chain)])

    def records(self, chain: Chain):
        for depth, key in enumerate(chain.keys):
            record = aligned_buffer(WORLD.record_bytes)
            payload(record, WORLD.payload_bytes)[:] = payload_of(key, WORLD.payload_bytes)
            header = header_of(WORLD, key)._replace(depth=depth, segment=chain.segment(depth))
            pack(record, header)
            yield segment_place(chain.segment(depth)), record

    def read(self, chain: Chain) -> list[Outcome]:
        gets = [
            Get(
                segment_place(chain.segment(depth)),
                key,
                aligned_buffer(WORLD.record_bytes),
                WORLD,
            )
            for depth, key in enumerate(chain.keys)
        ]
        outcomes = self.pool.read(gets)
        for get, outcome in zip(gets, outcomes, strict=True):
            if outcome is Outcome.OK:
                sizes = (WORLD.fingerprint, WORLD.payload_bytes)
                assert verify(get.into, get.key, *sizes) is Outcome.OK
        return outcomes


@pytest.fixture
def fleet():
    made = []

    def make(count: int = 4, options: PoolOptions = QUICK) -> Fleet:
        made.append(Fleet(count, options))
        return made[-1]

    yield make
    for one in made:
        one.pool.close()


def chain_of(seed: int, blocks: int) -> Chain:
    chain = Chain(b"k" * 32, WORLD.fingerprint, 1)
    dice = random.Random(seed)
    chain.extend([dice.randrange(1000) for _ in range(blocks)])
    return chain


def test_it_is_a_shared_tier(fleet) -> None:
    assert isinstance(fleet().pool, Shared)


def test_a_chain_comes_back_from_several_members(fleet) -> None:
    one = fleet()
    chain = chain_of(1, 3 * SEGMENT_BLOCKS + 5)
    assert set(one.write(chain)) == {Outcome.OK}
    assert one.pool.held(WORLD, chain.keys, 0) == len(chain)
    assert set(one.read(chain)) == {Outcome.OK}
    holders = [sum(key in t.records for t in one.targets.values()) for key in chain.keys]
    assert set(holders) == {1}


def test_a_segment_lies_on_one_member_whole(fleet) -> None:
    one = fleet()
    chain = chain_of(2, SEGMENT_BLOCKS)
    one.write(chain)
    assert sorted(len(target.records) for target in one.targets.values()) == [0, 0, 0, 512]


def test_held_counts_from_where_it_is_asked_and_ends_at_a_hole(fleet) -> None:
    one = fleet()
    chain = chain_of(3, 2 * SEGMENT_BLOCKS)
    one.write(chain)
    assert one.pool.held(WORLD, chain.keys, 700) == len(chain) - 700
    for target in one.targets.values():
        target.records.pop(chain.keys[900], None)
    assert one.pool.held(WORLD, chain.keys, 700) == 200
    assert one.pool.held(WORLD, chain.keys, 900) == 0


def test_a_dead_member_costs_its_segments_and_no_more(fleet) -> None:
    one = fleet()
    chains = [chain_of(seed, 20) for seed in range(40)]
    for chain in chains:
        one.write(chain)
    dead = next(target for target in one.targets.values() if target.records)
    lost = set(dead.records)
    dead.mood = "dead"
    for chain in chains:
        outcomes = one.read(chain)
        expected = chain.keys[0] not in lost
        assert (outcomes[0] is Outcome.OK) is expected
    calls = dead.calls
    for chain in chains:
        one.read(chain)
    assert dead.calls == calls, "its breaker is open: nobody asks it"
    for chain in chains:
        assert set(one.write(chain)) == {Outcome.OK}, "the next in rank takes its segments"
        assert set(one.read(chain)) == {Outcome.OK}


def test_after_a_join_the_owner_of_old_is_asked_too(fleet) -> None:
    one = fleet(4)
    one.announce(["t0", "t1", "t2"])
    chains = [chain_of(seed, 3) for seed in range(60)]
    for chain in chains:
        one.write(chain)
    one.announce(["t0", "t1", "t2", "t3"])
    for chain in chains:
        assert one.pool.held(WORLD, chain.keys, 0) == 3
        assert set(one.read(chain)) == {Outcome.OK}


def test_what_the_owner_of_old_served_is_a_stray_until_it_is_taken(fleet) -> None:
    one = fleet(4)
    one.announce(["t0", "t1", "t2"])
    chains = [chain_of(seed, 3) for seed in range(60)]
    for chain in chains:
        one.write(chain)
    one.announce(["t0", "t1", "t2", "t3"])
    strayed = set()
    for chain in chains:
        one.read(chain)
        strayed |= one.pool.strayed(chain.keys, WORLD.record_bytes)
    moved = [chain for chain in chains if chain.keys[0] in strayed]
    assert 0 < len(moved) < 40
    for chain in moved:
        assert set(chain.keys) <= strayed
        one.write(chain)
        assert set(chain.keys) <= one.targets["t3"].records.keys()
        one.read(chain)
        assert one.pool.strayed(chain.keys, WORLD.record_bytes) == set()


def test_users_requests_try_nobody_and_who_stood_in_is_remembered(fleet) -> None:
    one = fleet(2, RESTLESS)
    chains = [chain_of(seed, 3) for seed in range(12)]
    dead = one.targets["t0"]
    dead.mood = "slow and dead"
    for chain in chains * 2:
        one.write(chain)
    assert len(one.targets["t1"].records) == 36
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        start = time.monotonic()
        assert set(one.read(chains[0])) == {Outcome.OK}
        assert time.monotonic() - start < 0.15, "the trial is nobody's business"
    dead.mood = "well"
    while one.pool.health.down(0.0):
        time.sleep(0.05)
    for chain in chains:
        assert set(one.read(chain)) == {Outcome.OK}, "from who stood in"
    assert one.pool.strays.take([key for c in chains for key in c.keys], 1) != set()


def test_places_of_a_member_that_left_or_is_long_down_are_lost(fleet) -> None:
    one = fleet(3)
    chains = [chain_of(seed, 3) for seed in range(40)]
    for chain in chains:
        one.write(chain)
    assert one.pool.lost() is None
    held = {name: set(target.records) for name, target in one.targets.items()}
    one.announce(["t0", "t1"])
    lost = one.pool.lost()
    for chain in chains:
        assert lost(segment_place(chain.segment(0))) == (chain.keys[0] in held["t2"])
    one.targets["t1"].mood = "dead"
    for chain in chains:
        one.read(chain)
    lost = one.pool.lost()
    assert any(lost(segment_place(chain.segment(0))) for chain in chains)
    assert one.pool.lost() is None


def test_what_a_member_has_already_is_not_sent_to_it_again(fleet) -> None:
    one = fleet(3)
    chain = chain_of(1, 200)
    one.write(chain)
    before = one.pool.usage().written_bytes
    assert before == 200 * WORLD.record_bytes
    holder = next(target for target in one.targets.values() if target.records)
    for key in chain.keys[:50]:
        del holder.records[key]
    assert set(one.write(chain)) == {Outcome.OK}
    assert one.pool.usage().written_bytes - before == 50 * WORLD.record_bytes
    assert len(holder.records) == 200


def test_a_member_that_refuses_us_is_gone_not_an_error(fleet) -> None:
    one = fleet(1)
    chain = chain_of(1, 3)
    one.targets["t0"].mood = "rude"
    assert set(one.write(chain)) == {Outcome.GONE}
    assert one.pool.held(WORLD, chain.keys, 0) == 0
    assert Outcome.OK not in one.read(chain)


def test_no_members_is_a_miss(fleet) -> None:
    one = fleet(0)
    chain = chain_of(1, 3)
    assert Outcome.OK not in one.write(chain)
    assert Outcome.OK not in one.read(chain)


def test_a_hot_segment_gets_a_second_copy_and_outlives_its_owner(fleet) -> None:
    one = fleet()
    chain = chain_of(1, 4)
    one.write(chain)
    for _ in range(80):
        one.read(chain)
    one.write(chain)
    holders = [t for t in one.targets.values() if chain.keys[0] in t.records]
    assert len(holders) == 2
    holders[0].mood = "dead"
    assert set(one.read(chain)) == {Outcome.OK}


def test_a_late_copy_is_overtaken_by_the_other_within_the_budget(fleet) -> None:
    one = fleet()
    chain = chain_of(1, 4)
    for _ in range(80):
        one.read(chain)
    one.write(chain)
    for _ in range(200):
        one.read(chain)
    slow = next(t for t in one.targets.values() if chain.keys[0] in t.records)
    slow.mood = "slow"
    times = []
    for _ in range(6):
        start = time.monotonic()
        assert set(one.read(chain)) == {Outcome.OK}
        times.append(time.monotonic() - start)
    assert min(times) < 0.1
    assert one.pool.hedging.hedges <= one.pool.hedging.requests * 0.05 + 10


def test_many_threads_at_once(fleet) -> None:
    one = fleet()
    chains = [chain_of(seed, 30) for seed in range(16)]
    failures = []

    def work(chain: Chain) -> None:
        one.write(chain)
        if set(one.read(chain)) != {Outcome.OK}:
            failures.append(chain)

    threads = [threading.Thread(target=work, args=(chain,)) for chain in chains]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_record_without_a_segment_is_found_again(fleet) -> None:
    one = fleet()
    record = record_of(WORLD, b"q" * 16)
    assert one.pool.write([Put(segment_place(bytes(8)), record)]) == [Outcome.OK]
    into = aligned_buffer(WORLD.record_bytes)
    got = one.pool.read([Get(segment_place(bytes(8)), b"q" * 16, into, WORLD)])
    assert got == [Outcome.OK]
    assert into == record
