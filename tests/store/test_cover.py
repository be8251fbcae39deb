"""Coverage asks shared tiers about what the index does not know, and hearsay may be wrong."""

from holdfast.store import hearsay
from holdfast.testing.memory import SharedMemoryTier
from holdfast.tiers.base import segment_place

MIB = 1 << 20


def test_what_one_store_saved_another_finds_and_fetches(rig) -> None:
    by_key = {}
    one, other = (
        rig(MIB, SharedMemoryTier(by_key, "pool")),
        rig(MIB, SharedMemoryTier(by_key, "pool")),
    )
    chain = one.chain(1, 10)
    one.save(chain)
    one.settle()
    assert other.store.cover(other.world, chain.keys).blocks == 0
    assert other.store.look(other.world, chain.keys).sources == {"pool": 10}
    assert other.read(chain) == 10
    assert other.store.cover(other.world, chain.keys).sources == {"host": 10}


def test_blocks_are_written_to_the_place_of_their_segment(rig) -> None:
    by_key = {}
    one = rig(MIB, SharedMemoryTier(by_key, "pool"))
    chain = one.chain(1, 10)
    one.save(chain, 0, 4)
    reserved = one.store.reserve(one.world, chain.keys[4:], chain.parent(4), 4, chain.segment(4))
    one.fill(chain.keys[4:], reserved.places)
    one.store.commit(reserved.ticket)
    one.settle()
    assert {place for place, _ in by_key.values()} == {segment_place(chain.segment(0))}
    assert len(by_key) == 10


def test_hearsay_that_is_wrong_is_a_miss_and_forgotten(rig) -> None:
    by_key = {}
    one, other = (
        rig(MIB, SharedMemoryTier(by_key, "pool")),
        rig(MIB, SharedMemoryTier(by_key, "pool")),
    )
    chain = one.chain(1, 10)
    one.save(chain)
    one.settle()
    other.store.look(other.world, chain.keys)
    del by_key[chain.keys[6]]
    assert other.read(chain) == 6
    assert other.store.cover(other.world, chain.keys).blocks == 6


def test_a_damaged_record_is_condemned_by_its_first_reader_and_written_anew(rig) -> None:
    by_key = {}
    one, other = (
        rig(MIB, SharedMemoryTier(by_key, "pool")),
        rig(MIB, SharedMemoryTier(by_key, "pool")),
    )
    chain = one.chain(1, 10)
    one.save(chain)
    one.settle()
    place, record = by_key[chain.keys[6]]
    by_key[chain.keys[6]] = place, record[:5_000] + bytes([record[5_000] ^ 1]) + record[5_001:]
    other.store.look(other.world, chain.keys)
    assert other.read(chain) == 6
    assert chain.keys[6] not in by_key
    other.save(chain)
    other.settle()
    assert by_key[chain.keys[6]] == (place, record)


def test_only_so_much_hearsay_is_kept(rig, monkeypatch) -> None:
    monkeypatch.setattr(hearsay, "HINTS_MAX", 5)
    by_key = {}
    one, other = (
        rig(MIB, SharedMemoryTier(by_key, "pool")),
        rig(MIB, SharedMemoryTier(by_key, "pool")),
    )
    chain = one.chain(1, 10)
    one.save(chain)
    one.settle()
    other.store.look(other.world, chain.keys)
    assert len(other.store.states.hints) == 5
    assert other.store.cover(other.world, chain.keys).blocks == 5


def test_what_was_written_elsewhere_and_left_memory_is_hearsay_too(rig, monkeypatch) -> None:
    monkeypatch.setattr(hearsay, "HINTS_MAX", 20)
    by_key = {}
    one = rig(MIB, SharedMemoryTier(by_key, "pool"))
    for seed in range(40):
        chain = one.chain(seed, 10)
        one.save(chain)
        one.settle_writes()
        one.store.keep_house()
    in_memory = one.store.states.host(one.world).usage().records
    assert len(by_key) > 2 * in_memory
    assert one.store.status()["blocks"] <= in_memory + 20, "what others may drop is not counted on"
    assert one.store.look(one.world, one.chain(0, 10).keys).blocks == 10
    assert one.read(one.chain(0, 10)) == 10


def test_a_store_that_shares_nothing_asks_nobody(rig) -> None:
    one = rig(MIB)
    chain = one.chain(1, 3)
    one.save(chain, 0, 2)
    assert not one.store.shares
    assert one.store.look(one.world, chain.keys).blocks == 2
