"""The state of each copy, and the listeners that are told of its changes."""

import threading
from pathlib import Path

import pytest

import holdfast.store
from holdfast.blocks.namespace import Namespace
from holdfast.index.residency import Residency
from holdfast.store.block_table import HOST
from holdfast.store.copies import CopyTable
from holdfast.store.copy_events import EVENTS_AT_ONCE, EVENTS_MAX, CopyState
from holdfast.testing.memory import MemoryTier
from holdfast.tiers.base import NOWHERE, Place

MIB = 1 << 20
NAMESPACE = Namespace(b"f" * 32, b"d" * 16, 8_192, 16)
ABSENT, FILLING, HELD, LEAVING = CopyState
DISK = 1


@pytest.fixture
def copies():
    index = Residency(2)
    for number in range(4):
        index.add(NAMESPACE, bytes([number]) * 16, b"", number)
    return CopyTable(index)


class Heard:
    """A listener that keeps the events."""

    def __init__(self):
        self.events = []

    def __call__(self, events):
        self.events += events

    def changes(self, tier):
        return [(each.before, each.after) for each in self.events if each.tier == tier]


def test_a_copy_is_absent_then_filling_then_held_then_leaving(copies):
    assert copies.state(0, DISK) is ABSENT
    copies.begin_filling(0, DISK)
    assert copies.state(0, DISK) is FILLING
    assert list(copies.fillings(DISK)) == [0]
    assert not copies.is_on(0, DISK)
    copies.hold(0, DISK, Place(7))
    copies.end_filling(0, DISK)
    assert (copies.state(0, DISK), copies.place(0, DISK)) == (HELD, 7)
    copies.begin_leaving(0, DISK)
    assert copies.is_on(0, DISK), "it can be read until it is evicted"
    assert (copies.state(0, DISK), copies.leaving(DISK)) == (LEAVING, 1)
    copies.stay(0, DISK)
    assert copies.state(0, DISK) is HELD
    copies.begin_leaving(0, DISK)
    assert copies.remove(0, DISK) == 7
    assert (copies.state(0, DISK), copies.leaving(DISK)) == (ABSENT, 0)
    assert copies.remove(0, DISK) == NOWHERE


def test_only_a_held_copy_leaves(copies):
    copies.begin_leaving(0, DISK)
    copies.begin_filling(1, DISK)
    copies.begin_leaving(1, DISK)
    assert (copies.state(0, DISK), copies.state(1, DISK)) == (ABSENT, FILLING)


def test_the_end_of_a_copy_that_is_made_wakes_those_who_wait(copies):
    filling = copies.begin_filling(0, DISK)
    assert not filling.over.is_set()
    copies.drop_fillings(0)
    assert filling.is_dropped
    copies.end_filling(0, DISK)
    assert filling.over.is_set()
    assert copies.state(0, DISK) is ABSENT


def test_each_change_is_an_event_with_the_next_number(copies):
    heard = Heard()
    copies.hold(3, HOST, Place(1))  # before anybody listens
    copies.events.subscribe(heard)
    copies.begin_filling(0, DISK)
    copies.hold_all(DISK, {0: Place(8)})
    copies.end_filling(0, DISK)
    copies.begin_leaving(0, DISK)
    copies.stay(0, DISK)
    copies.remove(0, DISK)
    copies.begin_filling(1, DISK)
    copies.end_filling(1, DISK)
    assert copies.events.flush(60)
    assert [each.sequence for each in heard.events] == list(range(1, 8))
    assert {each.stored_bytes for each in heard.events} == {NAMESPACE.slot_bytes}
    assert [(each.key[0], each.before, each.after) for each in heard.events] == [
        (0, ABSENT, FILLING),
        (0, FILLING, HELD),
        (0, HELD, LEAVING),
        (0, LEAVING, HELD),
        (0, HELD, ABSENT),
        (1, ABSENT, FILLING),
        (1, FILLING, ABSENT),
    ]
    copies.events.unsubscribe(heard)
    copies.begin_filling(2, DISK)
    copies.events.close()
    assert len(heard.events) == 7


def test_a_listener_that_fails_neither_stops_others_nor_later_events(copies, caplog):
    heard = Heard()

    def fails(events):
        raise ValueError("a listener's mistake")

    copies.events.subscribe(fails)
    copies.events.subscribe(heard)
    for tier in range(2):
        copies.hold(0, tier, Place(1))
        assert copies.events.flush(60)
    assert [each.tier for each in heard.events] == [0, 1]
    assert "a listener's mistake" in caplog.text
    copies.events.close()


def test_a_listener_that_goes_on_failing_is_logged_once_until_it_works(copies, caplog):
    results = [ValueError, ValueError, None, ValueError]

    def fails(events):
        if (error := results.pop(0)) is not None:
            raise error("a listener's mistake")

    copies.events.subscribe(fails)
    for row in range(4):
        copies.hold(row, DISK, Place(1))
        assert copies.events.flush(60)
    assert not results
    assert [record.message.startswith("a listener") for record in caplog.records] == [True] * 2
    copies.events.close()


def test_a_listener_that_fails_is_logged_anew_when_it_was_removed_and_added(copies, caplog):
    def fails(events):
        raise ValueError("a listener's mistake")

    for row in range(2):
        copies.events.subscribe(fails)
        copies.hold(row, DISK, Place(1))
        copies.events.unsubscribe(fails)
        assert copies.events.flush(60)
    assert len(caplog.records) == 2
    copies.events.close()


def test_a_listener_that_is_removed_twice_leaves_the_others_their_events(copies):
    heard, other = Heard(), Heard()
    copies.events.subscribe(other)
    copies.events.subscribe(heard)
    for _ in range(2):
        copies.events.unsubscribe(other)
    copies.hold(0, DISK, Place(1))
    assert copies.events.flush(60)
    assert len(heard.events) == 1
    copies.events.close()


def test_events_beyond_the_bound_are_lost_and_leave_a_gap_in_the_numbers(copies):
    heard, go_on = Heard(), threading.Event()

    def slow(events):
        assert go_on.wait(60)

    copies.events.subscribe(slow)
    copies.events.subscribe(heard)
    for _ in range(EVENTS_MAX // 2 + EVENTS_AT_ONCE):
        copies.hold(0, DISK, Place(1))
        copies.remove(0, DISK)
    assert copies.events.lost
    go_on.set()
    assert copies.events.flush(60)
    copies.hold(0, DISK, Place(1))
    assert copies.events.flush(60)
    assert heard.events[-1].sequence == copies.events.sequence
    assert heard.events[-1].sequence - heard.events[-2].sequence == 1 + copies.events.lost
    assert len(heard.events) + copies.events.lost == copies.events.sequence
    copies.events.close()


def test_a_store_tells_of_saves_writes_evictions_and_reads(harness):
    one, heard = harness(2 * MIB, MemoryTier(64 * MIB)), Heard()
    one.store.subscribe(heard)
    chain = one.chain(1, 4)
    assert one.save(chain) == 4
    one.leave_memory()
    assert one.read(chain) == 4
    assert one.store.table.copies.events.flush(60)
    assert {each.key for each in heard.events} == set(chain.keys)
    assert set(heard.changes(HOST)[:4]) == {(ABSENT, HELD)}
    assert heard.changes(HOST)[4:8] == [(HELD, ABSENT)] * 4
    assert set(heard.changes(HOST)[8:]) == {(ABSENT, FILLING), (FILLING, HELD)}
    assert set(heard.changes(DISK)) == {(ABSENT, FILLING), (FILLING, HELD)}
    one.store.unsubscribe(heard)


def test_a_listener_is_called_without_the_lock_of_the_store(harness):
    one, answers = harness(2 * MIB, MemoryTier(64 * MIB)), []

    def asks(events):
        answers.append(one.store.held(events[0].namespace, [events[0].key]))

    one.store.subscribe(asks)
    one.save(one.chain(1, 1))
    with one.store.table.lock:
        pass
    assert one.store.table.copies.events.flush(60)
    assert answers[0] == b"\1"


def test_closing_a_store_delivers_what_was_recorded(harness):
    one, heard = harness(2 * MIB), Heard()
    one.store.subscribe(heard)
    one.save(one.chain(1, 4))
    one.store.close()
    assert len(heard.events) == 4


def test_only_one_module_of_the_store_uses_the_places_of_the_index():
    folder = Path(holdfast.store.__path__[0])
    users = [path.name for path in folder.glob("*.py") if "index.places" in path.read_text()]
    assert users == ["copies.py"]
