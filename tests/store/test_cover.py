"""Coverage asks shared tiers about what the index does not know, and hearsay may be wrong."""

from holdfast.errors import Outcome
from holdfast.store import cover
from holdfast.testing.memory import MemoryTier
from holdfast.tiers.base import Get, segment_place

MIB = 1 << 20


class SharedMemory(MemoryTier):
    """Two stores' memory of records by key."""

    def __init__(self, by_key: dict) -> None:
        super().__init__(64 * MIB, name="pool")
        self.by_key = by_key

    def write(self, batch):
        for put in batch:
            self.by_key[bytes(put.record[32:48])] = (put.place, bytes(put.record))
        return [Outcome.OK] * len(batch)

    def read(self, batch):
        return [self._look(get) for get in batch]

    def _look(self, get: Get) -> Outcome:
        place, record = self.by_key.get(get.key, (None, b""))
        if place != get.place:
            return Outcome.MISS
        get.into[:] = record
        return Outcome.OK

    def free(self, places) -> None:
        pass

    def describe(self) -> dict:
        return {"tier": self.name}

    def held(self, world, keys, start) -> int:
        found = 0
        while start + found < len(keys) and keys[start + found] in self.by_key:
            found += 1
        return found


def test_what_one_store_saved_another_finds_and_fetches(rig) -> None:
    by_key = {}
    one, other = rig(MIB, SharedMemory(by_key)), rig(MIB, SharedMemory(by_key))
    chain = one.chain(1, 10)
    one.save(chain)
    one.settle()
    assert other.store.cover(other.world, chain.keys).blocks == 0
    assert other.store.look(other.world, chain.keys).sources == {"pool": 10}
    assert other.read(chain) == 10
    assert other.store.cover(other.world, chain.keys).sources == {"host": 10}


def test_blocks_are_written_to_the_place_of_their_segment(rig) -> None:
    by_key = {}
    one = rig(MIB, SharedMemory(by_key))
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
    one, other = rig(MIB, SharedMemory(by_key)), rig(MIB, SharedMemory(by_key))
    chain = one.chain(1, 10)
    one.save(chain)
    one.settle()
    other.store.look(other.world, chain.keys)
    del by_key[chain.keys[6]]
    assert other.read(chain) == 6
    assert other.store.cover(other.world, chain.keys).blocks == 6


def test_only_so_much_hearsay_is_kept(rig, monkeypatch) -> None:
    monkeypatch.setattr(cover, "HINTS_MAX", 5)
    by_key = {}
    one, other = rig(MIB, SharedMemory(by_key)), rig(MIB, SharedMemory(by_key))
    chain = one.chain(1, 10)
    one.save(chain)
    one.settle()
    other.store.look(other.world, chain.keys)
    assert len(other.store.states.hints) == 5
    assert other.store.cover(other.world, chain.keys).blocks == 5


def test_a_store_that_shares_nothing_asks_nobody(rig) -> None:
    one = rig(MIB)
    chain = one.chain(1, 3)
    one.save(chain, 0, 2)
    assert not one.store.shares
    assert one.store.look(one.world, chain.keys).blocks == 2
