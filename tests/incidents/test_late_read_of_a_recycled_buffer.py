"""A slow reader copies from a buffer that meanwhile belongs to somebody else.

Mooncake: a get outlived its lease, the buffer was given to another key, the reader got that key's
bytes; the branch for local disks has no lease check at all.
Threads: https://github.com/kvcache-ai/Mooncake/issues/850
https://github.com/kvcache-ai/Mooncake/issues/4153
"""

from holdfast.clock import ManualClock
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.testing.extents import MemoryExtents
from holdfast.testing.payloads import key_of, namespace_of, record_of
from holdfast.tiers.base import TierGet, TierPut
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.region import SECTOR
from holdfast.tiers.disk.tier import DiskTier
from holdfast_bench.campaigns.contexts import Contexts, chain_of

CHAIN = chain_of("read slowly", 4)


def test_a_leased_slot_is_not_reused(contexts):
    contexts.save(CHAIN)
    fetched = contexts.store.fetch(contexts.namespace, CHAIN, 1.0)
    before = [bytes(contexts.record(key)) for key in CHAIN]
    for number in range(200):  # far more than there is memory for
        contexts.save(chain_of(f"other {number}", 4))
    assert [bytes(contexts.record(key)) for key in CHAIN] == before
    assert contexts.store.release(fetched.lease)


def test_blocks_copied_after_their_lease_ended_do_not_count():
    clock = ManualClock()
    with Store(1 << 20, [], {"default": b"d" * 32}, StoreOptions(clock=clock)) as store:
        contexts = Contexts(store, 9_000)
        contexts.save(CHAIN)
        fetched = store.fetch(contexts.namespace, CHAIN, 1.0)
        clock.advance(3600)
        store.housekeep()
        assert store.release(fetched.lease) is False


def test_a_place_on_disk_that_was_reclaimed_is_a_miss():
    medium = MemoryExtents.formatted(16 * SECTOR, 3)
    tier = DiskTier(DiskConfig(path="memory", capacity_bytes=medium.size), None, lambda _: medium)
    namespace, key = namespace_of(SECTOR - 144), key_of(0)
    [first] = tier.reserve([namespace.slot_bytes]).places
    assert tier.write([TierPut(first, record_of(namespace, key))]) == ["ok"]
    for number in range(1, 80):
        [place] = tier.reserve([namespace.slot_bytes]).places
        tier.write([TierPut(place, record_of(namespace, key_of(number)))])
    into = memoryview(bytearray(namespace.slot_bytes))
    assert tier.read([TierGet(first, key, into, namespace)]) == ["miss"]
    tier.close()
