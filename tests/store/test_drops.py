"""What was dropped stays away, whatever was read, saved, copied or recovered beside the drop."""

import os
import shutil
import threading
import time
from functools import partial

import pytest

from holdfast.blocks.namespace import Namespace
from holdfast.clock import ManualClock
from holdfast.errors import Outcome
from holdfast.policy.retention import Retention
from holdfast.store import hints, public_domain
from holdfast.store.drops import DropsFile
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.testing.extents import MemoryExtents, tier_on
from holdfast.testing.memory import MemoryTier, SharedMemoryTier
from holdfast.testing.payloads import fill_record, header_of
from holdfast.tiers.disk.region import SECTOR

MIB = 1 << 20
BLOCKS = 6
EVERYTHING = {"dropped": BLOCKS, "complete": True}


class Paused:
    """A point at which a thread waits, and the test that waits for the thread."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def here(self) -> None:
        self.reached.set()
        assert self.go_on.wait(60)


class PausedReads(MemoryTier):
    """A tier that has read, and returns when it is let; `records` outlive it."""

    def __init__(self, records=None) -> None:
        super().__init__(64 * MIB, records)
        self.reads = Paused()

    def read(self, batch):
        found = super().read(batch)
        self.reads.here()
        return found


class PausedScan(MemoryTier):
    """A tier whose recovery waits before its first record."""

    def __init__(self, records) -> None:
        super().__init__(64 * MIB, records)
        self.scan = Paused()

    def survivors(self):
        self.scan.here()
        yield from super().survivors()


def fetch(one, keys):
    """Fetch; return how many blocks landed, and why no more did."""
    fetched = one.store.fetch(one.namespace, keys, 60.0)
    one.store.release(fetched.lease)
    return len(fetched.places), fetched.outcome


def prestage(one, keys) -> None:
    one.store.prestage(one.namespace, keys, 0.0)
    hints.start_prestages(one.store)


def pin(one, keys) -> int:
    pinned = one.store.pin(one.namespace, keys, 60.0, 60.0)
    one.clock.advance(61.0)
    one.store.housekeep()
    return pinned


def in_thread(work, *args):
    """Start work on a thread; return it, and the list that its result is added to."""
    results: list = []
    thread = threading.Thread(target=lambda: results.append(work(*args)))
    thread.start()
    return thread, results


def drop_everything(one, keys) -> None:
    assert one.store.drop("*") == EVERYTHING


def drop_fingerprint(one, keys) -> None:
    assert one.store.drop(one.namespace.fingerprint.hex()) == EVERYTHING


def forget_by_name(one, keys) -> None:
    assert one.store.forget(one.namespace, keys) == BLOCKS


@pytest.mark.parametrize("forget", [drop_everything, drop_fingerprint, forget_by_name])
@pytest.mark.parametrize(
    ("read", "answer"), [(fetch, (2, Outcome.GONE)), (prestage, None), (pin, 2)]
)
def test_a_read_that_began_before_a_drop_publishes_nothing(harness, read, answer, forget) -> None:
    one = harness(2 * MIB, PausedReads())
    chain = one.chain(1, BLOCKS)
    one.save(chain)
    one.leave_memory()
    reading, answers = in_thread(read, one, chain.keys)
    assert one.tier.reads.reached.wait(60)
    forget(one, chain.keys)
    assert one.save(chain, 0, 2) == 2, "a save after the drop is kept, though a read still runs"
    one.tier.reads.go_on.set()
    reading.join(60)
    assert answers == [answer]
    one.flush_writes()
    until = time.monotonic() + 60
    while not one.nothing_is_left_over():
        assert time.monotonic() < until
        one.clock.advance(1.0)  # a prestage keeps what it finds in memory for a while
        one.store.housekeep()
    assert one.store.cover(one.namespace, chain.keys).blocks == 2
    assert one.read(chain) == 2
    assert one.tier.usage().records == 2
    assert one.store.status().failed_checks == []


def test_a_read_of_a_shared_tier_that_began_before_a_drop_publishes_nothing(harness) -> None:
    class PausedShared(SharedMemoryTier):
        reads = Paused()

        def read(self, batch):
            self.reads.here()
            return super().read(batch)

    one = harness(2 * MIB, PausedShared({}))
    chain = one.chain(1, BLOCKS)
    one.save(chain)
    one.leave_memory()
    reading, answers = in_thread(fetch, one, chain.keys)
    assert one.tier.reads.reached.wait(60)
    assert one.store.drop("*")["dropped"] == 0, "only a shared tier holds them"
    assert one.store.look(one.namespace, chain.keys, 60.0).blocks == BLOCKS
    one.tier.reads.go_on.set()
    reading.join(60)
    assert answers[0][0] == 0
    assert one.store.cover(one.namespace, chain.keys).sources == {one.tier.name: BLOCKS}
    assert one.store.status().failed_checks == []
    assert one.read(chain) == BLOCKS


def test_a_save_that_began_before_a_drop_publishes_nothing(harness) -> None:
    one = harness(2 * MIB, MemoryTier(64 * MIB))
    chain, other = one.chain(1, 4), one.namespace._replace(fingerprint=b"o" * 16)
    for namespace, expected in ((one.namespace, 0), (other, 4)):
        reserved = one.store.reserve(namespace, chain.keys, namespace.fingerprint, 0)
        one.fill(chain.keys, reserved.places)
        one.store.drop(one.namespace.fingerprint.hex())
        assert one.store.commit(reserved.ticket, Retention.DURABLE) == expected
    one.flush()
    assert one.store.cover(one.namespace, chain.keys).blocks == 0
    assert one.tier.usage().records == 4
    assert one.save(chain) == 4


def test_a_record_announced_by_a_peer_before_a_drop_is_not_published(harness) -> None:
    one = harness(2 * MIB)
    header = header_of(one.namespace, one.chain(1, 1).keys[0])
    (slot,) = one.store.receive_slots([header])
    fill_record(slot.slot, header)
    one.store.drop("*")
    assert one.store.publish_received([slot]) == [Outcome.FULL]
    assert one.store.held(one.namespace, [header.key]) == b"\0"
    assert one.nothing_is_left_over()


def test_a_copy_of_a_public_block_that_began_before_a_drop_is_not_published(monkeypatch) -> None:
    keys = {"acme": b"a" * 32, "commons": b"c" * 32}
    options = StoreOptions(public_domain="commons", clock=ManualClock())
    with Store(4 * MIB, [], keys, options) as store:
        store.start()
        acme, commons = (Namespace(b"f" * 16, store.domain(name)[1], 16 << 10, 16) for name in keys)
        names = [b"k" * 16]
        reserved = store.reserve(commons, names, commons.fingerprint, 0)
        assert store.commit(reserved.ticket) == 1
        fetch_public = public_domain.fetch

        def drop_after(*args):
            fetched = fetch_public(*args)
            assert len(fetched.places) == 1
            store.drop("*")
            return fetched

        monkeypatch.setattr(public_domain, "fetch", drop_after)
        assert store.copy_public(acme, names, names) == 0
        assert store.cover(acme, names).blocks == 0


def test_a_pin_ends_when_its_context_is_dropped(harness) -> None:
    one = harness(2 * MIB)
    chain = one.chain(1, 3)
    one.save(chain)
    assert one.store.pin(one.namespace, chain.keys, 3_600.0) == 3
    one.store.drop("*")
    assert one.nothing_is_left_over()
    assert one.view.used_slots(one.namespace) == 0
    assert one.store.status().hints.pinned_bytes == 0


def test_a_drop_during_recovery_frees_blocks_that_are_recovered_later(harness) -> None:
    records: dict = {}
    one = harness(2 * MIB, MemoryTier(64 * MIB, records))
    chain, other = one.chain(1, BLOCKS), one.chain(2, 2)
    one.save(chain)
    one.store.close()
    one = harness(2 * MIB, PausedScan(records))
    assert one.store.would_drop("*")["complete"] is False
    assert one.store.drop("*") == {"dropped": 0, "complete": False}
    one.save(other)
    one.flush()
    one.tier.scan.go_on.set()
    assert one.store.recovery.wait(60)
    assert one.store.cover(one.namespace, chain.keys).blocks == 0
    assert (one.store.status().recovered_blocks, one.tier.usage().records) == (0, 2)
    assert one.read(other) == 2
    assert one.store.drop("*") == {"dropped": 2, "complete": True}


def test_a_drop_of_another_fingerprint_leaves_the_recovered_blocks(harness) -> None:
    records: dict = {}
    one = harness(2 * MIB, MemoryTier(64 * MIB, records))
    chain = one.chain(1, BLOCKS)
    one.save(chain)
    one.store.close()
    one = harness(2 * MIB, PausedScan(records))
    one.store.drop("00" * 16)
    one.tier.scan.go_on.set()
    assert one.store.recovery.wait(60)
    assert one.store.cover(one.namespace, chain.keys).blocks == BLOCKS


def test_a_drop_during_recovery_holds_even_if_the_process_ends_before_recovery_does(
    harness, tmp_path
) -> None:
    records: dict = {}
    open_store = partial(harness, 2 * MIB, drops_file=tmp_path / "drops.json")
    one = open_store(MemoryTier(64 * MIB, records))
    chain, other = one.chain(1, BLOCKS), one.chain(2, 2)
    one.save(chain)
    one.store.close()
    one = open_store(PausedScan(records))
    one.store.drop("*")
    closing = threading.Thread(target=one.store.close)
    closing.start()
    assert one.store.recovery._stop.wait(60)
    one.tier.scan.go_on.set()
    closing.join(60)
    assert len(records) == BLOCKS, "the scan ended before its first record"
    one = open_store(MemoryTier(64 * MIB, records))
    assert one.store.recovery.wait(60)
    assert one.store.cover(one.namespace, chain.keys).blocks == 0
    assert records == {}
    one.store._housekeep_once()
    one.view.wait_until(
        lambda: not list(tmp_path.iterdir()), "all is freed, so the next process needs no list"
    )
    one.save(other)
    one.store.close()
    one = open_store(MemoryTier(64 * MIB, records))
    assert one.store.recovery.wait(60)
    assert one.read(other) == 2


def test_a_drop_holds_though_a_recovery_failed_before_it_reached_what_was_dropped(
    harness, tmp_path
) -> None:
    class BrokenScan(MemoryTier):
        def survivors(self):
            raise OSError("a sector cannot be read")

    records: dict = {}
    open_store = partial(harness, 2 * MIB, drops_file=tmp_path / "drops.json")
    one = open_store(MemoryTier(64 * MIB, records))
    chain = one.chain(1, BLOCKS)
    one.save(chain)
    one.store.close()
    one = open_store(BrokenScan(64 * MIB, records))
    assert one.store.recovery.wait(60)
    one.store.drop("*")
    one.store._housekeep_once()
    one.store.close()
    assert len(records) == BLOCKS
    one = open_store(MemoryTier(64 * MIB, records))
    assert one.store.recovery.wait(60)
    assert one.store.cover(one.namespace, chain.keys).blocks == 0
    assert records == {}


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "after a write"])
def test_a_drop_holds_after_a_crash(harness, waits) -> None:
    """The image of the medium at the end of the drop is what a killed process leaves."""
    medium = MemoryExtents.formatted(17 * SECTOR, 8)
    tier = tier_on(medium)
    one = harness(2 * MIB, tier)
    assert one.store.recovery.wait(60)
    chain, other = one.chain(1, BLOCKS), one.chain(2, 1)
    one.save(chain)
    one.flush()
    assert one.store.drop("*") == EVERYTHING
    if waits:
        one.save(other)
        one.flush()
    crashed = harness(2 * MIB, tier_on(MemoryExtents(medium.image)))
    assert crashed.store.recovery.wait(60)
    assert crashed.store.cover(one.namespace, chain.keys).blocks == 0
    assert crashed.read(other) == waits


def test_a_drop_during_a_write_holds_after_a_crash(harness, tmp_path) -> None:
    """The write frees its place after the drop; until the disk has recorded it, the file tells."""
    medium, file = MemoryExtents.formatted(17 * SECTOR, 8), tmp_path / "drops.json"
    writes = Paused()
    write = medium.write

    def paused(offset, views):
        if sum(map(len, views)) > SECTOR:
            writes.here()
        write(offset, views)

    one = harness(2 * MIB, tier_on(medium), drops_file=file)
    assert one.store.recovery.wait(60)
    medium.write = paused
    chain = one.chain(1, 2)
    one.save(chain)
    assert writes.reached.wait(60)
    assert one.store.drop("*") == {"dropped": 2, "complete": True}
    assert DropsFile(file).load() == ["*"]
    writes.go_on.set()
    one.flush()
    image = bytes(medium.image)
    crashed = harness(2 * MIB, tier_on(MemoryExtents(image)), drops_file=file)
    assert crashed.store.recovery.wait(60)
    assert crashed.store.cover(one.namespace, chain.keys).blocks == 0


def test_the_next_process_may_drop_blocks_until_the_saved_list_has_no_name_for_them(
    tmp_path, monkeypatch
) -> None:
    """A `sync` may ask at any time while the file is replaced, and while it is removed."""
    drops, seen = DropsFile(tmp_path / "drops.json"), []
    first, second = (Namespace(byte * 16, b"d" * 16, 16 << 10, 16) for byte in (b"1", b"2"))
    fsync = os.fsync

    def look(fd):
        fsync(fd)
        seen.append((drops.names(first), drops.names(second)))

    def add_second() -> bool:
        drops.add(second.fingerprint.hex())
        seen.clear()
        return True

    drops.add(first.fingerprint.hex())
    monkeypatch.setattr(os, "fsync", look)
    drops.finish([], add_second)
    assert seen == [(True, True)] * 2, "the new file, and its folder"
    assert (drops.names(first), drops.names(second)) == (False, True)
    seen.clear()
    drops.finish([], lambda: True)
    assert seen == [(False, True)], "the folder, once the file is gone"
    assert not drops.names(second)


def test_a_drop_is_finished_although_the_folder_of_its_list_is_gone(tmp_path) -> None:
    """As after `holdfast tier replace --path`, once the former medium is gone."""
    folder = tmp_path / "former"
    folder.mkdir()
    drops = DropsFile(folder / "drops.json")
    drops.add("*")
    shutil.rmtree(folder)
    drops.finish([], lambda: True)
    assert len(drops) == 0


def test_a_damaged_list_of_drops_is_reported_and_ignored(tmp_path, caplog) -> None:
    file = tmp_path / "drops.json"
    for damaged in (b"[]", b"{", b'{"version": 1}', b'{"version": 1, "fingerprints": [1]}'):
        file.write_bytes(damaged)
        assert DropsFile(file).load() == []
        assert "drop them again" in caplog.text
        caplog.clear()
