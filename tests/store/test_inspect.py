"""What a store says of itself: counts, verification, dropping."""

import time

from holdfast.testing.memory import MemoryTier

MIB = 1 << 20


def test_the_listing_counts_blocks_and_bytes_by_tier(rig) -> None:
    one = rig(MIB, MemoryTier(64 * MIB))
    one.save(one.chain(1, 7))
    one.settle()
    (entry,) = one.store.listing()
    assert entry["fingerprint"] == one.world.fingerprint.hex()
    assert entry["domain"] == "default"
    assert entry["blocks"] == 7
    size = 7 * one.world.record_bytes
    held = {"blocks": 7, "bytes": size}
    assert entry["tiers"] == {"host": held, "memory": held}


def test_the_listing_looks_at_each_copy_once_however_many_worlds_there_are(rig) -> None:
    one = rig(16 * MIB)
    took = []
    for worlds in (200, 3_200):
        for number in range(worlds):
            world = one.world._replace(fingerprint=number.to_bytes(16, "little"), payload_bytes=100)
            key = number.to_bytes(16, "big")
            one.store.commit(one.store.reserve(world, [key], world.fingerprint, 0).ticket)
        begun = time.thread_time()
        entries = one.store.listing()
        took.append(time.thread_time() - begun)
        assert len(entries) == worlds
        assert all(entry["tiers"]["host"]["blocks"] == 1 for entry in entries)
    assert took[1] < 60 * took[0], "16 times as many take 16 times as long"


def test_status_tells_fill_recovery_and_faults(rig) -> None:
    one = rig(MIB)
    one.save(one.chain(1, 3))
    status = one.store.status()
    assert status["blocks"] == 3
    assert status["tiers"][0]["used_bytes"] == 3 * one.world.record_bytes
    assert status["faults"] == []
    assert status["waiting_to_write"] == 0


def test_drop_forgets_one_fingerprint_only(rig) -> None:
    one = rig(MIB)
    chain = one.chain(1, 3)
    one.save(chain)
    assert one.store.drop("00" * 16) == {"dropped": 0}
    assert one.store.drop(one.world.fingerprint.hex()) == {"dropped": 3}
    assert one.store.cover(one.world, chain.keys).blocks == 0
    assert one.store.listing() == []


def test_dropping_what_is_read_leaves_it_to_its_reader(rig) -> None:
    one = rig(MIB)
    chain = one.chain(1, 3)
    one.save(chain)
    fetched = one.store.fetch(one.world, chain.keys, 1.0)
    one.store.drop("*")
    one.save(one.chain(2, 50))
    arena = one.store.arena(one.world.domain).view
    before = [bytes(arena[p + 128 : p + 144]) for p in fetched.places]
    assert one.store.release(fetched.lease)
    assert len(set(before)) == 3
    assert one.store.cover(one.world, chain.keys).blocks == 0
