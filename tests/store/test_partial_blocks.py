"""Blocks that several writers fill: published when every part is committed, or not at all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.blocks.namespace import Namespace
from holdfast.blocks.payload_part import packed_part
from holdfast.codec.pack import payload
from holdfast.errors import Outcome
from holdfast.limits import PARTIAL_S
from holdfast.store.leases import Generation, Reservation
from holdfast.store.partial_blocks import JoinedBlock, PartialBlocks
from holdfast.store.save import ChainRun
from holdfast.tiers.base import NOWHERE, Place

PAYLOAD = 16 << 10
HALF = PAYLOAD // 2
FIRST, SECOND = packed_part([(0, HALF)]), packed_part([(HALF, HALF)])
QUARTER = packed_part([(HALF // 2, HALF // 2)])
REST_S = 10.0


class Writer:
    """One writer of the blocks of a chain, with its part of each."""

    def __init__(self, one, chain, part):
        self.one, self.chain, self.part = one, chain, part
        self.reserved = None

    def reserve(self, keys=None):
        run = ChainRun(self.chain.keys if keys is None else keys, self.chain.fingerprint, 0)
        self.reserved = self.one.store.reserve_part(self.one.namespace, run, self.part)
        return self.reserved.places

    def fill(self, byte):
        arena = self.one.store.arena(self.one.namespace.domain).view
        start = 0 if self.part == FIRST else HALF
        for place in self.reserved.places:
            if place >= 0:
                payload(arena[place:], PAYLOAD)[start : start + HALF] = bytes([byte]) * HALF

    def commit(self):
        return self.one.store.commit(self.reserved.ticket)

    def abort(self, rest_s=0.0):
        self.one.store.abort(self.reserved.ticket, rest_s=rest_s)

    def save(self, byte=1):
        self.reserve()
        self.fill(byte)
        return self.commit()


@pytest.fixture
def one(harness):
    return harness()


@pytest.fixture
def chain(one):
    return one.chain(1, 3)


@pytest.fixture
def first(one, chain):
    return Writer(one, chain, FIRST)


@pytest.fixture
def second(one, chain):
    return Writer(one, chain, SECOND)


def held(one, chain):
    return one.store.cover(one.namespace, chain.keys).blocks


def slots(one):
    return one.view.used_slots(one.namespace)


def read(one, chain):
    fetched = one.store.fetch(one.namespace, chain.keys, 60.0)
    arena = one.store.arena(one.namespace.domain).view
    found = [bytes(payload(arena[place:], PAYLOAD)) for place in fetched.places]
    assert one.store.release(fetched.lease)
    return found


def housekeep(one, after_s):
    one.clock.advance(after_s)
    one.store.housekeep()


def test_all_writers_get_the_same_slots(one, first, second):
    assert first.reserve() == second.reserve()
    assert slots(one) == 3


def test_a_block_is_published_with_the_commit_of_its_last_part(one, chain, first, second):
    assert first.save(1) == 0
    assert held(one, chain) == 0
    assert second.save(2) == 3
    assert read(one, chain) == [b"\1" * HALF + b"\2" * HALF] * 3
    assert one.nothing_is_left_over()


def test_parts_may_be_written_at_the_same_time(one, chain, first, second):
    first.reserve()
    second.reserve()
    second.fill(2)
    assert second.commit() == 0
    first.fill(1)
    assert held(one, chain) == 0
    assert first.commit() == 3
    assert read(one, chain) == [b"\1" * HALF + b"\2" * HALF] * 3


def test_a_writer_may_divide_the_chain_otherwise(one, chain, first, second):
    first.save(1)
    second.reserve(chain.keys[:2])
    second.fill(2)
    assert second.commit() == 2
    assert held(one, chain) == 2


def test_a_part_that_never_comes_leaves_nothing(one, chain, first, second):
    first.save(1)
    assert one.store.status().partial_blocks == 3
    housekeep(one, PARTIAL_S + 1)
    assert slots(one) == 0
    status = one.store.status()
    assert (status.partial_blocks, status.abandoned_blocks) == (0, 3)
    assert second.save(2) == 0
    assert held(one, chain) == 0
    assert first.save(1) == 3
    assert held(one, chain) == 3


def test_the_slot_of_an_expired_block_waits_for_the_writer_that_may_still_fill_it(
    one, chain, first, second
):
    first.save(1)
    second.reserve()
    housekeep(one, PARTIAL_S + 1)
    assert slots(one) == 3
    second.fill(2)
    assert second.commit() == 0
    assert slots(one) == 0
    assert held(one, chain) == 0


@pytest.mark.parametrize("committed", [True, False])
def test_a_writer_that_is_lost_takes_its_blocks_with_it(one, chain, first, second, committed):
    """Another writer of the part would share the slot with one that may still write to it."""
    if committed:
        first.save(1)
    second.reserve()
    second.abort(rest_s=REST_S)
    again = Writer(one, chain, SECOND)
    assert not set(again.reserve()) & set(second.reserved.places)
    again.fill(3)
    assert again.commit() == 0
    assert held(one, chain) == 0
    assert slots(one) == 6
    housekeep(one, REST_S + 1)
    assert slots(one) == 3
    assert first.save(1) == 3
    assert read(one, chain) == [b"\1" * HALF + b"\3" * HALF] * 3


def test_a_lost_writers_slot_rests_also_if_another_writer_ends_later(one, first, second):
    first.reserve()
    second.reserve()
    second.abort(rest_s=REST_S)
    assert first.commit() == 0
    assert slots(one) == 3
    housekeep(one, REST_S + 1)
    assert slots(one) == 0


def test_a_part_that_is_written_or_being_written_is_not_wanted_again(one, chain, first):
    first.reserve()
    again = Writer(one, chain, FIRST)
    assert again.reserve() == [-1, -1, -1]
    assert again.reserved.outcome is Outcome.OK
    assert again.commit() == 0
    first.commit()
    assert again.reserve() == [-1, -1, -1]
    assert slots(one) == 3


def test_parts_that_overlap_do_not_share_a_block(one, chain, first, second):
    first.save(1)
    assert Writer(one, chain, QUARTER).reserve() == [-1, -1, -1]
    assert second.save(2) == 3


def test_parts_of_engines_of_two_sizes_complete_a_block_only_without_a_gap(one, chain, first):
    first.save(1)
    third, last = (
        Writer(one, chain, packed_part([(start, HALF // 2)])) for start in (HALF, 3 * HALF // 2)
    )
    third.reserve()
    assert third.commit() == 0
    assert held(one, chain) == 0
    last.reserve()
    assert last.commit() == 3
    assert held(one, chain) == 3


def test_blocks_that_are_held_need_no_part(one, chain, first):
    one.save(chain)
    assert first.reserve() == [-1, -1, -1]
    assert first.commit() == 0


def test_a_whole_block_that_comes_first_wins(one, chain, first, second):
    first.save(1)
    one.save(chain)
    assert second.save(2) == 0
    assert one.read(chain) == 3
    housekeep(one, PARTIAL_S + 1)
    assert slots(one) == 3


def test_a_key_that_is_named_twice_gets_one_slot(one, chain, first, second):
    places = first.reserve([chain.keys[0], chain.keys[0]])
    assert places[0] >= 0
    assert places[1] == -1
    first.fill(1)
    first.commit()
    second.reserve(chain.keys[:1])
    assert second.commit() == 1


def test_a_drop_ends_what_was_begun_before_it(one, chain, first, second):
    first.save(1)
    one.store.drop(one.namespace.fingerprint.hex())
    assert second.save(2) == 0
    assert held(one, chain) == 0
    assert first.save(3) == 3
    assert read(one, chain) == [b"\3" * HALF + b"\2" * HALF] * 3
    assert slots(one) == 3


def test_blocks_that_wait_for_parts_take_at_most_half_of_the_memory(harness):
    """An engine of which one rank does not save must not push out what others saved."""
    one = harness(1 << 20)
    most = (1 << 19) // one.namespace.slot_bytes
    chain = one.chain(1, most + 5)
    first, second = Writer(one, chain, FIRST), Writer(one, chain, SECOND)
    assert [place >= 0 for place in first.reserve()] == [True] * most + [False] * 5
    assert first.reserved.outcome is Outcome.FULL
    first.fill(1)
    first.commit()
    other = Writer(one, one.chain(2, 1), FIRST)
    assert other.reserve() == [-1]
    assert other.reserved.outcome is Outcome.FULL
    second.reserve()
    second.fill(2)
    assert second.commit() == most
    assert held(one, chain) == most
    assert other.reserve()[0] >= 0


def test_writers_of_another_namespace_never_share_a_block(one, chain, first):
    first.reserve()
    other = one.namespace._replace(fingerprint=b"g" * 16)
    run = ChainRun(chain.keys, chain.fingerprint, 0)
    reserved = one.store.reserve_part(other, run, SECOND)
    assert set(reserved.places).isdisjoint(first.reserved.places)


def test_an_erased_domain_takes_its_blocks_with_it_and_no_others():
    rested = []
    blocks = PartialBlocks(lambda reservation, until: rested.append((reservation.places, until)))
    for number, domain in enumerate((b"d" * 16, b"e" * 16)):
        namespace = NAMESPACE._replace(domain=domain)
        run = Reservation(namespace, [b"k"], b"", 0, b"", [Place(number)], GENERATION, PARTS[0])
        blocks.open(number, run, [JoinedBlock(None)], 0.0)
    blocks.end_domain(b"d" * 16, 9.0)
    assert rested == [([0], 9.0)]
    assert len(blocks) == 1
    run = Reservation(NAMESPACE, [b"k"], b"", 0, b"", [Place(0)], GENERATION, PARTS[0])
    assert blocks.commit(0, run).slots == []
    assert rested == [([0], 9.0)]


def test_usage_returns_to_zero_however_parts_end(harness):
    one = harness(2 << 20)
    chain = one.chain(1, 3)
    other = one.chain(2, one.view.slots(one.namespace))

    def fillable():
        reserved = one.store.reserve(one.namespace, other.keys, other.parent(0), 0)
        one.store.abort(reserved.ticket)
        return sum(place >= 0 for place in reserved.places)

    before = fillable()
    for ending in ("complete", "expired", "aborted"):
        first, second = Writer(one, chain, FIRST), Writer(one, chain, SECOND)
        first.save()
        if ending == "complete":
            second.save()
            one.store.drop("*")
        if ending == "aborted":
            second.reserve()
            second.abort()
        housekeep(one, PARTIAL_S + 1)
        assert slots(one) == 0
        assert fillable() == before


NAMESPACE = Namespace(b"f" * 16, b"d" * 16, 4, 16)
GENERATION = Generation(0, 0)
PARTS = [packed_part(ranges) for ranges in ([(0, 2)], [(2, 2)], [(1, 2)], [(2, 1)], [(3, 1)])]
BYTES = [{0, 1}, {2, 3}, {1, 2}, {2}, {3}]
STEPS = st.lists(
    st.tuples(st.sampled_from(["reserve", "commit", "abort", "wait"]), st.integers(0, 4)),
    max_size=30,
)


@given(STEPS)
def test_a_block_completes_only_with_every_byte_and_each_slot_is_freed_once(steps):
    """Writers with all kinds of parts reserve, commit, give up and let time pass in any order."""
    rested, completed, allocated, now_s = [], [], 0, 0.0
    blocks = PartialBlocks(lambda reservation, _: rested.extend(reservation.places))
    open_writers: dict[int, tuple[int, int]] = {}
    written: dict[int, set[int]] = {}
    for number, (step, which) in enumerate(steps):
        ticket = sorted(open_writers)[which % len(open_writers)] if open_writers else None
        if step == "reserve":
            [(block, wanted)] = blocks.join(NAMESPACE, [b"k"], PARTS[which], GENERATION)
            place = NOWHERE
            if wanted:
                place = block.place if block else Place(allocated)
                allocated += block is None
            run = Reservation(NAMESPACE, [b"k"], b"", 0, b"", [place], GENERATION, PARTS[which])
            blocks.open(number, run, [JoinedBlock(block, wanted)], now_s)
            open_writers[number] = which, place
            if place != NOWHERE:
                inside = written.setdefault(place, set())
                under_way = [
                    BYTES[other]
                    for writer, (other, at) in open_writers.items()
                    if at == place and writer != number
                ]
                assert inside.union(*under_way).isdisjoint(BYTES[which])
        elif step == "wait":
            now_s += PARTIAL_S
            blocks.expire(now_s)
        elif ticket is not None:
            part, place = open_writers.pop(ticket)
            if step == "abort":
                blocks.abort(ticket, now_s)
                continue
            run = Reservation(NAMESPACE, [b"k"], b"", 0, b"", [place], GENERATION, PARTS[part])
            written.setdefault(place, set()).update(BYTES[part])
            [done] = blocks.commit(ticket, run).places
            if done != NOWHERE:
                assert written[done] == {0, 1, 2, 3}
                completed.append(done)
        held = {place for _, place in open_writers.values()}
        assert held.isdisjoint(rested), "a slot is freed while a writer may write to it"
    for ticket in list(open_writers):
        blocks.abort(ticket, now_s)
    blocks.expire(now_s + PARTIAL_S)
    assert (len(blocks), blocks.nbytes) == (0, 0)
    assert sorted(rested + completed) == list(range(allocated))
