"""The public domain: everybody reads it, it stays in memory, and no user's blocks get into it."""

import time

import numpy as np
import pytest

from holdfast.blocks.envelope import read_header
from holdfast.blocks.key import Chain
from holdfast.blocks.namespace import Namespace
from holdfast.clock import ManualClock
from holdfast.codec.pack import payload
from holdfast.errors import Outcome
from holdfast.keys.keyring import KeyRing
from holdfast.limits import RING_STALE_S
from holdfast.policy.admit import SecondTouch
from holdfast.store import public_domain
from holdfast.store.block_table import PUBLIC_SHARE
from holdfast.store.options import StoreOptions, TierRules
from holdfast.store.store import Store
from holdfast.testing.memory import MemoryTier
from holdfast.testing.payloads import header_of, payload_of, record_of
from holdfast.testing.store_view import StoreView

MIB = 1 << 20
PAYLOAD, TOKENS = 16 << 10, 16
KEYS = {"acme": b"a" * 32, "rival": b"r" * 32, "commons": b"c" * 32}


class Reader:
    """One domain's view of a store: names, saves, reads; every byte checked by the public name."""

    def __init__(self, store, domain):
        self.store, self._key = store, KEYS[domain]
        self.namespace = Namespace(b"f" * 16, store.domain(domain)[1], PAYLOAD, TOKENS)

    def names(self, seed, blocks):
        chain = Chain(self._key, self.namespace.fingerprint, TOKENS)
        chain.extend(np.random.default_rng(seed).integers(0, 1000, blocks * TOKENS))
        return chain.keys

    def save(self, keys, contents):
        reserved = self.store.reserve(self.namespace, keys, self.namespace.fingerprint, 0)
        arena = self.store.arena(self.namespace.domain).view
        for place, content in zip(reserved.places, contents, strict=True):
            if place >= 0:
                payload(arena[place:], PAYLOAD)[:] = payload_of(content, PAYLOAD)
        return self.store.commit(reserved.ticket)

    def read(self, keys, contents):
        fetched = self.store.fetch(self.namespace, keys, 60.0)
        arena = self.store.arena(self.namespace.domain).view
        for place, content in zip(fetched.places, contents, strict=False):
            assert payload(arena[place:], PAYLOAD) == payload_of(content, PAYLOAD)
        assert self.store.release(fetched.lease)
        return len(fetched.places)

    def cover(self, keys):
        return self.store.cover(self.namespace, keys).blocks


@pytest.fixture
def made():
    stores = []

    def make(tier=None, host_bytes=8 * MIB, **options):
        chosen = StoreOptions(public_domain="commons", publish_token=b"t" * 32, **options)
        store = Store(host_bytes, [tier] if tier else [], KEYS, chosen)
        store.start()
        stores.append(store)
        return store, *(Reader(store, name) for name in KEYS)

    yield make
    for store in stores:
        store.close()


def test_a_reader_gets_a_copy_of_public_blocks_under_its_own_keys(made):
    store, acme, rival, public = made()
    named, common = acme.names(1, 6), public.names(1, 6)
    public.save(common[:4], common[:4])
    assert acme.cover(named) == 0
    assert store.has_public_copies(acme.namespace, named, common)
    assert store.copy_public(acme.namespace, named, common) == 4
    assert acme.read(named, common) == 4
    assert not store.has_public_copies(acme.namespace, named, common)
    assert rival.cover(rival.names(1, 6)) == 0, "what acme read tells rival nothing"


def test_a_public_copy_that_fails_leaks_no_slot(made, monkeypatch):
    store, acme, _, public = made()
    named, common = acme.names(1, 4), public.names(1, 4)
    public.save(common, common)
    before = store.status().tiers[0], store.status().tickets
    with monkeypatch.context() as patch:
        patch.setattr(store, "record", {}.__getitem__)
        with pytest.raises(TypeError):
            store.copy_public(acme.namespace, named, common)
    assert (store.status().tiers[0], store.status().tickets) == before
    assert store.copy_public(acme.namespace, named, common) == 4


def test_blocks_that_a_reader_already_holds_are_not_copied_again(made):
    store, acme, _, public = made()
    named, common = acme.names(1, 6), public.names(1, 6)
    public.save(common, common)
    acme.save(named[:3], common[:3])
    assert store.copy_public(acme.namespace, named, common) == 3
    assert acme.read(named, common) == 6


def test_blocks_saved_by_users_never_enter_the_public_domain(made):
    store, acme, rival, public = made()
    named, common = acme.names(2, 4), public.names(2, 4)
    acme.save(named, common)
    assert public.cover(common) == 0
    assert not store.has_public_copies(rival.namespace, rival.names(2, 4), common)


def test_a_flood_of_saves_does_not_evict_the_public_domain(made):
    store, acme, _, public = made()
    common = public.names(1, 8)
    public.save(common, common)
    for seed in range(10, 80):
        names = acme.names(seed, 8)
        acme.save(names, names)
    assert public.cover(common) == 8
    assert store.copy_public(acme.namespace, acme.names(1, 8), common) == 8


def test_the_public_domain_uses_at_most_its_share_of_memory(made):
    store, acme, _, public = made()
    for seed in range(200):
        names = public.names(seed, 4)
        public.save(names, names)
    used = StoreView(store).memory_bytes(public.namespace)
    assert 0 < used <= PUBLIC_SHARE * store.host_bytes
    names = acme.names(999, 8)
    assert acme.save(names, names) == 8


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"writes_behind": False},
        {"rules": {1: TierRules(lambda _: SecondTouch(1_000))}},
    ],
    ids=["write_behind", "write_on_eviction", "second_touch"],
)
def test_the_public_domain_is_in_memory_after_a_restart_before_it_is_requested(made, options):
    records = {}
    store, _, _, public = made(MemoryTier(64 * MIB, records), **options)
    common = public.names(1, 8)
    public.save(common, common)
    store.close()
    store, acme, _, public = made(MemoryTier(64 * MIB, records))
    named, end = acme.names(1, 8), time.monotonic() + 60
    while not store.has_public_copies(acme.namespace, named, common):
        assert time.monotonic() < end
        time.sleep(0.02)
    assert public_domain.warm(store) == 8
    assert store.copy_public(acme.namespace, named, common) == 8
    assert acme.read(named, common) == 8


def flush(store):
    StoreView(store).wait_until_written()


def test_the_public_domain_is_recovered_after_a_restart_despite_users_writes(made):
    records = {}
    store, acme, _, public = made(MemoryTier(MIB, records))
    common = public.names(1, 8)
    public.save(common, common)
    for seed in range(10, 40):
        names = acme.names(seed, 8)
        acme.save(names, names)
        flush(store)
    assert StoreView(store).entries > len(records), "users' blocks had to go"
    store.close()
    store, acme, _, public = made(MemoryTier(MIB, records))
    assert store.recovery.wait(60)
    assert public.cover(common) == 8
    assert public_domain.warm(store) == 8


def test_a_tier_too_small_for_the_public_domain_is_not_written_endlessly(made):
    tier = MemoryTier(100 << 10)
    store, _, _, public = made(tier)
    common = public.names(1, 8)
    try:
        for name in common:
            public.save([name], [name])
            flush(store)
        assert tier.usage().records == 5
    finally:
        tier.close()  # or the store would never have written everything
    assert public.cover(common) == 8


def test_the_public_domain_is_back_in_memory_once_its_key_ring_is_back(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.store.store._HOUSEKEEPING_S", 0.02)
    clock, path = ManualClock(), tmp_path / "ring.json"
    ring = KeyRing(path)
    ring.enrol("commons", KEYS["commons"])
    options = StoreOptions(public_domain="commons", publish_token=b"t" * 32, ring=ring, clock=clock)
    with Store(8 * MIB, [MemoryTier(64 * MIB)], KEYS, options) as store:
        store.start()
        acme, public = Reader(store, "acme"), Reader(store, "commons")
        named, common = acme.names(1, 8), public.names(1, 8)
        public.save(common, common)
        flush(store)
        path.rename(tmp_path / "away")
        clock.advance(RING_STALE_S + 1)
        await_that(lambda: not store.has_public_copies(acme.namespace, named, common))
        (tmp_path / "away").rename(path)
        await_that(lambda: store.has_public_copies(acme.namespace, named, common))
        assert store.copy_public(acme.namespace, named, common) == 8
        assert acme.read(named, common) == 8


def await_that(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_users_copy_of_a_public_block_is_not_written_to_a_lower_tier(made):
    tier = MemoryTier(64 * MIB)
    store, acme, _, public = made(tier)
    common = public.names(1, 8)
    public.save(common, common)
    store.copy_public(acme.namespace, acme.names(1, 8), common)
    flush(store)
    assert tier.usage().records == 8


def test_an_unsealed_record_from_a_peer_is_refused_in_the_public_domain(made):
    store, acme, _, public = made(serves_peers=True)
    common, own = public.names(1, 3), acme.names(1, 3)
    for namespace, keys, stored in (
        (public.namespace, common, Outcome.FULL),
        (acme.namespace, own, Outcome.OK),
    ):
        records = [record_of(namespace, key) for key in keys]
        berths = store.receive_slots([header_of(namespace, key) for key in keys])
        for receive_slots, record in zip(berths, records, strict=True):
            if receive_slots.slot is not None:
                receive_slots.slot[:] = record
        assert store.publish_received(berths) == [stored] * 3
    assert public.cover(common) == 0
    assert not store.has_public_copies(acme.namespace, acme.names(2, 3), common)


def test_a_record_from_a_peer_sealed_with_the_public_key_is_accepted(made, tmp_path):
    ring = KeyRing(tmp_path / "ring.json")
    ring.enrol("commons", KEYS["commons"])
    records = {}
    tier = MemoryTier(64 * MIB, records)
    store, acme, _, public = made(tier, ring=ring, serves_peers=True, writes_behind=False)
    common = public.names(1, 2)
    public.save(common, common)
    lent = store.fetch_unverified(public.namespace, common, 60.0)
    sealed = [bytes(record) for record in store.outgoing(public.namespace, lent.lease, lent.places)]
    store.release(lent.lease)
    flush(store)
    assert store.forget(public.namespace, common) == 2
    assert not records
    berths = store.receive_slots([read_header(record)[0] for record in sealed])
    for receive_slots, record in zip(berths, sealed, strict=True):
        receive_slots.slot[:] = record
    assert store.publish_received(berths) == [Outcome.OK] * 2
    flush(store)
    assert len(records) == 2, "after a restart it must be there"
    assert store.copy_public(acme.namespace, acme.names(1, 2), common) == 2
    assert acme.read(acme.names(1, 2), common) == 2
