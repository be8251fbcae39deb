"""Blocks on their way up while others ask for them, give them up, or put them anew."""

import itertools
import threading
import time
from functools import partial
from types import SimpleNamespace

from holdfast.errors import Outcome
from holdfast.policy.retention import Retention
from holdfast.store import hints, promote
from holdfast.store.core import BATCHES_AT_ONCE
from holdfast.testing.memory import MemoryTier, SharedMemoryTier
from holdfast.testing.payloads import fill_record, header_of
from holdfast.testing.store_control import end_leases, leave
from holdfast.testing.store_view import HOST

MIB = 1 << 20


class CountingTier(MemoryTier):
    """Counts the records read."""

    reads = 0

    def read(self, batch):
        self.reads += len(batch)
        return super().read(batch)


class HeldTier(MemoryTier):
    """Reads wait until they are let go."""

    reads = 0

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes, name="held")
        self.begun, self.go = threading.Event(), threading.Event()

    def read(self, batch):
        self.reads += 1
        self.begun.set()
        assert self.go.wait(60)
        return super().read(batch)


def put_damaged(one, key) -> None:
    """Put a block as a peer does whose record lost a bit on the way."""
    header = header_of(one.namespace, key)
    (receive_slots,) = one.store.receive_slots([header])
    assert receive_slots.slot is not None
    fill_record(receive_slots.slot, header)
    receive_slots.slot[5000] ^= 1
    assert one.store.publish_received([receive_slots]) == [Outcome.OK]


def until_hands_are_full(slow) -> None:
    """Wait until every thread reads from a tier."""
    end = time.monotonic() + 60
    while slow.reads < BATCHES_AT_ONCE:
        assert time.monotonic() < end, "the threads never have their hands full"
    return end


def fetching(one, keys, deadline_s: float = 60.0) -> tuple[threading.Thread, list]:
    fetched: list = []
    fetch = partial(one.store.fetch, one.namespace, keys, deadline_s)
    work = threading.Thread(target=lambda: fetched.append(fetch()))
    work.start()
    return work, fetched


def test_many_readers_of_one_context_share_one_promotion(harness) -> None:
    tier = CountingTier(64 * MIB)
    one = harness(2 * MIB, tier)
    chain = one.chain(1, 16)
    one.save(chain)
    one.flush()
    one.leave_memory()
    landed = []
    threads = [
        threading.Thread(target=lambda: landed.append(one.read(chain, 30.0))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert landed == [16] * 8
    assert tier.reads == 16


def test_a_key_that_occurs_twice_in_a_fetch_is_promoted_once_and_leaks_nothing(harness) -> None:
    one = harness(tier=CountingTier(4 * MIB))
    chain = one.chain(1, 3)
    one.save(chain)
    one.leave_memory(chain)
    keys = [*chain.keys, *chain.keys[:2]]
    fetched = one.store.fetch(one.namespace, keys, 60.0)
    assert (len(fetched.places), len(set(fetched.places)), one.tier.reads) == (5, 3, 3)
    assert one.store.release(fetched.lease)
    assert one.store.pin(one.namespace, keys, 5.0) == 5
    assert one.store.cover(one.namespace, keys).blocks == 5
    one.clock.advance(6.0)
    one.store.housekeep()
    assert one.nothing_is_left_over()
    assert one.view.used_slots(one.namespace) == 3
    reserved = one.store.reserve(one.namespace, keys, chain.fingerprint, 0)
    assert reserved.places == [-1] * 5
    assert one.store.commit(reserved.ticket, Retention.DURABLE) == 0
    assert one.nothing_is_left_over()
    one.store.drop("*")
    assert (one.view.entries, one.view.used_bytes(HOST)) == (0, 0)


def test_a_read_that_one_fetch_gives_up_still_serves_another_fetch(harness, monkeypatch) -> None:
    monkeypatch.setattr(promote, "BATCH_BYTES", 1)
    slow = HeldTier(4 * MIB)
    one = harness(2 * MIB, slow)
    busy, chain, lone = one.chain(1, BATCHES_AT_ONCE), one.chain(2, 2), one.chain(3, 2)
    for each in (busy, chain, lone):
        one.save(each)
    one.flush()
    one.leave_memory()
    others, _ = fetching(one, busy.keys)
    until_hands_are_full(slow)
    hasty, first = fetching(one, chain.keys, 5.0)
    one.view.wait_until(lambda: one.view.leases == 2, "the first fetch waits")
    patient, second = fetching(one, chain.keys)
    one.view.wait_until(lambda: one.view.leases == 3, "the second fetch waits")
    assert one.store.fetch(one.namespace, lone.keys, 0.2).places == []
    assert lone.keys[0] not in one.view.reading
    hasty.join(60)
    assert first[0].places == []
    slow.go.set()
    for work in (patient, others):
        work.join(60)
    assert (len(second[0].places), second[0].outcome) == (2, Outcome.OK)
    end_leases(one.store)
    assert one.nothing_is_left_over()


def test_a_block_put_by_a_peer_during_a_fetch_is_not_taken_for_the_promoted_block(harness) -> None:
    fast, slow = MemoryTier(4 * MIB), HeldTier(4 * MIB)
    one = harness(2 * MIB, fast, slow)
    keys = one.chain(1, 2).keys
    one.save(one.chain(1, 2))
    one.flush()
    one.leave_memory()
    place = one.view.place(one.namespace, keys[0], 1)
    leave(one.store, one.namespace, keys[:1], 2)
    leave(one.store, one.namespace, keys[1:2], 1)
    del fast._records[place]  # its region was reclaimed a moment ago
    work, fetched = fetching(one, keys)
    assert slow.begun.wait(60)
    one.view.wait_until(lambda: keys[0] not in one.view.reading, "the first block is missing")
    put_damaged(one, keys[0])
    assert one.view.place(one.namespace, keys[0]) >= 0
    slow.go.set()
    work.join(60)
    assert fetched[0].places == []
    assert one.store.release(fetched[0].lease)
    assert one.nothing_is_left_over()
    assert one.store.fetch(one.namespace, keys, 60.0).outcome is Outcome.CORRUPT


def test_a_verification_of_one_slot_does_not_count_for_a_block_put_in_another(
    harness, monkeypatch
) -> None:
    slow = HeldTier(4 * MIB)
    one = harness(2 * MIB, slow)
    keys = one.chain(1, 2).keys
    one.save(one.chain(1, 2))
    one.flush()
    leave(one.store, one.namespace, keys[1:])
    verified = threading.Event()
    monkeypatch.setattr(one.store.estimates, "verified", lambda *_: verified.set())
    work, fetched = fetching(one, keys)
    assert slow.begun.wait(60)
    assert verified.wait(60)
    assert one.store.forget(one.namespace, keys[:1]) == 1
    put_damaged(one, keys[0])
    slow.go.set()
    work.join(60)
    assert fetched[0].places == []
    assert one.store.release(fetched[0].lease)
    one.flush()  # the writer pins the block that was put
    assert one.nothing_is_left_over()


def test_the_measured_read_time_ends_before_a_corrupt_record_is_deleted(
    harness, monkeypatch
) -> None:
    ns, delete_corrupt, reported = itertools.count(), SharedMemoryTier.delete_corrupt, []

    def noted(tier, batch):
        reported.append(next(ns))
        delete_corrupt(tier, batch)

    monkeypatch.setattr(SharedMemoryTier, "delete_corrupt", noted)
    one = harness(2 * MIB, SharedMemoryTier(records := {}))
    one.save(chain := one.chain(1, 2))
    one.leave_memory()
    name = one.namespace, chain.keys[1]
    place, record = records[name]
    records[name] = place, record[:5_000] + bytes([record[5_000] ^ 1]) + record[5_001:]
    clock = SimpleNamespace(time_ns=lambda: next(ns), monotonic=time.monotonic)
    monkeypatch.setattr(promote, "time", clock)
    (read,) = one.store.fetch(one.namespace, chain.keys, 60.0).reads
    assert (read.arrived, reported) == (1, [2])
    assert (read.began_ns, read.ended_ns) == (0, 1)


def test_a_block_put_by_a_peer_is_served_after_it_is_verified(harness) -> None:
    one = harness()
    header = header_of(one.namespace, one.chain(1, 1).keys[0])
    berths = one.store.receive_slots([header])
    fill_record(berths[0].slot, header)
    one.store.publish_received(berths)
    fetched = one.store.fetch(one.namespace, [header.key], 60.0)
    assert fetched.outcome is Outcome.OK
    assert one.store.release(fetched.lease)
    one.store.forget(one.namespace, [header.key])
    assert one.view.entries == 0


def test_a_fetch_overtakes_prefetches(harness, monkeypatch) -> None:
    monkeypatch.setattr(promote, "BATCH_BYTES", 1)
    slow = HeldTier(4 * MIB)
    one = harness(2 * MIB, slow)
    chain, busy = one.chain(1, 8), one.chain(2, BATCHES_AT_ONCE)
    for each in (chain, busy):
        one.save(each)
    one.flush()
    one.leave_memory()
    others, _ = fetching(one, busy.keys)
    until_hands_are_full(slow)
    assert one.store.prestage(one.namespace, chain.keys, 0.0) == 8
    hints.start_prestages(one.store)
    one.view.wait_until(lambda: one.view.reading_ahead == 8, "all blocks are read ahead")
    wanted, landed = fetching(one, chain.keys)
    one.view.wait_until(lambda: not one.view.reading_ahead, "what is needed now comes first")
    slow.go.set()
    for work in (wanted, others):
        work.join(60)
    assert len(landed[0].places) == 8
    end_leases(one.store)
    one.store.background.shutdown()
    assert one.nothing_is_left_over()


def test_prefetches_do_not_delay_a_close(harness, monkeypatch) -> None:
    monkeypatch.setattr(promote, "BATCH_BYTES", 1)
    slow = HeldTier(4 * MIB)
    one = harness(2 * MIB, slow)
    one.save(chain := one.chain(1, 12))
    one.flush()
    one.leave_memory()
    one.store.prestage(one.namespace, chain.keys, 0.0)
    hints.start_prestages(one.store)
    one.view.wait_until(
        lambda: slow.reads >= BATCHES_AT_ONCE and one.view.reading_ahead >= 12, "it is read ahead"
    )
    closing = threading.Thread(target=one.store.close)
    closing.start()
    one.view.wait_until(
        lambda: not one.view.reading_ahead or len(one.view.reading) <= BATCHES_AT_ONCE,
        "what waits is not read any more",
    )
    slow.go.set()
    closing.join(60)
    assert slow.reads <= BATCHES_AT_ONCE + 1


def test_a_pin_is_complete_even_if_a_fetch_overtook_part_of_its_reads(harness, monkeypatch) -> None:
    monkeypatch.setattr(promote, "BATCH_BYTES", 1)
    slow = HeldTier(4 * MIB)
    one = harness(4 * MIB, slow)
    one.save(chain := one.chain(1, 20))
    one.flush()
    one.leave_memory()
    pinned: list[int] = []
    pinning = threading.Thread(
        target=lambda: pinned.append(one.store.pin(one.namespace, chain.keys, 100.0))
    )
    pinning.start()
    one.view.wait_until(
        lambda: one.view.reading_ahead >= 20 - BATCHES_AT_ONCE, "the pin reads ahead"
    )
    wanted, landed = fetching(one, chain.keys[:10])
    one.view.wait_until(lambda: one.view.reading_ahead <= 10, "what is needed now comes first")
    slow.go.set()
    for work in (wanted, pinning):
        work.join(60)
    assert (len(landed[0].places), pinned) == (10, [20])
