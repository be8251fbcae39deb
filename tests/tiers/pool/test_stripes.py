"""A striped context comes from all members, and survives the loss of one."""

import threading
import time

import msgspec
import pytest

from holdfast.blocks.envelope import read_header
from holdfast.buffers import aligned_buffer
from holdfast.codec.pack import pack, payload, verify
from holdfast.errors import Outcome
from holdfast.testing.payloads import header_of, namespace_of, payload_of
from holdfast.tiers.base import HeldAnswer, TierGet, segment_place
from holdfast.tiers.breaker import BreakerOptions
from holdfast.tiers.pool.health import HealthOptions
from holdfast.tiers.pool.parity import parity_key, parity_namespace
from holdfast.tiers.pool.tier import PoolTier
from holdfast.wire.remote.client import ReceivedRecords

NAMESPACE = namespace_of(8_000)
STRIPE = 9
UNJUDGED = HealthOptions(
    breaker=BreakerOptions(failures=2, pause_s=30.0), slow_factor=1e9, failure_share_max=1.0
)


@pytest.fixture
def striped(fleet):
    """Call to get a striped pool of so many targets; none is ejected because it is slower."""
    return lambda count=16, **changes: fleet(
        count, stripe_targets=STRIPE, health=UNJUDGED, **changes
    )


@pytest.fixture
def reader(request):
    """Call to get another pool tier over the targets of a fleet, as of a host that just started."""

    def make(one, **changes) -> PoolTier:
        options = msgspec.structs.replace(one.pool.options, **changes)
        pool = PoolTier(one.source, lambda member: one.targets[member.id], options)
        request.addfinalizer(pool.close)
        one.announce(one.targets)
        return pool

    return make


def gets_of(chain):
    return [
        TierGet(
            segment_place(chain.segment(depth)),
            key,
            aligned_buffer(NAMESPACE.slot_bytes),
            NAMESPACE,
        )
        for depth, key in enumerate(chain.keys)
    ]


def read(pool, chain):
    """Read a chain; return the outcomes. No block that is OK is wrong."""
    gets = gets_of(chain)
    outcomes = pool.read(gets)
    for get, outcome in zip(gets, outcomes, strict=True):
        if outcome is Outcome.OK:
            sizes = (NAMESPACE.fingerprint, NAMESPACE.raw_bytes)
            assert verify(get.into, get.key, *sizes) is Outcome.OK
    return outcomes


def holders(one, key):
    return [name for name, target in one.targets.items() if key in target.records]


def blocks_on(target, chain):
    return [key for key in chain.keys if key in target.records]


def row_of(one, chain, first, blocks=8):
    """Return the name of the member with the parity record of the row that begins with a block."""
    [name] = holders(one, parity_key(chain.keys[first], blocks))
    return name


@pytest.mark.parametrize("count", [4, 5, 9])
def test_the_blocks_of_a_segment_are_spread_evenly_over_all_members(striped, count) -> None:
    one = striped(count)
    chain = one.chain(1, 16 * count)
    assert set(one.write(chain)) == {Outcome.OK}
    assert [len(blocks_on(target, chain)) for target in one.targets.values()] == [16] * count


def test_a_segment_of_a_large_pool_is_spread_over_as_many_members_as_the_option_says(striped):
    one = striped(16)
    chain = one.chain(2, 90)
    one.write(chain)
    spread = sorted(len(blocks_on(target, chain)) for target in one.targets.values())
    assert spread == [0] * 7 + [10] * 9


def test_a_pool_of_few_members_is_not_striped(striped) -> None:
    one = striped(3)
    chain = one.chain(3, 40)
    one.write(chain)
    assert sorted(len(target.records) for target in one.targets.values()) == [0, 0, 40]
    assert one.pool.held(NAMESPACE, chain.keys, 0) == 40
    assert set(one.read(chain)) == {Outcome.OK}


def test_a_pool_of_few_members_reads_without_a_question(striped, reader) -> None:
    one = striped(2)
    chain = one.chain(59, 20)
    one.write(chain)
    before = sum(target.calls for target in one.targets.values())
    assert set(read(reader(one), chain)) == {Outcome.OK}
    assert sum(target.calls for target in one.targets.values()) == before + 1


@pytest.mark.parametrize("count", [4, 16])
def test_every_context_is_whole_while_any_one_member_is_gone(striped, reader, count) -> None:
    one = striped(count)
    chain = one.chain(4, 1_100)
    for at in range(0, len(chain), 32):  # as a store writes
        one.pool.write(one.puts(chain)[at : at + 32])
    one.pool.close()
    for dead in one.targets.values():
        dead.mood = "dead"
        pool = reader(one)
        assert pool.held(NAMESPACE, chain.keys, 0) == len(chain)
        assert set(read(pool, chain)) == {Outcome.OK}
        dead.mood = "well"
    lost = sum(bool(blocks_on(target, chain)) for target in one.targets.values())
    assert lost > 1


def test_parity_costs_less_than_a_third_of_the_bytes(striped) -> None:
    for count in (9, 16):
        one = striped(count)
        for seed in range(4):
            chain = one.chain(10 * count + seed, 203)
            for at in range(0, len(chain), 32):
                one.pool.write(one.puts(chain)[at : at + 32])
        one.pool.close()
        stored = sum(len(r) for target in one.targets.values() for r in target.records.values())
        assert stored <= 1.3 * 4 * 203 * NAMESPACE.slot_bytes
        assert one.pool.usage().parity_bytes == stored - 4 * 203 * NAMESPACE.slot_bytes


def test_blocks_written_one_by_one_are_protected_too(striped, reader) -> None:
    one = striped(16)
    chain = one.chain(5, 64)
    for put in one.puts(chain):
        one.pool.write([put])
    one.pool.close()
    [holder] = holders(one, chain.keys[20])
    one.targets[holder].mood = "dead"
    pool = reader(one)
    assert pool.held(NAMESPACE, chain.keys, 0) == 64
    assert set(read(pool, chain)) == {Outcome.OK}


def test_the_parity_of_blocks_written_one_by_one_is_bounded(striped) -> None:
    """Lone blocks of many contexts would cost a copy each."""
    one = striped(16)
    for seed in range(200):
        one.write(one.chain(1_000 + seed, 1))
    one.pool.close()
    assert one.pool.usage().parity_bytes <= 200 * NAMESPACE.slot_bytes / 8


def test_a_longer_chain_than_is_stored_is_held_to_the_end_of_its_last_short_row(striped, reader):
    one = striped(16)
    chain = one.chain(60, 40)
    one.pool.write(one.puts(chain)[:21])
    one.pool.close()  # the row from 16 to 20 gets its parity record
    assert row_of(one, chain, 16, 5)
    assert reader(one).ask(NAMESPACE, chain.keys, 0) == HeldAnswer(21, Outcome.OK)


def test_with_two_records_of_a_row_missing_both_are_misses_and_the_rest_is_not(striped) -> None:
    one = striped(16)
    chain = one.chain(6, 64)
    one.write(chain)
    for lost in (17, 20):  # both in the row from 16 to 23
        [holder] = holders(one, chain.keys[lost])
        del one.targets[holder].records[chain.keys[lost]]
    outcomes = one.read(chain)
    missing = [at for at, outcome in enumerate(outcomes) if outcome is not Outcome.OK]
    assert missing == [17, 20]
    assert {outcomes[at] for at in missing} == {Outcome.MISS}
    assert one.pool.held(NAMESPACE, chain.keys, 0) == 17


def test_a_block_and_the_parity_of_its_row_missing_is_a_miss(striped) -> None:
    one = striped(16)
    chain = one.chain(7, 64)
    one.write(chain)
    for key in (chain.keys[30], parity_key(chain.keys[24], 8)):
        [holder] = holders(one, key)
        del one.targets[holder].records[key]
    assert [at for at, o in enumerate(one.read(chain)) if o is not Outcome.OK] == [30]
    assert one.pool.held(NAMESPACE, chain.keys, 0) == 30


def test_a_writer_killed_before_the_parity_loses_no_block_that_was_written(striped) -> None:
    one = striped(16)
    chain = one.chain(8, 64)
    one.write(chain)
    for target in one.targets.values():
        for first in range(0, 64, 8):
            target.records.pop(parity_key(chain.keys[first], 8), None)
    assert one.pool.held(NAMESPACE, chain.keys, 0) == 64
    assert set(one.read(chain)) == {Outcome.OK}


def test_a_member_killed_while_a_row_was_written_lacks_no_block_that_parity_has(striped) -> None:
    """The member took its blocks and lost them; the parity record arrived."""
    one = striped(16)
    chain = one.chain(9, 64)
    one.write(chain)
    [holder] = holders(one, chain.keys[3])
    one.targets[holder].records.clear()
    assert one.pool.held(NAMESPACE, chain.keys, 0) == 64
    assert set(one.read(chain)) == {Outcome.OK}
    assert one.pool.usage().rebuilt > 0


def test_a_row_with_another_record_of_a_block_rebuilds_nothing_wrong(striped) -> None:
    """Another host computed the block again with other numbers: a valid record, not the row's."""
    one = striped(16)
    chain = one.chain(10, 16)
    one.write(chain)
    [stale] = holders(one, chain.keys[2])
    other = aligned_buffer(NAMESPACE.slot_bytes)
    other[:] = one.targets[stale].records[chain.keys[2]]
    header, _ = read_header(other)
    payload(other, NAMESPACE.raw_bytes)[:] = payload_of(b"x" * 16, NAMESPACE.raw_bytes)
    pack(other, header)
    one.targets[stale].records[chain.keys[2]] = bytes(other)
    [lost] = holders(one, chain.keys[5])
    one.targets[lost].mood = "dead"
    outcomes = one.read(chain)
    missing = [at for at, outcome in enumerate(outcomes) if outcome is not Outcome.OK]
    assert 5 in missing
    assert {at // 8 for at in missing} == {0}


@pytest.mark.parametrize("damage", ["flipped", "truncated", "a block twice", "another row's"])
def test_a_damaged_parity_record_rebuilds_nothing(striped, damage) -> None:
    one = striped(16)
    chain = one.chain(11, 16)
    one.write(chain)
    name, key = row_of(one, chain, 0), parity_key(chain.keys[0], 8)
    record = bytearray(one.targets[name].records[key])
    if damage == "flipped":
        record[5_000] ^= 1
    elif damage == "truncated":
        record[4_096:] = bytes(len(record) - 4_096)
    elif damage == "a block twice":
        header, _ = read_header(record)
        forged = aligned_buffer(len(record))
        forged[:] = record
        body = payload(forged, header.payload_bytes)
        body[176:204] = body[148:176]  # entries of 28 bytes follow a head of 8: the fifth, twice
        pack(forged, header)
        record = forged
    else:
        other = one.targets[row_of(one, chain, 8)]
        record = other.records[parity_key(chain.keys[8], 8)]
    one.targets[name].records[key] = bytes(record)
    [lost] = holders(one, chain.keys[5])
    del one.targets[lost].records[chain.keys[5]]
    assert [at for at, o in enumerate(one.read(chain)) if o is not Outcome.OK] == [5]


def test_blocks_of_a_late_member_are_rebuilt_before_the_deadline(striped) -> None:
    one = striped(16, deadline_s=6.0)
    chain = one.chain(12, 64)
    one.write(chain)
    [late] = holders(one, chain.keys[40])

    def never(namespace, keys, into, deadline_s, on_progress=None):
        threading.Event().wait(deadline_s)
        return ReceivedRecords(0, Outcome.LATE)

    one.targets[late].get = never
    assert set(one.read(chain)) == {Outcome.OK}


def test_a_host_that_has_seen_nothing_reads_what_others_wrote(striped, reader) -> None:
    one = striped(16)
    chain = one.chain(13, 600)
    one.write(chain)
    assert set(read(reader(one), chain)) == {Outcome.OK}


@pytest.mark.parametrize("stripe", [1, 4, 9])
def test_a_pool_written_with_another_stripe_is_readable(striped, reader, stripe) -> None:
    one = striped(5)
    writer = reader(one, stripe_targets=stripe)
    chain = one.chain(14, 300)
    assert set(writer.write(one.puts(chain))) == {Outcome.OK}
    one.announce(one.targets)
    pool = reader(one)
    assert pool.held(NAMESPACE, chain.keys, 0) == 300
    assert set(read(pool, chain)) == {Outcome.OK}


@pytest.mark.parametrize(("before", "after"), [(4, 5), (5, 4), (4, 3), (3, 4), (9, 10), (16, 15)])
def test_contexts_survive_members_that_join_and_leave(striped, reader, before, after) -> None:
    """Also for hosts that have not seen the members of before."""
    one = striped(max(before, after))
    one.announce([f"t{number}" for number in range(before)])
    chains = [one.chain(20 + seed, 100) for seed in range(4)]
    for chain in chains:
        one.write(chain)
    one.pool.close()
    for number in range(after, before):
        one.targets[f"t{number}"].mood = "dead"
    present = [f"t{number}" for number in range(after)]
    one.announce(present)
    options = msgspec.structs.replace(one.pool.options)
    pool = PoolTier(one.source, lambda member: one.targets[member.id], options)
    one.announce(present)
    whole = [chain for chain in chains if pool.held(NAMESPACE, chain.keys, 0) == 100]
    got = [chain for chain in chains if set(read(pool, chain)) == {Outcome.OK}]
    pool.close()
    assert got == whole == chains


def test_a_joining_member_makes_nothing_misplaced_that_its_owners_hold(striped) -> None:
    one = striped(5)
    one.announce(["t0", "t1", "t2", "t3"])
    chain = one.chain(30, 100)
    one.write(chain)
    one.announce(one.targets)
    assert set(one.read(chain)) == {Outcome.OK}
    assert one.pool.misplaced(NAMESPACE, chain.keys) == set()


def test_rebuilt_blocks_are_written_again_and_then_read_as_usual(striped) -> None:
    one = striped(6)
    chain = one.chain(32, 60)
    one.write(chain)
    lost = blocks_on(one.targets["t2"], chain)
    one.targets["t2"].mood = "dead"
    one.read(chain)
    again = one.pool.misplaced(NAMESPACE, chain.keys)
    assert again == set(lost)
    puts = zip(one.puts(chain), chain.keys, strict=True)
    assert set(one.pool.write([put for put, key in puts if key in again])) == {Outcome.OK}
    rebuilt = one.pool.usage().rebuilt
    assert set(one.read(chain)) == {Outcome.OK}
    assert one.pool.usage().rebuilt == rebuilt


def test_a_draining_member_is_read_and_its_blocks_move_to_the_others(striped) -> None:
    one = striped(6)
    chain = one.chain(31, 60)
    one.write(chain)
    drained = blocks_on(one.targets["t2"], chain)
    one.announce(one.targets, draining=["t2"])
    assert one.pool.held(NAMESPACE, chain.keys, 0) == 60
    assert set(one.read(chain)) == {Outcome.OK}
    assert one.pool.misplaced(NAMESPACE, chain.keys) == set(drained)
    one.pool.write([put for put, key in zip(one.puts(chain), chain.keys, strict=True)
                    if key in drained])  # fmt: skip
    assert blocks_on(one.targets["t2"], chain) == drained, "nothing new is written there"
    one.targets["t2"].mood = "dead"
    assert one.pool.held(NAMESPACE, chain.keys, 0) == 60
    assert set(one.read(chain)) == {Outcome.OK}


def test_a_member_that_is_down_is_written_around(striped) -> None:
    one = striped(6)
    dead = one.targets["t2"]
    dead.mood = "dead"
    chains = [one.chain(40 + seed, 60) for seed in range(4)]
    for chain in chains:
        one.read(chain)  # opens its breaker
        assert set(one.write(chain)) == {Outcome.OK}
        assert one.pool.held(NAMESPACE, chain.keys, 0) == 60
        assert set(one.read(chain)) == {Outcome.OK}


def test_a_row_has_blocks_of_one_namespace_only(striped) -> None:
    one = striped(16)
    chain = one.chain(50, 8)
    other = namespace_of(8_000, 1)
    twins = []
    for depth, put in enumerate(one.puts(chain)):
        record = aligned_buffer(other.slot_bytes)
        key = chain.keys[depth]
        payload(record, other.raw_bytes)[:] = payload_of(key, other.raw_bytes)
        header = header_of(other, key, chain.parent(depth), depth)
        pack(record, header._replace(segment=chain.segment(depth)))
        twins += [put, put._replace(record=record)]
    one.pool.write(twins)
    one.pool.close()
    parities = [
        read_header(record)[0]
        for target in one.targets.values()
        for key, record in target.records.items()
        if key not in chain.keys
    ]
    wanted = {parity_namespace(NAMESPACE)[:2], parity_namespace(other)[:2]}
    assert {(header.fingerprint, header.domain) for header in parities} <= wanted
    assert {header.domain for header in parities} <= {NAMESPACE.domain, other.domain}


def test_no_lookup_finds_a_parity_record_as_a_block(striped) -> None:
    one = striped(16)
    chain = one.chain(51, 16)
    one.write(chain)
    hidden = parity_key(chain.keys[0], 8)
    get = gets_of(chain)[0]._replace(key=hidden)
    for target in one.targets.values():
        if hidden in target.records:
            header, _ = read_header(target.records[hidden])
            assert header.fingerprint != NAMESPACE.fingerprint
            assert header.domain == NAMESPACE.domain
    one.pool.read([get])
    sizes = (NAMESPACE.fingerprint, NAMESPACE.raw_bytes)
    assert verify(get.into, hidden, *sizes) is not Outcome.OK


def test_deleted_blocks_leave_no_parity_behind(striped) -> None:
    one = striped(16)
    chain = one.chain(52, 64)
    one.write(chain)
    one.pool.delete(gets_of(chain))
    assert not any(target.records for target in one.targets.values())


def test_a_question_about_an_unknown_long_chain_asks_each_member_once(striped) -> None:
    one = striped(4)
    chain = one.chain(53, 200)
    before = {name: target.calls for name, target in one.targets.items()}
    assert one.pool.held(NAMESPACE, chain.keys, 0) == 0
    assert {
        name: target.calls - before[name] for name, target in one.targets.items()
    } == dict.fromkeys(one.targets, 1)


def test_all_users_see_the_same_lanes(striped, reader) -> None:
    one = striped(7)
    chain = one.chain(54, 70)
    one.write(chain)
    placed = {key: holders(one, key) for key in chain.keys}
    for target in one.targets.values():
        target.records.clear()
    reader(one).write(one.puts(chain))
    assert {key: holders(one, key) for key in chain.keys} == placed


def test_members_are_named_in_the_description_with_lanes_and_parity(striped) -> None:
    one = striped(16)
    one.write(one.chain(55, 64))
    told = one.pool.describe()
    assert told["lanes"] == 9
    assert told["parity_records"] == 8
    assert {member["id"] for member in told["members"]} == set(one.targets)


def test_a_closed_pool_answers_gone(striped) -> None:
    one = striped(4)
    chain = one.chain(56, 8)
    one.write(chain)
    one.pool.close()
    assert set(one.read(chain)) == {Outcome.GONE}
    assert one.pool.ask(NAMESPACE, chain.keys, 0).outcome is not Outcome.OK


def test_a_late_and_a_lost_block_of_one_row_both_come_if_the_late_member_answers_in_time(striped):
    one = striped(16, deadline_s=8.0)
    chain = one.chain(57, 16)
    one.write(chain)
    [lost] = holders(one, chain.keys[4])
    del one.targets[lost].records[chain.keys[4]]
    [late] = holders(one, chain.keys[2])
    at_once, calls = one.targets[late].get, []

    def late_at_first(namespace, keys, into, deadline_s, on_progress=None):
        calls.append(keys)
        if len(calls) == 1:
            return ReceivedRecords(0, Outcome.LATE)
        return at_once(namespace, keys, into, deadline_s, on_progress)

    one.targets[late].get = late_at_first
    assert set(one.read(chain)) == {Outcome.OK}


def test_members_are_told_that_the_parity_of_blocks_which_are_read_is_in_use(striped) -> None:
    """Nobody reads it, so they would evict it first."""
    one = striped(16)
    chain = one.chain(58, 32)
    one.write(chain)
    one.read(chain)
    wanted = {parity_key(chain.keys[first], 8) for first in range(0, 32, 8)}
    end = time.monotonic() + 60
    while not wanted <= {key for target in one.targets.values() for key in target.used}:
        assert time.monotonic() < end
        time.sleep(0.05)
    one.read(chain)
    one.pool.close()
    used = [key for target in one.targets.values() for key in target.used]
    assert sorted(used) == sorted(wanted), "each once in ten minutes"
