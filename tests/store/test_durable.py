"""Durable contexts: `sync` counts what survives a crash, and the status what does not yet."""

import threading
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast import Retention
from holdfast.blocks.envelope import header_of_record
from holdfast.blocks.namespace import Namespace
from holdfast.clock import ManualClock
from holdfast.errors import BlockError, ConfigError, Outcome
from holdfast.fairness.shares import Quota
from holdfast.store.marks_file import MarksFile
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.testing.embedded import BLOCKS, FINGERPRINT, LAYOUT, blocks_for, tokens_for
from holdfast.testing.memory import MemoryTier, SharedMemoryTier
from holdfast.testing.memory_medium import MemoryMedium, MemoryObjects
from holdfast.testing.store_control import leave_all, write_all_through
from holdfast.testing.store_view import StoreView
from holdfast.tiers.base import NOWHERE, ReservedPlaces
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.tier import DiskTier
from holdfast.tiers.segments.tier import SegmentTier, SegmentTierLimits
from holdfast.tiers.segments.writer import SegmentWriter

TOKENS = BLOCKS * LAYOUT.block_tokens
MIB = 1 << 20


class FlushableMedium(MemoryTier):
    """A tier in memory that can flush; each step fails if it is told to."""

    def __init__(self):
        super().__init__(64 * MIB, name="medium")
        self.writes, self.flushes, self.flushed = True, True, 0
        self.failing, self.failed = False, 0
        self.during_flush = lambda: None

    def accepts_writes(self):
        return self.writes

    def write(self, batch):
        if not self.failing:
            return super().write(batch)
        self.failed += 1
        self.free([put.place for put in batch])
        return [Outcome.GONE] * len(batch)

    def flush(self, places):
        self.flushed += 1
        self.during_flush()
        return [self.flushes] * len(places)


class SharedFlushable(SharedMemoryTier):
    """A shared tier in memory that counts as a medium."""

    def flush(self, places):
        return [self.answers] * len(places)


@pytest.fixture
def medium():
    return FlushableMedium()


@pytest.fixture
def store(medium):
    with Store(16 * MIB, [medium], {"default": b"k" * 32}, StoreOptions()) as one:
        one.start()
        yield one


def save(store, seed=1, retention=Retention.DURABLE):
    session = store.session(FINGERPRINT)
    session.save(tokens_for(seed), blocks_for(seed), retention)
    return session


def test_a_synced_context_is_on_the_medium_and_flushed(store, medium):
    assert save(store).sync(tokens_for(1)) == TOKENS
    assert medium.flushed == 1
    assert store.status().durable.waiting == 0


def test_a_synced_context_is_found_by_the_next_process_without_a_clean_close(tmp_path):
    config = DiskConfig(path=str(tmp_path), capacity_bytes=32 * MIB)
    first = DiskTier(config)
    store = Store(16 * MIB, [first], {"default": b"k" * 32})
    store.start()
    assert save(store).sync(tokens_for(1)) == TOKENS
    image = tmp_path.parent / "image"
    image.mkdir()
    for file in tmp_path.iterdir():
        (image / file.name).write_bytes(file.read_bytes())
    store.close()
    config = DiskConfig(path=str(image), capacity_bytes=32 * MIB)
    with Store(16 * MIB, [DiskTier(config)], {"default": b"k" * 32}) as again:
        again.start()
        again.recovery.wait(60)
        found = np.zeros_like(blocks_for(1))
        landed = again.session(FINGERPRINT).fetch(tokens_for(1), into=found)
        assert landed.tokens == TOKENS
        assert (found == blocks_for(1)).all()


def test_an_ephemeral_context_is_written_by_a_sync(store):
    session = save(store, retention=Retention.EPHEMERAL)
    assert session.sync(tokens_for(1)) == TOKENS


def test_only_leading_blocks_that_are_held_count(store):
    session = save(store)
    assert session.sync([*tokens_for(1), *tokens_for(9)]) == TOKENS
    assert session.sync(tokens_for(7)) == 0


def test_a_medium_that_takes_no_writes_acknowledges_nothing_at_the_deadline(store, medium):
    medium.writes = False
    session = save(store)
    assert session.sync(tokens_for(1), deadline_s=0.1) == 0
    status = store.status().durable
    assert (status.tier, status.waiting, status.lost) == ("medium", BLOCKS, 0)
    medium.writes = True
    assert session.sync(tokens_for(1)) == TOKENS


def test_a_sync_ends_when_its_store_is_closed(medium):
    medium.writes, kept = False, []
    with opened([medium]) as store:
        session = save(store)
        waiting = threading.Thread(
            target=lambda: kept.append(session.sync(tokens_for(1), deadline_s=600.0))
        )
        waiting.start()
        until(store, "the sync waits", lambda: store.status().durable.syncs == 1)
    waiting.join(60.0)
    assert kept == [0]


def test_the_status_tells_how_many_syncs_wait_and_when_the_first_gives_up(store, medium):
    medium.writes = False
    session = save(store)
    found = []
    waiting = [
        threading.Thread(
            target=lambda within_s=s: found.append(session.sync(tokens_for(1), within_s))
        )
        for s in (300.0, 900.0)
    ]
    for thread in waiting:
        thread.start()
    until(store, "both wait", lambda: store.status().durable.syncs == 2)
    assert 0 < store.status().durable.deadline_s <= 300
    medium.writes = True
    for thread in waiting:
        thread.join()
    assert found == [TOKENS] * 2
    assert (store.status().durable.syncs, store.status().durable.deadline_s) == (0, 0)


def test_a_flush_that_fails_acknowledges_nothing(store, medium):
    medium.flushes = False
    assert save(store).sync(tokens_for(1), deadline_s=0.1) == 0


def test_blocks_that_the_medium_evicts_during_a_flush_are_written_and_flushed_again(store, medium):
    def evict_once():
        medium.during_flush = lambda: None
        leave_all(store, 1)

    medium.during_flush = evict_once
    assert save(store).sync(tokens_for(1)) == TOKENS
    assert medium.flushed == 2
    assert len(StoreView(store).copies(1)) == BLOCKS


def test_blocks_that_are_evicted_and_written_again_during_a_flush_are_flushed_again(store, medium):
    def evict_and_write_again():
        medium.during_flush = lambda: None
        leave_all(store, 1)
        write_all_through(store)
        until(store, "all are written", lambda: len(StoreView(store).copies(1)) == BLOCKS)

    medium.during_flush = evict_and_write_again
    assert save(store).sync(tokens_for(1)) == TOKENS
    assert medium.flushed == 2


def test_a_sync_whose_blocks_are_evicted_during_every_flush_ends_at_its_deadline(store, medium):
    medium.during_flush = lambda: leave_all(store, 1)
    assert save(store).sync(tokens_for(1), deadline_s=0.1) == 0


def test_a_durable_block_that_is_dropped_before_it_is_written_counts_as_lost(store, medium):
    medium.writes = False
    session = save(store)
    namespace = session.namespace
    assert isinstance(namespace, Namespace)
    store.forget(namespace, session.chain(tokens_for(1)).keys)
    status = store.status().durable
    assert (status.waiting, status.lost) == (0, BLOCKS)


def test_a_store_without_a_medium_refuses_a_sync():
    with holdfast.open(host="16 MiB") as store:
        session = store.session(FINGERPRINT)
        with pytest.raises(BlockError, match="sync: no tier of this store can flush"):
            session.sync(tokens_for(1))
        assert store.status().durable is None


def test_a_durable_tier_that_cannot_flush_is_refused_by_name(medium):
    lower = [MemoryTier(64 * MIB, name="plain"), medium]
    with pytest.raises(ConfigError, match=r"durable: 'plain' .*name one of: medium"):
        Store(16 * MIB, lower, {"default": b"k" * 32}, StoreOptions(durable="plain"))


def test_a_fetch_is_served_while_a_sync_waits(store, medium):
    medium.writes = False
    session = save(store)
    found = np.zeros_like(blocks_for(1))
    assert session.sync(tokens_for(1), deadline_s=0.05) == 0
    assert session.fetch(tokens_for(1), into=found).outcome is Outcome.OK


def test_a_context_that_was_synced_to_a_shared_medium_is_served_by_another_store():
    objects = MemoryObjects()

    def opened():
        limits = SegmentTierLimits(read_s=60.0, ask_s=60.0, poll_s=0.05)
        tier = SegmentTier(MemoryMedium(objects), SegmentWriter("7d"), limits, "object")
        one = Store(16 * MIB, [tier], {"default": b"k" * 32})
        one.start()
        return one

    with opened() as first:
        assert save(first).sync(tokens_for(1)) == TOKENS
        with opened() as second:
            session, found = second.session(FINGERPRINT), np.zeros_like(blocks_for(1))
            until(second, "it is found", lambda: session.cover(tokens_for(1)) == TOKENS)
            landed = session.fetch(tokens_for(1), into=found)
            assert landed.tokens == TOKENS
            assert (found == blocks_for(1)).all()


DAY_S = 86_400.0


class ShortMedium(FlushableMedium):
    """A medium that has room for four contexts."""

    def __init__(self):
        super().__init__()
        self._capacity_bytes = 4 * BLOCKS * record_bytes()


def record_bytes():
    """The bytes of a record of the layout of the tests."""
    return Namespace(b"", b"", LAYOUT.raw_bytes, LAYOUT.block_tokens).slot_bytes


def opened(lower, path=None, **options):
    chosen = StoreOptions(marks_file=path, **options)
    one = Store(16 * MIB, lower, {"default": b"k" * 32}, chosen)
    one.start()
    return one


def until(store, what, is_true):
    StoreView(store).wait_until(is_true, what)


def test_a_context_that_only_a_shared_tier_holds_is_copied_to_the_durable_tier(medium):
    records = {}
    with opened([SharedMemoryTier(records, name="pool")]) as other:
        other_session = save(other)
        until(other, "the pool holds it", lambda: len(records) == BLOCKS)
        assert other_session.namespace
    with opened([medium, SharedMemoryTier(records, name="pool")]) as store:
        session = store.session(FINGERPRINT)
        assert session.sync(tokens_for(1)) == TOKENS
        assert medium.usage().records == BLOCKS


def test_a_durable_save_of_what_a_shared_tier_holds_is_copied_to_the_durable_tier(medium):
    records = {}
    with opened([SharedMemoryTier(records, name="pool")]) as other:
        save(other)
        until(other, "the pool holds it", lambda: len(records) == BLOCKS)
    with opened([medium, SharedMemoryTier(records, name="pool")]) as store:
        session = store.session(FINGERPRINT)
        assert session.cover(tokens_for(1)) == TOKENS
        assert session.save(tokens_for(1), blocks_for(1), Retention.DURABLE) == 0
        until(store, "the medium holds it", lambda: medium.usage().records == BLOCKS)


def test_a_sync_waits_for_blocks_that_an_engine_is_saving(store):
    session = store.session(FINGERPRINT)
    keys = session.chain(tokens_for(1)).keys
    found = []
    waiting = threading.Thread(
        target=lambda: found.append(store.sync(session.namespace, keys, 60.0, saving=True))
    )
    waiting.start()
    save(store)
    waiting.join()
    assert found == [BLOCKS]


def test_a_write_that_failed_is_tried_again_by_a_sync(store, medium):
    medium.failing = True
    session = save(store)
    until(store, "the write failed", lambda: medium.failed)
    assert session.sync(tokens_for(1), deadline_s=0.05) == 0
    medium.failing = False
    assert session.sync(tokens_for(1)) == TOKENS


def test_an_acknowledgement_is_repeated_after_a_restart(tmp_path):
    config = DiskConfig(path=str(tmp_path), capacity_bytes=32 * MIB)
    with opened([DiskTier(config)], tmp_path / "durable.log") as store:
        assert save(store).sync(tokens_for(1)) == TOKENS
    with opened([DiskTier(config)], tmp_path / "durable.log") as store:
        assert store.session(FINGERPRINT).sync(tokens_for(1)) == TOKENS
        assert store.status().durable.marked == BLOCKS


def test_a_durable_context_that_was_not_written_before_a_restart_is_written_after_it(tmp_path):
    config = DiskConfig(path=str(tmp_path), capacity_bytes=32 * MIB)
    marks, first = tmp_path / "durable.log", FlushableMedium()
    first.writes = False
    with opened([DiskTier(config), first], marks, durable="medium") as store:
        save(store)
        until(store, "the disk holds it", lambda: store.table.lower[0].usage().records == BLOCKS)
    second = FlushableMedium()
    with opened([DiskTier(config), second], marks, durable="medium") as store:
        until(store, "the medium holds it", lambda: second.usage().records == BLOCKS)
        until(store, "nothing waits", lambda: store.status().durable.waiting == 0)


def test_a_durable_context_stays_on_a_full_medium_that_drops_others():
    medium = ShortMedium()
    with opened([medium]) as store:
        session = save(store)
        assert session.sync(tokens_for(1)) == TOKENS
        for seed in range(2, 20):
            save(store, seed, Retention.SESSION).sync(tokens_for(seed))
            until(store, "all is written", lambda: not store.status().waiting_to_write)
        assert session.sync(tokens_for(1)) == TOKENS
        assert store.status().durable.evicted == 0
        assert any(move.reason == "renewal" for move in store.status().moves)


class PowerCutMedium(ShortMedium):
    """A medium that loses with the power what was written after its last flush."""

    def __init__(self):
        super().__init__()
        self.safe = {}

    def flush(self, places):
        self.flushed += 1
        if self.flushes:
            with self._lock:
                self.safe = dict(self._records)
        return [self.flushes] * len(places)

    def kept_by_a_power_cut(self):
        """The keys of the records that a power cut would leave."""
        with self._lock:
            left = [self.safe[place] for place in self._records if place in self.safe]
        return {header_of_record(record).key for record in left}


@pytest.mark.parametrize("flushes", [True, False])
def test_a_durable_context_that_is_written_again_survives_a_loss_of_power(flushes):
    medium = PowerCutMedium()
    with opened([medium]) as store:
        assert save(store).sync(tokens_for(1)) == TOKENS
        acknowledged = medium.kept_by_a_power_cut()
        assert len(acknowledged) == BLOCKS
        medium.flushes = flushes
        for seed in range(2, 20):
            save(store, seed, Retention.SESSION)
            until(store, "all is written", lambda: not store.status().waiting_to_write)
            evicted = store.status().durable.evicted
            lost = acknowledged - medium.kept_by_a_power_cut()
            assert len(lost) <= evicted
        assert any(move.reason == "renewal" for move in store.status().moves) == flushes
        assert bool(evicted) != flushes


def test_a_durable_context_whose_time_is_over_leaves_like_others():
    medium, clock = ShortMedium(), ManualClock()
    with opened([medium], durable_s=DAY_S, clock=clock) as store:
        assert save(store).sync(tokens_for(1)) == TOKENS
        clock.advance(2 * DAY_S)
        for seed in range(2, 20):
            save(store, seed, Retention.SESSION).sync(tokens_for(seed))
            until(store, "all is written", lambda: not store.status().waiting_to_write)
        assert not any(move.reason == "renewal" for move in store.status().moves)


def test_more_durable_contexts_than_half_of_the_medium_are_evicted_and_counted():
    medium = ShortMedium()
    with opened([medium]) as store:
        for seed in range(1, 20):
            save(store, seed).sync(tokens_for(seed))
            until(store, "all is written", lambda: not store.status().waiting_to_write)
        assert store.status().durable.evicted > 0


class FullLaterMedium(FlushableMedium):
    """A medium whose first flush fails; it has no place for further records once it is told so."""

    is_full = False

    def flush(self, places):
        self.flushes = self.flushed > 0
        return super().flush(places)

    def reserve(self, sizes):
        if self.is_full:
            return ReservedPlaces([NOWHERE] * len(sizes), [])
        return super().reserve(sizes)


@pytest.mark.parametrize("fault", ["", "is_full", "failing"])
def test_a_durable_block_that_its_quota_evicts_while_it_is_written_again_counts_only_if_it_is_lost(
    fault,
):
    """The quota has room for one context: a copy leaves it when the block is written again."""
    medium = FullLaterMedium()
    quotas = {"default": {1: Quota(most_bytes=BLOCKS * record_bytes())}}
    with opened([medium], quotas=quotas) as store:
        session = save(store)
        until(store, "all is written", lambda: not store.status().waiting_to_write)
        if fault:
            setattr(medium, fault, True)
        kept = session.sync(tokens_for(1), deadline_s=0.1 if fault else 60.0)
        assert kept == (0 if fault else TOKENS)
        lost = BLOCKS if fault else 0
        until(store, "the quota evicted it", lambda: medium.usage().records == BLOCKS - lost)
        until(store, "all is written", lambda: not store.status().waiting_to_write)
        assert store.status().durable.evicted == lost


def test_what_a_shared_durable_tier_lost_is_written_there_again_before_it_is_acknowledged():
    records = {}
    with opened([SharedFlushable(records)]) as store:
        session = save(store)
        assert session.sync(tokens_for(1)) == TOKENS
        records.clear()
        assert session.sync(tokens_for(1)) == TOKENS
        assert len(records) == BLOCKS


def test_what_a_shared_durable_tier_lost_and_no_tier_holds_is_not_acknowledged():
    records = {}
    with opened([SharedFlushable(records)]) as store:
        session = save(store)
        assert session.sync(tokens_for(1)) == TOKENS
        leave_all(store)
        records.clear()
        assert session.sync(tokens_for(1)) == 0


def test_the_file_of_marks_is_corrected_when_the_wall_clock_is_set(tmp_path):
    """A process that starts after a crash has the times that the right clock gives them."""
    marks, wall_s, options = tmp_path / "durable.log", [0.0], {"clock": ManualClock()}
    options.update(durable_s=DAY_S, wall_s=lambda: wall_s[0])

    def until_s():
        return [run.until_s for run in MarksFile(marks).load()]

    with opened([FlushableMedium()], marks, **options) as store:
        assert save(store).sync(tokens_for(1)) == TOKENS
        assert max(until_s()) == DAY_S
        wall_s[0] = 1.8e9
        until(store, "the file is written again", lambda: min(until_s()) > 1.8e9)


def test_a_dropped_context_is_durable_no_more(tmp_path):
    config = DiskConfig(path=str(tmp_path), capacity_bytes=32 * MIB)
    with opened([DiskTier(config)], tmp_path / "durable.log") as store:
        save(store).sync(tokens_for(1))
        store.drop("*")
        assert store.status().durable.marked == 0
    with opened([DiskTier(config)], tmp_path / "durable.log") as store:
        assert store.status().durable.marked == 0


class ForgetfulMedium(FlushableMedium):
    """A medium that records what was freed only if it is told to."""

    records_frees = False

    def record_frees(self):
        return self.records_frees


def test_a_context_is_not_acknowledged_while_a_restart_would_drop_it(tmp_path, caplog):
    """A drop of its fingerprint before it was saved is not finished."""
    medium = ForgetfulMedium()
    with opened([medium], drops_file=tmp_path / "drops.json") as store:
        session = save(store)
        store.drop("*")
        save(store)
        assert session.sync(tokens_for(1), deadline_s=0.1) == 0
        assert "a drop of its blocks is not recorded by every tier yet" in caplog.text
        assert (tmp_path / "drops.json").exists()
        medium.records_frees = True
        assert session.sync(tokens_for(1)) == TOKENS
        assert not (tmp_path / "drops.json").exists()


def test_a_shared_durable_tier_acknowledges_though_a_disk_has_not_recorded_a_drop(tmp_path):
    """A restart repeats the drop on the node's own tiers only."""
    lower = [ForgetfulMedium(), SharedFlushable({}, name="bucket")]
    with opened(lower, drops_file=tmp_path / "drops.json", durable="bucket") as store:
        session = save(store)
        store.drop("*")
        save(store)
        assert session.sync(tokens_for(1)) == TOKENS
        assert (tmp_path / "drops.json").exists()


def test_a_context_is_not_acknowledged_while_the_list_of_drops_cannot_be_removed(
    tmp_path, monkeypatch, caplog
):
    medium, drops = ForgetfulMedium(), tmp_path / "drops.json"
    with opened([medium], drops_file=drops) as store:
        session = save(store)
        store.drop("*")
        save(store)
        medium.records_frees = True

        def refuse(*_arguments, **_options):
            raise PermissionError("injected")

        with monkeypatch.context() as patched:
            patched.setattr(Path, "unlink", refuse)
            assert session.sync(tokens_for(1), deadline_s=0.1) == 0
        assert "the list of drops was not saved" in caplog.text
        assert session.sync(tokens_for(1)) == TOKENS
