"""The pool tier finds what it wrote, whoever comes, goes, stalls or lies."""

import threading
import time

import pytest

from holdfast.blocks.key import Chain
from holdfast.buffers import aligned_buffer
from holdfast.errors import Outcome
from holdfast.limits import SEGMENT_BLOCKS
from holdfast.membership.members import Member
from holdfast.membership.membership import MembershipOptions
from holdfast.testing.payloads import namespace_of, record_of
from holdfast.tiers.base import HeldAnswer, Queryable, SharedTier, TierGet, TierPut, segment_place
from holdfast.tiers.breaker import BreakerOptions
from holdfast.tiers.pool.health import HealthOptions
from holdfast.tiers.pool.segment_batch import segment_of
from holdfast.tiers.pool.tier import PoolTier
from holdfast.wire.remote.client import ReceivedRecords

NAMESPACE = namespace_of(8_000)
RESTLESS = HealthOptions(breaker=BreakerOptions(failures=2, pause_s=0.1, pause_max_s=0.2))


def first_get(chain):
    """Return a read of the first block of a chain, into a buffer of its own."""
    into = aligned_buffer(NAMESPACE.slot_bytes)
    return TierGet(segment_place(chain.segment(0)), chain.keys[0], into, NAMESPACE)


def test_it_is_a_shared_tier(fleet) -> None:
    assert isinstance(fleet().pool, SharedTier)


def test_a_chain_comes_back_from_several_members(fleet) -> None:
    one = fleet()
    chain = one.chain(1, 3 * SEGMENT_BLOCKS + 5)
    assert set(one.write(chain)) == {Outcome.OK}
    assert one.pool.held(NAMESPACE, chain.keys, 0) == len(chain)
    assert set(one.read(chain)) == {Outcome.OK}
    holders = [sum(key in t.records for t in one.targets.values()) for key in chain.keys]
    assert set(holders) == {1}


def test_a_segment_is_placed_on_one_member_as_a_whole(fleet) -> None:
    one = fleet()
    chain = one.chain(2, SEGMENT_BLOCKS)
    one.write(chain)
    assert sorted(len(target.records) for target in one.targets.values()) == [0, 0, 0, 512]


def test_held_counts_blocks_from_its_start_to_the_first_missing_block(fleet) -> None:
    one = fleet()
    chain = one.chain(3, 2 * SEGMENT_BLOCKS)
    one.write(chain)
    assert one.pool.held(NAMESPACE, chain.keys, 700) == len(chain) - 700
    for target in one.targets.values():
        target.records.pop(chain.keys[900], None)
    assert one.pool.held(NAMESPACE, chain.keys, 700) == 200
    assert one.pool.held(NAMESPACE, chain.keys, 900) == 0


def test_a_dead_member_loses_only_its_own_segments(fleet) -> None:
    one = fleet()
    chains = [one.chain(seed, 20) for seed in range(40)]
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


def test_the_previous_owner_of_a_segment_is_read_after_a_join(fleet) -> None:
    one = fleet(4)
    one.announce(["t0", "t1", "t2"])
    chains = [one.chain(seed, 3) for seed in range(60)]
    for chain in chains:
        one.write(chain)
    one.announce(["t0", "t1", "t2", "t3"])
    for chain in chains:
        assert one.pool.held(NAMESPACE, chain.keys, 0) == 3
        assert set(one.read(chain)) == {Outcome.OK}


def test_a_dead_member_that_left_gets_no_request_after_repeated_list_updates(fleet):
    one = fleet(4)
    chains = [one.chain(seed, 3) for seed in range(20)]
    dead = one.targets["t0"]
    dead.mood = "dead"
    for chain in chains:
        one.read(chain)
    assert not one.pool.health.trusted("t0")
    before = dead.calls
    for chain in chains:
        one.announce(["t1", "t2", "t3"])
        assert set(one.read(chain)) == {Outcome.MISS}
    assert dead.calls == before


def test_a_member_that_rejoins_is_compared_again_after_one_list_update(fleet) -> None:
    """The list is told once; time decides when a member counts again."""
    settling = MembershipOptions(dead_after_s=0.5, ramp_s=0.0, transient_s=0.0, unseen_s=0.0)
    one = fleet(3, membership=settling)
    for listed in (["t1", "t2"], ["t0", "t1", "t2"]):
        one.announce(listed)
        end = time.monotonic() + 60
        while one.pool.health._listed != set(listed):
            assert time.monotonic() < end
            time.sleep(0.02)


def test_a_block_served_by_its_previous_owner_is_misplaced_until_it_is_rewritten(fleet) -> None:
    one = fleet(4)
    one.announce(["t0", "t1", "t2"])
    chains = [one.chain(seed, 3) for seed in range(60)]
    for chain in chains:
        one.write(chain)
    one.announce(["t0", "t1", "t2", "t3"])
    misplaced = set()
    for chain in chains:
        one.read(chain)
        misplaced |= one.pool.misplaced(NAMESPACE, chain.keys)
    moved = [chain for chain in chains if chain.keys[0] in misplaced]
    assert 0 < len(moved) < 40
    for chain in moved:
        assert set(chain.keys) <= misplaced
        one.write(chain)
        assert set(chain.keys) <= one.targets["t3"].records.keys()
        one.read(chain)
        assert one.pool.misplaced(NAMESPACE, chain.keys) == set()


def test_probes_run_outside_user_requests_and_substitutes_are_remembered(fleet) -> None:
    one = fleet(2, health=RESTLESS)
    chains = [one.chain(seed, 3) for seed in range(12)]
    dead = one.targets["t0"]
    dead.mood = "slow and dead"
    for chain in chains * 2:
        one.write(chain)
    assert len(one.targets["t1"].records) == 36
    dead.callers.clear()
    end = time.monotonic() + 60
    while len(dead.callers) < 3 and time.monotonic() < end:
        assert set(one.read(chains[0])) == {Outcome.OK}
    assert len(dead.callers) >= 3, "it is tried"
    assert threading.current_thread() not in dead.callers, "the trial is nobody's business"
    dead.mood = "well"
    while one.pool.health.down(0.0):
        time.sleep(0.05)
    for chain in chains:
        assert set(one.read(chain)) == {Outcome.OK}, "from who stood in"
    assert (
        one.pool.misplaced_blocks.take(NAMESPACE, [key for c in chains for key in c.keys]) != set()
    )


def test_places_of_a_member_that_left_or_is_long_down_are_lost(fleet) -> None:
    one = fleet(3)
    chains = [one.chain(seed, 3) for seed in range(40)]
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


def test_blocks_that_a_member_already_holds_are_known_before_a_write(fleet) -> None:
    one = fleet(3)
    assert isinstance(one.pool, Queryable)
    chain = one.chain(1, 200)
    puts = one.puts(chain)
    assert one.pool.known(puts) == [False] * 200
    one.write(chain)
    holder = next(target for target in one.targets.values() if target.records)
    for key in chain.keys[:50]:
        del holder.records[key]
    assert one.pool.known(puts) == [False] * 50 + [True] * 150
    assert one.pool.known([]) == []


def test_few_small_blocks_are_written_without_a_lookup(fleet) -> None:
    one = fleet(3)
    chain = one.chain(1, 5)
    one.write(chain)
    calls = sum(target.calls for target in one.targets.values())
    assert one.pool.known(one.puts(chain)) == [False] * 5
    assert sum(target.calls for target in one.targets.values()) == calls


def test_a_block_of_a_hot_segment_is_known_only_if_both_owners_hold_it(fleet, monkeypatch) -> None:
    one = fleet(3)
    monkeypatch.setattr(one.pool.hot, "is_hot", lambda _: True)
    chain = one.chain(1, 200)
    one.write(chain)
    first, second = (target for target in one.targets.values() if target.records)
    del first.records[chain.keys[0]]
    del second.records[chain.keys[7]]
    there = one.pool.known(one.puts(chain))
    assert [depth for depth, known in enumerate(there) if not known] == [0, 7]


@pytest.mark.parametrize("mood", ["dead", "rude"])
def test_no_block_is_known_of_a_member_that_does_not_answer(fleet, mood) -> None:
    one = fleet(2)
    chain = one.chain(1, 200)
    one.write(chain)
    for target in one.targets.values():
        target.mood = mood
    assert one.pool.known(one.puts(chain)) == [False] * 200


def test_a_refusal_by_a_member_is_the_outcome_gone_and_not_an_exception(fleet) -> None:
    one = fleet(1)
    chain = one.chain(1, 3)
    one.targets["t0"].mood = "rude"
    assert set(one.write(chain)) == {Outcome.GONE}
    assert one.pool.held(NAMESPACE, chain.keys, 0) == 0
    assert Outcome.OK not in one.read(chain)


def test_reads_and_writes_of_a_pool_without_members_do_not_succeed(fleet) -> None:
    one = fleet(0)
    chain = one.chain(1, 3)
    assert Outcome.OK not in one.write(chain)
    assert Outcome.OK not in one.read(chain)


@pytest.mark.parametrize(("mood", "within_s"), [("dead", 9.0), ("rude", 9.0), ("well", 0.0)])
def test_a_lookup_without_an_answer_is_gone_or_late_and_not_a_miss(fleet, mood, within_s) -> None:
    one = fleet(3)
    chain = one.chain(1, 5)
    assert one.pool.ask(NAMESPACE, chain.keys, 0) == HeldAnswer(0, Outcome.OK)
    one.write(chain)
    assert one.pool.ask(NAMESPACE, chain.keys, 2) == HeldAnswer(3, Outcome.OK)
    for target in one.targets.values():
        target.mood = mood
    said = one.pool.ask(NAMESPACE, chain.keys, 0, within_s)
    assert said == HeldAnswer(0, Outcome.GONE if within_s else Outcome.LATE)


class Listing:
    """A source that is told when to list, and that may be in trouble."""

    def __init__(self, words="") -> None:
        self.words = words

    def watch(self, told) -> None:
        self.told = told

    def trouble(self) -> str:
        return self.words

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("words", "within_s", "listed"),
    [("", 0.05, False), ("no such file", 3_600.0, False), ("", 60.0, True)],
)
def test_a_pool_waits_for_its_first_member_list_until_a_time_limit(words, within_s, listed) -> None:
    tier = PoolTier(source := Listing(words), lambda _: None)
    try:
        if listed:
            member = Member(id="t1", address="tcp://10.0.0.1:7000")
            threading.Timer(0.05, source.told, [[member]]).start()
        assert tier.wait_listed(within_s) is listed
        assert tier.reachable() is listed
    finally:
        tier.close()


def test_a_lookup_does_not_wait_for_reads_that_occupy_all_threads(fleet) -> None:
    one = fleet(1, threads=1, ask_s=0.05)
    gate, begun = threading.Event(), threading.Event()
    target = one.targets["t0"]
    get = target.get

    def stuck(*call):
        begun.set()
        gate.wait(60)
        return get(*call)

    target.get = stuck
    chains = [one.chain(seed, 2) for seed in (1, 2)]
    gets = [first_get(chain) for chain in chains]
    reading = threading.Thread(target=one.pool.read, args=(gets,))
    reading.start()
    assert begun.wait(60)
    found = []
    long = one.chain(3, SEGMENT_BLOCKS + 1)
    asking = threading.Thread(target=lambda: found.append(one.pool.held(NAMESPACE, long.keys, 0)))
    asking.start()
    asking.join(60)
    assert found == [0]
    assert not gate.is_set()
    gate.set()
    reading.join(60)
    assert not reading.is_alive()


def test_a_part_of_a_read_that_no_thread_starts_before_the_deadline_is_late(fleet) -> None:
    one = fleet(1, threads=1, deadline_s=0.05)
    target = one.targets["t0"]
    get = target.get
    chains = [one.chain(seed, 1) for seed in (1, 2, 3)]
    for chain in chains:  # a busy machine may need longer than the pool permits
        target.put([record for _, record in one.records(chain)], 60.0)

    def until_the_deadline(namespace, keys, into, deadline_s, *rest):
        time.sleep(deadline_s)
        return get(namespace, keys, into, deadline_s, *rest)

    target.get = until_the_deadline
    gets = [first_get(chain) for chain in chains]
    *begun, last = one.pool.read(gets)
    assert set(begun) <= {Outcome.OK, Outcome.LATE}, "on a busy machine a thread may begin too late"
    assert last is Outcome.LATE


def test_records_after_the_first_missing_one_are_misses(fleet) -> None:
    one = fleet(1)
    chain = one.chain(1, 4)
    one.write(chain)
    del one.targets["t0"].records[chain.keys[1]]
    assert one.read(chain) == [Outcome.OK, Outcome.MISS, Outcome.MISS, Outcome.MISS]


def test_a_pool_reads_and_writes_if_no_thread_can_be_started(fleet, monkeypatch):
    """A pool of threads that would make one now leaves the work in its queue, for later."""
    one = fleet()

    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    chain = one.chain(1, 2 * SEGMENT_BLOCKS + 5)
    assert set(one.write(chain)) == {Outcome.OK}
    assert one.pool.held(NAMESPACE, chain.keys, 0) == len(chain)
    assert set(one.read(chain)) == {Outcome.OK}


def test_a_pool_writes_records_during_interpreter_exit(fleet, monkeypatch):
    """Pools of threads accept no work once the interpreter exits; the store still writes then."""
    one = fleet()

    def refuse(*_):
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(one.pool._threads, "submit", refuse)
    chain = one.chain(1, 2 * SEGMENT_BLOCKS + 5)
    assert set(one.write(chain)) == {Outcome.OK}
    assert one.pool.held(NAMESPACE, chain.keys, 0) == len(chain)


def test_an_unexpected_error_in_one_part_of_a_read_waits_for_the_other_parts(fleet) -> None:
    one = fleet(2)
    chain = one.chain(1, 8 * SEGMENT_BLOCKS)
    heads = chain.keys[::SEGMENT_BLOCKS]
    places = [segment_place(chain.segment(depth)) for depth in range(0, len(chain), SEGMENT_BLOCKS)]
    owners = [one.pool.lookup.route(segment_of(place)).write[0].id for place in places]
    assert set(owners) == {"t0", "t1"}, "or nobody would be waited for"
    under_way = []

    def slowly(*_):
        under_way.append(True)
        time.sleep(0.3)
        under_way.pop()
        return ReceivedRecords(0, Outcome.MISS)

    def fail(*_):
        raise ZeroDivisionError

    one.targets[owners[0]].get, one.targets[({"t0", "t1"} - {owners[0]}).pop()].get = fail, slowly
    gets = [
        TierGet(place, key, aligned_buffer(NAMESPACE.slot_bytes), NAMESPACE)
        for place, key in zip(places, heads, strict=True)
    ]
    with pytest.raises(ZeroDivisionError):
        one.pool.read(gets)
    assert not under_way
    assert all(report.in_flight_bytes == 0 for report in one.pool.health.reports())


def test_concurrent_writes_and_reads_of_many_threads_succeed(fleet) -> None:
    one = fleet()
    chains = [one.chain(seed, 30) for seed in range(16)]
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
    record = record_of(NAMESPACE, b"q" * 16)
    assert one.pool.write([TierPut(segment_place(bytes(8)), record)]) == [Outcome.OK]
    into = aligned_buffer(NAMESPACE.slot_bytes)
    got = one.pool.read([TierGet(segment_place(bytes(8)), b"q" * 16, into, NAMESPACE)])
    assert got == [Outcome.OK]
    assert into == record


def test_no_member_gets_a_request_while_all_breakers_are_open(fleet) -> None:
    one = fleet()
    chains = [one.chain(seed, 5) for seed in range(20)]
    assert one.pool.reachable()
    for target in one.targets.values():
        target.mood = "dead"
    while one.pool.reachable():
        for chain in chains:
            one.pool.held(NAMESPACE, chain.keys, 0)
    before = sum(target.calls for target in one.targets.values())
    for chain in chains:
        assert one.pool.held(NAMESPACE, chain.keys, 0) == 0
        assert set(one.write(chain)) == {Outcome.GONE}
        assert Outcome.OK not in one.read(chain)
    assert sum(target.calls for target in one.targets.values()) == before


def test_a_target_is_not_blamed_for_a_request_without_time_left(fleet) -> None:
    one = fleet()
    chain = one.chain(1, 5)
    assert one.pool.held(NAMESPACE, chain.keys, 0, within_s=0.0) == 0
    assert sum(target.calls for target in one.targets.values()) == 0
    assert all(report.failure_share == 0 for report in one.pool.health.reports())


def test_a_second_copy_is_not_sent_when_the_first_took_all_of_the_time(fleet, monkeypatch) -> None:
    one = fleet(2, deadline_s=1.0)
    monkeypatch.setattr(one.pool.hot, "is_hot", lambda _: True)
    for target in one.targets.values():
        target.mood, target.slow_s = "slow", 1.2
    chain = one.chain(1, 3)
    assert one.write(chain) == [Outcome.OK] * 3
    assert sorted(target.calls for target in one.targets.values()) == [0, 1]
    assert all(report.failure_share == 0 for report in one.pool.health.reports())
