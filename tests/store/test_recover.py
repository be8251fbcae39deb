"""What an earlier store left below is found again, while the new one already serves."""

import threading
import time

from holdfast.blocks.envelope import read_header
from holdfast.client import session as client
from holdfast.keys.keyring import KeyRing
from holdfast.session import RECOVERING
from holdfast.store.estimates import EngineId
from holdfast.store.lookup import PromptTokens
from holdfast.testing.embedded import FINGERPRINT, blocks_for, tokens_for
from holdfast.testing.extents import MemoryExtents
from holdfast.testing.memory import MemoryTier
from holdfast.testing.store_control import leave_all
from holdfast.tiers.base import Place, SurvivingRecord
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.region import SECTOR
from holdfast.tiers.disk.tier import DiskTier
from holdfast.wire.local import messages as m

MIB = 1 << 20
BLOCK_TOKENS = 16
REGION_BYTES = 17 * SECTOR
"""Three of the harness's records of five sectors fit."""


def test_a_new_store_serves_the_blocks_that_the_last_store_wrote(harness) -> None:
    records = {}
    one = harness(MIB, MemoryTier(64 * MIB, records))
    chain = one.chain(1, 20)
    one.save(chain)
    one.store.close()
    other = harness(MIB, MemoryTier(64 * MIB, records))
    other.store.recovery.wait()
    assert other.store.status().recovered_blocks == 20
    assert other.store.cover(other.namespace, chain.keys).sources == {"memory": 20}
    assert other.read(chain) == 20


def test_saves_and_fetches_go_on_while_the_scan_is_stuck(harness) -> None:
    tier = StuckTier(64 * MIB)
    one = harness(MIB, tier)
    chain = one.chain(1, 5)
    one.save(chain)
    assert one.read(chain) == 5
    assert one.store.status().recovery_s is None
    tier.go.set()
    assert one.store.recovery.wait(60)


def test_a_miss_during_recovery_says_that_recovery_runs(harness) -> None:
    tier = StuckTier(64 * MIB)
    one = harness(MIB, tier)
    session, asked = one.store.session(FINGERPRINT), one.chain(1, 5)
    one.save(asked, 0, 2)
    prompt = PromptTokens(EngineId("engine", "default"), 5 * BLOCK_TOKENS, 0, 5.0)

    def reasons():
        rows = blocks_for(1)
        yield session.fetch(tokens_for(1), into=rows).reason
        yield one.store.fetch(one.namespace, asked.keys, 60.0).reason
        yield one.store.fetch_unverified(one.namespace, one.chain(2, 1).keys, 60.0).reason
        yield one.store.plan_fetch(one.namespace, asked.keys, prompt).plan.reason
        plan = one.store.plan_fetch(one.namespace, one.chain(2, 1).keys, prompt).plan
        covered = m.Covered(0, 0, {}, reason=plan.reason)
        yield client.RemoteSession._fetch(None, None, asked, covered, [], 1.0)[0].reason

    assert [reason.endswith(RECOVERING) for reason in reasons()] == [True] * 5
    tier.go.set()
    assert one.store.recovery.wait(60)
    assert [RECOVERING in reason for reason in reasons()] == [False] * 5


def test_the_newest_copy_of_a_block_wins(harness) -> None:
    records = {}
    one = harness(MIB, MemoryTier(64 * MIB, records))
    chain = one.chain(1, 1)
    one.save(chain)
    one.flush()
    (place,) = records
    records[place + 7] = records[place]
    one.store.close()
    other = harness(MIB, MemoryTier(64 * MIB, records))
    other.store.recovery.wait()
    assert [copy.place for copy in other.view.copies(1)] == [place + 7]
    assert list(records) == [place + 7]
    assert other.store.status().recovered_blocks == 1, "the same block twice is one"
    assert other.read(chain) == 1


def test_a_later_copy_that_is_damaged_does_not_replace_an_intact_one(harness) -> None:
    """As after a loss of power while a durable block was written again."""
    records = {}
    one = harness(MIB, MemoryTier(64 * MIB, records))
    chain = one.chain(1, 1)
    one.save(chain)
    one.flush()
    (place,) = records
    damaged = bytearray(records[place])
    damaged[200] ^= 1
    records[place + 7] = bytes(damaged)
    one.store.close()
    other = harness(MIB, MemoryTier(64 * MIB, records))
    other.store.recovery.wait()
    assert [copy.place for copy in other.view.copies(1)] == [place]
    assert list(records) == [place]
    assert other.store.status().recovered_blocks == 1
    assert other.read(chain) == 1


def test_of_two_sealed_copies_the_later_one_stays_while_the_keys_are_away(harness, tmp_path):
    """The earlier one may be what a loss of power left of it: no one can tell without the key."""
    records, ring = {}, KeyRing(tmp_path / "ring.json")
    ring.enrol("default", b"s" * 32)
    one = harness(MIB, MemoryTier(64 * MIB, records), ring=ring)
    chain = one.chain(1, 1)
    one.save(chain)
    one.flush()
    (place,) = records
    records[place + 7] = records[place]
    damaged = bytearray(records[place])
    damaged[200] ^= 1
    records[place] = bytes(damaged)
    one.store.close()

    class Suspending(MemoryTier):
        def survivors(self):
            (tmp_path / "ring.json").rename(tmp_path / "away")
            ring.suspend()
            return super().survivors()

    other = harness(MIB, Suspending(64 * MIB, records), ring=ring)
    assert other.store.recovery.wait(60)
    (tmp_path / "away").rename(tmp_path / "ring.json")
    ring.look()
    assert list(records) == [place + 7]
    assert other.read(chain) == 1


def test_recovery_does_not_free_a_record_written_since_the_start(harness) -> None:
    """A tier need not know which of its records are older than the process."""

    class Forgetful(StuckTier):
        def survivors(self):
            self.go.wait(60)
            return (SurvivingRecord(read_header(r)[0], p) for p, r in list(self._records.items()))

    one = harness(MIB, tier := Forgetful(64 * MIB))
    chain = one.chain(1, 5)
    one.save(chain)
    one.flush()
    tier.go.set()
    assert one.store.recovery.wait(60)
    assert (tier.usage().records, one.store.status().recovered_blocks) == (5, 0)
    leave_all(one.store)
    assert one.read(chain) == 5


def test_reusing_a_scanned_region_removes_its_recovered_blocks_from_the_index(harness) -> None:
    medium, _ = filled_disk(harness, 12)
    tier = PausedDisk(medium, before=3)
    other = harness(MIB, tier)
    assert tier.paused.wait(60)
    new = [other.chain(100 + n, 1) for n in range(3)]
    save_in_turn(other, new)
    tier.go.set()
    assert other.store.recovery.wait(60)
    other.leave_memory()
    places = [copy.place for copy in other.view.copies(1)]
    assert len(set(places)) == len(places) == tier.usage().records == 12
    assert [other.read(chain) for chain in new] == [1, 1, 1]
    assert not other.view.faults


def test_a_copy_written_during_recovery_stays_and_the_recovered_one_is_freed(harness) -> None:
    medium, chains = filled_disk(harness, 9)
    torn = medium.image.find(chains[0].keys[0]) + 200
    medium.image[torn : torn + 64] = bytes(64)  # as after a power cut: only reads can tell
    tier = PausedDisk(medium, before=0)
    other = harness(MIB, tier)
    assert tier.paused.wait(60)
    save_in_turn(other, chains[:1])
    fresh = other.view.place(other.namespace, chains[0].keys[0], 1)
    tier.go.set()
    assert other.store.recovery.wait(60)
    assert other.view.place(other.namespace, chains[0].keys[0], 1) == fresh
    end_s = time.monotonic() + 60
    while tier.usage().records != 9 and time.monotonic() < end_s:
        time.sleep(0.01)  # a tier of another package frees on a thread of its own
    assert tier.usage().records == 9
    assert other.store.recovery.blocks == 8
    other.leave_memory()
    assert [other.read(chain) for chain in chains] == [1] * 9
    assert not other.view.faults


def test_a_tier_that_cannot_be_scanned_is_logged_and_the_store_still_serves(
    harness, caplog
) -> None:
    class Broken(MemoryTier):
        def survivors(self):
            raise OSError("no such device")

    one = harness(MIB, Broken(64 * MIB))
    assert one.store.recovery.wait(60)
    assert one.store.status().recovery_s is not None
    assert "recovery of tier=memory ended early" in caplog.text
    chain = one.chain(1, 3)
    one.save(chain)
    assert one.read(chain) == 3


def test_a_close_does_not_wait_for_a_long_recovery(harness) -> None:
    class Endless(MemoryTier):
        yielded = 0

        def survivors(self):
            header = read_header(record)[0]
            while not given_up.is_set():
                self.yielded += 1
                yield SurvivingRecord(header, Place(0))

    records: dict = {}
    one = harness(MIB, MemoryTier(64 * MIB, records))
    one.save(one.chain(1, 1))
    one.flush()
    (record,), given_up = records.values(), threading.Event()
    tier = Endless(64 * MIB)
    other = harness(MIB, tier, scrub_every_s=1e6)
    closing = threading.Thread(target=other.store.close)
    closing.start()
    closing.join(60)
    stuck = closing.is_alive()
    given_up.set()
    closing.join(60)
    assert not stuck
    assert tier.yielded


class StuckTier(MemoryTier):
    """Its scan waits to be let go."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self.go = threading.Event()

    def survivors(self):
        self.go.wait(60)
        return iter(())


class PausedDisk(DiskTier):
    """A disk tier whose scan pauses before one of its survivors."""

    def __init__(self, medium: MemoryExtents, before: int) -> None:
        super().__init__(
            DiskConfig(path="memory", capacity_bytes=medium.size), None, lambda _: medium
        )
        self.paused, self.go = threading.Event(), threading.Event()
        self._before = before

    def survivors(self):
        for number, survivor in enumerate(super().survivors()):
            if number == self._before:
                self.paused.set()
                self.go.wait(60)
            yield survivor


def filled_disk(harness, blocks: int):
    """A medium of four regions with so many blocks on it, each a chain, and the chains."""
    medium = MemoryExtents.formatted(REGION_BYTES, 4)
    one = harness(MIB, PausedDisk(medium, before=-1))
    chains = [one.chain(seed, 1) for seed in range(blocks)]
    save_in_turn(one, chains)
    one.store.close()
    return medium, chains


def save_in_turn(one, chains) -> None:
    """Save chains so that they lie on the disk in this order."""
    for chain in chains:
        one.save(chain)
        one.flush()
