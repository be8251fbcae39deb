"""A drive whose calls do not return: memory stays usable, and housekeeping goes on."""

import shutil
import threading

import numpy as np
import pytest

from holdfast import Retention
from holdfast.clock import ManualClock
from holdfast.errors import Outcome
from holdfast.limits import MIB
from holdfast.store.core import BATCHES_AT_ONCE
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.testing.embedded import BLOCKS, FINGERPRINT, LAYOUT, blocks_for, tokens_for
from holdfast.testing.memory import MemoryTier
from holdfast.testing.store_control import leave_all
from holdfast.testing.store_view import StoreView
from holdfast.tiers.disk.calls_in_progress import HANG_S
from holdfast.tiers.disk.file import DiskConfig, open_file
from holdfast.tiers.disk.replaceable import ReplaceableDisk

HOST_BYTES = 4 * MIB


class HangingDisk(MemoryTier):
    """A tier whose calls wait until `goes_on`; `is_away` is what a watch on the drive finds."""

    def __init__(self):
        super().__init__(64 * MIB, name="disk")
        self.goes_on, self.is_away = threading.Event(), False
        self.began = threading.Event()

    def accepts_writes(self):
        return not self.is_away

    def record_frees(self):
        """As `RecordsFrees` says."""
        self._hang()
        return True

    def write(self, batch):
        self._hang()
        return super().write(batch)

    def read(self, batch):
        self._hang()
        return super().read(batch)

    def _hang(self):
        self.began.set()
        self.goes_on.wait(60)


@pytest.fixture
def disk():
    return HangingDisk()


@pytest.fixture
def store(disk):
    with Store(HOST_BYTES, [disk], {"default": b"k" * 32}, StoreOptions()) as one:
        one.start()
        yield one
        disk.goes_on.set()


def saved(session, seed):
    return session.save(tokens_for(seed), blocks_for(seed))


def test_memory_takes_new_contexts_while_the_drive_hangs(store, disk):
    session = store.session(FINGERPRINT)
    contexts = 2 * HOST_BYTES // (BLOCKS * LAYOUT.raw_bytes)
    saved(session, 0)
    assert disk.began.wait(60)
    for seed in range(1, contexts):
        saved(session, seed)
    assert saved(session, contexts) < BLOCKS, "all of memory waits for the drive"
    disk.is_away = True
    StoreView(store).wait_until(
        lambda: saved(session, contexts + 1) == BLOCKS, "memory takes new contexts"
    )
    found = np.zeros_like(blocks_for(0))
    landed = session.fetch(tokens_for(contexts + 1), into=found)
    assert landed.outcome is Outcome.OK
    assert (found == blocks_for(contexts + 1)).all()


def test_housekeeping_goes_on_while_a_file_of_the_drive_hangs(disk):
    options = StoreOptions(lease_s=0.2, writes_behind=False)
    with Store(HOST_BYTES, [disk], {"default": b"k" * 32}, options) as store:
        store.start()
        session = store.session(FINGERPRINT)
        saved(session, 1)
        dropping = threading.Thread(target=store.drop, args=("*",))
        dropping.start()
        assert disk.began.wait(60)
        saved(session, 2)
        store.fetch(session.namespace, session.chain(tokens_for(2)).keys, 5.0)
        assert store.status().leases == 1
        StoreView(store).wait_until(lambda: not store.status().leases, "the lease expires")
        disk.goes_on.set()
        dropping.join()


class HangingFlush(MemoryTier):
    """A tier whose flushes do not return until `goes_on`."""

    def __init__(self):
        super().__init__(64 * MIB, name="disk")
        self.goes_on, self.began = threading.Event(), threading.Event()

    def flush(self, places):
        self.began.set()
        assert self.goes_on.wait(600)
        return [True] * len(places)


def test_a_sync_ends_at_its_deadline_while_a_flush_hangs_and_acknowledges_nothing():
    disk, found = HangingFlush(), []
    with Store(HOST_BYTES, [disk], {"default": b"k" * 32}, StoreOptions()) as store:
        store.start()
        session = store.session(FINGERPRINT)
        session.save(tokens_for(1), blocks_for(1), Retention.DURABLE)
        StoreView(store).wait_until_written()
        waiting = threading.Thread(
            target=lambda: found.append(session.sync(tokens_for(1), deadline_s=0.1)), daemon=True
        )
        waiting.start()
        waiting.join(60)
        try:
            assert disk.began.is_set()
            assert found == [0]
        finally:
            disk.goes_on.set()
        assert session.sync(tokens_for(1)) == BLOCKS * LAYOUT.block_tokens


class HangingExtents:
    """The extents of a file, whose calls of the kind `hangs` do not return until `goes_on`."""

    def __init__(self, inner):
        self._inner = inner
        self.size, self.direct, self.close = inner.size, inner.direct, inner.close
        self.hangs, self.hanging, self.goes_on = "", threading.Semaphore(0), threading.Event()

    def read(self, offset, views):
        self._hang("read")
        self._inner.read(offset, views)

    def write(self, offset, views):
        self._hang("write")
        self._inner.write(offset, views)

    def flush(self):
        self._hang("flush")
        self._inner.flush()

    def _hang(self, what):
        if what == self.hangs:
            self.hanging.release()
            assert self.goes_on.wait(600)


class HangingDrive:
    """A disk tier whose first drive hangs when it is told so, and a store above it."""

    def __init__(self, folder, *below, hangs="", **options):
        self._folder, self._clock = folder, ManualClock()
        self.extents = []
        config = DiskConfig(path=str(folder / "old"), capacity_bytes=16 * MIB)
        self.tier = ReplaceableDisk(config, self._clock, self._open, watch_s=3600.0)
        self.drops_file = folder / "drops.json"
        options = StoreOptions(drops_file=self.drops_file, **options)
        self.store = Store(HOST_BYTES, [self.tier, *below], {"default": b"k" * 32}, options)
        self.hang(hangs)
        self.store.start()
        assert hangs or self.store.recovery.wait(60)
        self.view = StoreView(self.store)
        self.session = self.store.session(FINGERPRINT)

    def _open(self, config):
        self.extents.append(HangingExtents(open_file(config)))
        return self.extents[-1]

    def hang(self, what):
        self.extents[0].hangs = what

    def await_hanging(self, calls=1):
        for _ in range(calls):
            assert self.extents[0].hanging.acquire(timeout=60)

    def replace(self, folder=None):
        """Find that the drive hangs, and use another folder as an operator asks."""
        self._clock.advance(HANG_S)
        self.tier.look()
        assert "has not returned" in self.tier.usage().away
        self.view.wait_until(lambda: not self.view.copies(1), "what it held is forgotten")
        self.tier.replace(str(folder or self._folder / "new"))

    def await_written(self, seed):
        keys = self.session.chain(tokens_for(seed)).keys
        self.view.wait_until(
            lambda: self.view.held(self.session.namespace, keys, 1) == BLOCKS, "it is written"
        )

    def serves_from_the_new_drive(self, seed):
        """Save a context, and load it from the drive."""
        assert saved(self.session, seed) == BLOCKS
        self.await_written(seed)
        leave_all(self.store)
        found = np.zeros_like(blocks_for(seed))
        landed = self.session.fetch(tokens_for(seed), into=found, deadline_s=60.0)
        return landed.outcome is Outcome.OK and (found == blocks_for(seed)).all()

    def close(self):
        self.extents[0].goes_on.set()
        self.store.close()


@pytest.fixture
def drive(tmp_path):
    made = HangingDrive(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("what", ["write", "flush"])
def test_a_drive_in_place_of_one_whose_writes_or_flushes_hang_takes_blocks(drive, what):
    drive.hang(what)
    saved(drive.session, 1)
    if what == "flush":
        drive.view.wait_until_written()
        assert drive.session.sync(tokens_for(1), deadline_s=1.0) == 0
    drive.await_hanging()
    drive.replace()
    contexts = 2 * HOST_BYTES // (BLOCKS * LAYOUT.raw_bytes)
    for seed in range(2, contexts):
        drive.view.wait_until(
            lambda seed=seed: saved(drive.session, seed) == BLOCKS, "memory takes the context"
        )
    assert drive.serves_from_the_new_drive(contexts)
    assert drive.session.sync(tokens_for(contexts)) == BLOCKS * LAYOUT.block_tokens


def test_a_drive_in_place_of_one_whose_reads_hang_is_read(drive):
    contexts, outcomes = range(1, 1 + BATCHES_AT_ONCE), []
    for seed in contexts:
        saved(drive.session, seed)
    drive.view.wait_until_written()
    leave_all(drive.store)
    drive.hang("read")

    def fetch(seed):
        into = np.zeros_like(blocks_for(seed))
        landed = drive.store.session(FINGERPRINT).fetch(tokens_for(seed), into, deadline_s=5.0)
        outcomes.append(landed.outcome)

    fetches = [threading.Thread(target=fetch, args=(seed,), daemon=True) for seed in contexts]
    for each in fetches:
        each.start()
    drive.await_hanging(BATCHES_AT_ONCE)
    for each in fetches:
        each.join()
    assert outcomes == [Outcome.LATE] * BATCHES_AT_ONCE
    drive.replace()
    assert drive.serves_from_the_new_drive(100)


def test_blocks_whose_write_hung_on_a_former_drive_are_written_to_the_next_one(drive):
    drive.hang("write")
    saved(drive.session, 1)
    drive.await_hanging()
    drive.replace()
    saved(drive.session, 2)
    drive.await_written(2)
    drive.extents[0].goes_on.set()
    drive.await_written(1)
    drive.view.wait_until_idle()
    assert not drive.view.faults


def holds(store, seed):
    return store.session(FINGERPRINT).cover(tokens_for(seed)) == BLOCKS * LAYOUT.block_tokens


def test_a_drive_in_place_of_one_that_hung_in_the_scrub_is_scrubbed(tmp_path):
    drive = HangingDrive(tmp_path, scrub_every_s=0.01)
    try:
        saved(drive.session, 1)
        drive.view.wait_until_written()
        drive.hang("read")
        drive.await_hanging()
        drive.replace()
        saved(drive.session, 2)
        drive.await_written(2)
        passes = drive.store.status().scrub.passes
        drive.view.wait_until(
            lambda: drive.store.status().scrub.passes > passes + 1, "the new drive is scrubbed"
        )
        drive.extents[0].goes_on.set()
        drive.view.wait_until_idle()
        assert not drive.view.faults
        assert holds(drive.store, 2)
    finally:
        drive.close()


def test_recovery_goes_on_with_other_tiers_and_the_next_drive_after_one_that_hung_in_it(tmp_path):
    records, crashed, other = {}, tmp_path / "crashed", tmp_path / "other"
    for folder, seed in ((crashed, 1), (other, 2)):
        folder.mkdir()
        before = HangingDrive(folder)
        saved(before.session, seed)
        before.view.wait_until_written()
        shutil.copytree(folder / "old", folder / "copy" / "old")
        before.close()
    with Store(HOST_BYTES, [MemoryTier(64 * MIB, records)], {"default": b"k" * 32}) as below:
        below.start()
        saved(below.session(FINGERPRINT), 3)
        StoreView(below).wait_until_written()
    drive = HangingDrive(crashed / "copy", MemoryTier(64 * MIB, records), hangs="read")
    try:
        drive.await_hanging()
        drive.tier.look()
        assert not drive.store.recovery.wait(0)
        drive.replace(other / "copy" / "old")
        assert drive.store.recovery.wait(60)
        assert holds(drive.store, 3)
        drive.view.wait_until(lambda: holds(drive.store, 2), "the next drive's blocks are found")
        drive.extents[0].goes_on.set()
        drive.view.wait_until_idle()
        assert not holds(drive.store, 1)
        assert not drive.view.faults
        assert drive.serves_from_the_new_drive(4)
    finally:
        drive.close()


def test_a_drop_stays_on_file_while_a_write_to_a_former_drive_hangs(drive):
    drive.hang("write")
    saved(drive.session, 1)
    drive.await_hanging()
    drive.replace()
    saved(drive.session, 2)
    drive.await_written(2)
    drive.store.drop("*")
    assert drive.drops_file.exists(), "the write that hangs may bring a dropped block back"
    drive.extents[0].goes_on.set()
    drive.view.wait_until(lambda: not drive.drops_file.exists(), "the drop is recorded")


def test_a_new_drive_takes_blocks_without_a_new_thread_after_the_hung_write(drive, monkeypatch):
    start, refused = threading.Thread.start, threading.Event()

    def refuse(thread):
        if thread.name == f"holdfast-to-{drive.tier.name}":
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    drive.hang("write")
    saved(drive.session, 1)
    drive.await_hanging()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    drive.replace()
    assert refused.wait(60)
    drive.extents[0].goes_on.set()
    saved(drive.session, 2)
    drive.await_written(2)
