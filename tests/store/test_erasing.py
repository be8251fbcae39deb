"""While a domain is erased nothing of it is sealed: the next key never opens what was erased."""

import threading
from collections import Counter
from functools import partial

import pytest

from holdfast.codec import seal
from holdfast.keys.keyring import KeyRing
from holdfast.store import block_table, domains, unreadable
from holdfast.testing.memory import MemoryTier, SharedMemoryTier
from holdfast.testing.store_control import pinned, write_all_through

BLOCKS = 6


class SlowToAnswerTier(SharedMemoryTier):
    """A shared tier that is asked what it has, and answers when it is let."""

    def __init__(self, records):
        super().__init__(records)
        self.asked, self.answers = threading.Event(), threading.Event()

    def known(self, batch):
        self.asked.set()
        assert self.answers.wait(60)
        return [False] * len(batch)


class CountingLock:
    """A lock that counts how often it was taken."""

    def __init__(self, lock):
        self.lock, self.taken = lock, 0

    def __enter__(self):
        self.lock.acquire()
        self.taken += 1

    def __exit__(self, *_):
        self.lock.release()


@pytest.fixture(autouse=True)
def _patient_looks(monkeypatch):
    """A brief look waits for the end of its read, however busy the machine is."""
    monkeypatch.setattr("holdfast.keys.keyring_watch.LOOK_WAIT_S", 60.0)


@pytest.fixture
def sealed(harness, tmp_path):
    """Make stores that write nothing until told, and whose domain is sealed under one ring file."""

    def make(tier):
        ring = KeyRing(tmp_path / "ring.json")
        ring.enrol("default", b"s" * 32)
        return harness(tier=tier, ring=ring, writes_behind=False)

    return make


def line_up(one):
    """Have everything written that is in memory, and what is lent not be lost for it."""
    write_all_through(one.store)


def write_all(one):
    line_up(one)
    one.flush_writes()


def test_blocks_queued_before_an_erasure_are_not_sealed_with_the_next_key(sealed, monkeypatch):
    far = {}
    one = sealed(SharedMemoryTier(far))
    one.save(one.chain(1, BLOCKS))
    forget = domains.forget_domain

    def written_first(store, domain):
        write_all(one)
        return forget(store, domain)

    monkeypatch.setattr(domains, "forget_domain", written_first)
    one.store.erase("default")
    assert far == {}
    assert one.save(one.chain(2, BLOCKS)) == BLOCKS
    write_all(one)
    assert len(far) == BLOCKS, "what is saved afterwards is written"


def test_a_write_that_began_during_an_erasure_is_not_sealed_after_it(sealed, monkeypatch):
    far = {}
    one = sealed(SlowToAnswerTier(far))
    one.save(one.chain(1, BLOCKS))
    visit_domain = domains.visit_domain

    def set_out_first(*args):
        line_up(one)
        assert one.tier.asked.wait(60)
        visit_domain(*args)

    monkeypatch.setattr(domains, "visit_domain", set_out_first)
    one.store.erase("default")
    one.tier.answers.set()
    one.flush_writes()
    assert far == {}


def test_an_erasure_releases_the_lock_between_batches_of_shared_copies(sealed, monkeypatch):
    monkeypatch.setattr(block_table, "ROWS_AT_ONCE", 2)
    far, named = {}, Counter()
    one = sealed(SharedMemoryTier(far))
    one.save(one.chain(1, BLOCKS))
    write_all(one)
    table, name = one.store.table, unreadable._named
    table.lock = lock = CountingLock(table.lock)

    def counted(*args):
        named[lock.taken] += 1
        return name(*args)

    monkeypatch.setattr(unreadable, "_named", counted)
    one.store.erase("default")
    assert far == {}
    assert (sum(named.values()), max(named.values())) == (BLOCKS, 2)


def test_a_node_seals_nothing_between_seeing_an_erasure_and_applying_it(sealed):
    far = {}
    one, other = sealed(MemoryTier(1 << 20)), sealed(SharedMemoryTier(far))
    old, new = other.chain(1, BLOCKS), other.chain(2, BLOCKS)
    other.save(old)
    one.store.erase("default")
    other.store.options.ring.look()  # as who reads a record of the new epoch does
    write_all(other)
    assert far == {}
    assert other.save(new) == 0
    other.store.shared_ring.follow()
    assert other.read(old) == 0
    assert other.save(new) == BLOCKS
    write_all(other)
    assert {key for _, key in far} == set(new.keys)


def test_a_lease_granted_during_an_erasure_ends_with_it(sealed, monkeypatch):
    one = sealed(SharedMemoryTier({}))
    chain, lent = one.chain(1, BLOCKS), []
    one.save(chain)
    visit_domain = domains.visit_domain

    def lent_first(store, domain, forget):
        def lend_and_forget(row):
            lent.append(one.store.fetch_unverified(one.namespace, chain.keys, 60.0))
            forget(row)

        visit_domain(store, domain, lend_and_forget)

    monkeypatch.setattr(domains, "visit_domain", lent_first)
    one.store.erase("default")
    assert len(lent[0].places) == BLOCKS
    assert one.store.outgoing(one.namespace, lent[0].lease, lent[0].places) == []
    assert not one.store.release(lent[0].lease)
    for each in lent[1:]:
        one.store.release(each.lease)
    assert one.nothing_is_left_over()


def test_blocks_leased_to_a_peer_before_an_erasure_are_not_sent_after_it(sealed):
    one = sealed(SharedMemoryTier({}))
    one.save(chain := one.chain(1, BLOCKS))
    lent = one.store.fetch_unverified(one.namespace, chain.keys, 60.0)
    # Another reader keeps the slots, so they are not cleared yet.
    with pinned(one.store, one.namespace, chain.keys):
        one.store.erase("default")
        assert one.store.options.ring.current(one.namespace.domain) is not None
        assert one.store.outgoing(one.namespace, lent.lease, lent.places) == []


def test_concurrent_erasures_leave_a_domain_that_accepts_saves(sealed):
    one = sealed(SharedMemoryTier({}))
    threads = [threading.Thread(target=partial(one.store.erase, "default")) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one.store.shared_ring.follow()
    assert one.save(one.chain(1, BLOCKS)) == BLOCKS


def test_a_block_erased_while_it_is_sealed_for_a_peer_is_not_sent(sealed, monkeypatch):
    one = sealed(SharedMemoryTier({}))
    one.save(chain := one.chain(1, BLOCKS))
    lent, matches = one.store.fetch_unverified(one.namespace, chain.keys, 60.0), seal.matches

    def erased_once_it_is_checked(record, header):
        assert matches(record, header)
        if one.view.leases:
            one.store.erase("default")
        return True  # what is sealed from now on was cleared under it

    monkeypatch.setattr(seal, "matches", erased_once_it_is_checked)
    assert one.store.outgoing(one.namespace, lent.lease, lent.places) == []
