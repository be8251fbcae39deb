"""A drive whose calls do not return: memory stays usable, and housekeeping goes on."""

import threading

import numpy as np
import pytest

from holdfast import Retention
from holdfast.errors import Outcome
from holdfast.limits import MIB
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.testing.embedded import BLOCKS, FINGERPRINT, LAYOUT, blocks_for, tokens_for
from holdfast.testing.memory import MemoryTier
from holdfast.testing.store_view import StoreView

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
