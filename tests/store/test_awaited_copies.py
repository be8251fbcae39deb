"""A `sync` waits for copies without a look at the whole chain, and without those of others."""

import threading

import pytest

from holdfast.index.residency import Residency
from holdfast.policy.retention import Retention
from holdfast.store import awaited_copies, durable
from holdfast.store.awaited_copies import AwaitedCopies
from holdfast.testing.memory import MemoryTier

MIB = 1 << 20
BLOCKS = 60
STEP = 8
LOOKS = 12


class Medium(MemoryTier):
    """A tier in memory that can flush; it takes writes once it is told so."""

    def __init__(self):
        super().__init__(64 * MIB, name="medium")
        self.writes = False

    def accepts_writes(self):
        return self.writes

    def flush(self, places):
        return [True] * len(places)


@pytest.fixture
def medium():
    return Medium()


@pytest.fixture
def one(harness, medium):
    made = harness(8 * MIB, medium)
    yield made
    medium.writes = True


@pytest.fixture
def steps(monkeypatch):
    """Look at a chain in steps of `STEP` blocks."""
    monkeypatch.setattr(awaited_copies, "LOOKED_AT_MAX", STEP)


def saved(one, seed, blocks=BLOCKS, retention=Retention.EPHEMERAL):
    chain = one.chain(seed, blocks)
    one.save(chain, retention=retention)
    return chain


def test_a_sync_that_waits_does_not_look_at_its_whole_chain_again_and_again(
    one, medium, steps, monkeypatch
):
    chain, kept, looks, asked = saved(one, 1), [], [], []
    waiting = threading.Thread(
        target=lambda: kept.append(one.store.sync(one.namespace, chain.keys, 600.0))
    )
    hurry, find, find_all = one.store.mover.hurry, Residency.find, Residency.find_all

    def is_sync():
        return threading.current_thread() is waiting

    def count_look():
        looks.append(len(asked))
        hurry()

    def count_one(index, namespace, key):
        if is_sync():
            asked.append(key)
        return find(index, namespace, key)

    def count_all(index, namespace, keys):
        if is_sync():
            asked.extend(keys)
        return find_all(index, namespace, keys)

    monkeypatch.setattr(durable, "_LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr(one.store.mover, "hurry", count_look)
    monkeypatch.setattr(Residency, "find", count_one)
    monkeypatch.setattr(Residency, "find_all", count_all)
    waiting.start()
    one.view.wait_until(lambda: len(looks) > LOOKS, "the sync has looked again")
    assert looks[LOOKS] - looks[0] <= LOOKS * STEP
    medium.writes = True
    one.store.housekeep()
    waiting.join()
    assert kept == [BLOCKS]


def test_only_the_durable_tiers_copies_of_its_own_chain_wake_a_sync(one, medium):
    chain, other = saved(one, 1), one.chain(2, BLOCKS)
    with AwaitedCopies(one.store, one.namespace, chain.keys) as copies:
        medium.writes = True
        one.save(other, retention=Retention.SESSION)
        one.flush()
        assert one.store.table.copies.events.flush(60.0)
        assert medium.usage().records == BLOCKS
        assert not copies.changed.is_set()
        copies.queue_all()
        one.flush()
        assert copies.changed.wait(60.0)
        assert medium.usage().records == 2 * BLOCKS


def test_looks_go_on_where_the_durable_tier_has_no_block_yet(one, medium, steps):
    chain = saved(one, 1, blocks=3 * STEP + 1)
    half = chain.keys[: 2 * STEP]
    copies, part = (AwaitedCopies(one.store, one.namespace, keys) for keys in (chain.keys, half))
    assert copies.look(), "the next block is in memory"
    assert copies.kept == 0
    medium.writes = True
    part.queue_all()
    one.flush()
    assert copies.look()
    assert copies.kept == len(half)
    copies.queue_all()
    one.flush()
    assert not copies.look(), "there is no further block"
    assert copies.kept == len(chain.keys)


def test_a_look_ends_at_a_block_that_no_tier_holds(one, medium):
    chain = saved(one, 1, blocks=2)
    longer = [*chain.keys, b"n" * 16, *one.chain(2, 1).keys]
    copies = AwaitedCopies(one.store, one.namespace, longer)
    medium.writes = True
    copies.queue_all()
    one.flush()
    assert not copies.look()
    assert copies.kept == 2


def test_each_block_of_a_long_chain_is_queued_again_in_one_of_several_steps(one, medium, steps):
    chain = saved(one, 1, blocks=3 * STEP + 1)
    copies = AwaitedCopies(one.store, one.namespace, chain.keys)
    with one.view.still():
        assert [copies.queue_some() for _ in range(4)] == [False, False, False, True]
        assert one.view.waiting(1) == len(chain.keys)
