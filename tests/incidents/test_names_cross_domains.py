"""Two domains that use the same names: each block is saved, served, lost and forgotten by itself.

Seen in this store: the index found rows by key alone, over all domains. A session that sent another
domain's keys learnt from its own reservations which of them were held, and by committing them first
it stopped the other domain from saving. A record on disk hid the other domain's at a restart.
"""

import contextlib
import hashlib

import pytest

from holdfast.blocks.namespace import Namespace
from holdfast.codec.pack import payload
from holdfast.errors import Outcome
from holdfast.keys.keyring import KeyRing
from holdfast.limits import MIB
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.testing import store_control
from holdfast.testing.memory import MemoryTier, SharedMemoryTier
from holdfast.testing.payloads import payload_of
from holdfast.testing.store_view import StoreView
from holdfast.tiers.cxl.kind import CxlOptions
from holdfast.tiers.cxl.tier import CxlTier
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.tier import DiskTier
from holdfast_bench.campaigns.contexts import chain_of

SECRETS = {"acme": b"a" * 32, "birch": b"b" * 32}
NBYTES = 9_000
BLOCKS = 12
KEYS = chain_of("a prompt", BLOCKS)


class Tenant:
    """One domain's view of a store. A block's payload follows from its key and the domain."""

    def __init__(self, store, name, fingerprint=b"f" * 16):
        self.store = store
        self.namespace = Namespace(fingerprint, store.domain(name)[1], NBYTES, 16)

    def right(self, key):
        seed = self.namespace.fingerprint + self.namespace.domain + key
        return payload_of(hashlib.blake2b(seed, digest_size=16).digest(), NBYTES)

    def save(self, keys=KEYS):
        reserved = self.store.reserve(self.namespace, keys, self.namespace.fingerprint, 0)
        arena = self.store.arena(self.namespace.domain).view
        for key, place in zip(keys, reserved.places, strict=True):
            if place >= 0:
                payload(arena[place:], NBYTES)[:] = self.right(key)
        return self.store.commit(reserved.ticket)

    def fetch(self, keys=KEYS):
        fetched = self.store.fetch(self.namespace, keys, 10.0)
        arena = self.store.arena(self.namespace.domain).view
        for key, place in zip(keys, fetched.places, strict=False):
            assert payload(arena[place:], NBYTES) == self.right(key)
        self.store.release(fetched.lease)
        return fetched

    def read(self, keys=KEYS):
        return len(self.fetch(keys).places)

    def cover(self, keys=KEYS):
        return self.store.cover(self.namespace, keys).blocks

    def leave(self, *tiers):
        store_control.leave(self.store, self.namespace, KEYS, *tiers)

    def record(self, block):
        """The record of a block where it lies in memory, to be damaged."""
        return StoreView(self.store).record(self.namespace, KEYS[block])


def flush(store):
    StoreView(store).wait_until_written()


@pytest.fixture
def opened():
    """Call with tiers below the host to get a store and its two tenants."""
    with contextlib.ExitStack() as undo:

        def start(*lower, host_bytes=4 * MIB, ring=None):
            options = StoreOptions(ring=ring)
            store = undo.enter_context(Store(host_bytes, lower, SECRETS, options))
            store.start()
            store.recovery.wait(60)
            return store, Tenant(store, "acme"), Tenant(store, "birch")

        yield start


def disk(folder):
    return DiskTier(DiskConfig(path=str(folder), capacity_bytes=32 * MIB, region_bytes=MIB))


BELOW = {
    "memory": lambda folder: MemoryTier(64 * MIB),
    "disk": disk,
    "cxl": lambda folder: CxlTier(CxlOptions(capacity=16 * MIB)),
    "shared": lambda folder: SharedMemoryTier({}),
}


@pytest.mark.parametrize("kind", BELOW)
def test_each_domain_reads_its_own_bytes_from_memory_and_from_lower_tiers(opened, tmp_path, kind):
    store, acme, birch = opened(BELOW[kind](tmp_path))
    assert (acme.save(), birch.save()) == (BLOCKS, BLOCKS)
    assert (acme.read(), birch.read()) == (BLOCKS, BLOCKS)
    flush(store)
    acme.leave()
    assert birch.fetch().sources == {"host": BLOCKS}, "evicting one leaves the other"
    birch.leave()
    assert (acme.read(), birch.read()) == (BLOCKS, BLOCKS)


@pytest.mark.parametrize("kind", BELOW)
def test_forgetting_blocks_of_one_domain_leaves_those_of_another(opened, tmp_path, kind):
    store, acme, birch = opened(BELOW[kind](tmp_path))
    acme.save()
    birch.save()
    flush(store)
    assert store.forget(acme.namespace, KEYS) == BLOCKS
    assert (acme.cover(), birch.cover()) == (0, BLOCKS)
    birch.leave()
    assert birch.read() == BLOCKS


def test_two_fingerprints_of_one_domain_are_two_namespaces_as_well(opened, tmp_path):
    store, one, _ = opened(disk(tmp_path))
    two = Tenant(store, "acme", b"g" * 16)
    assert (one.save(), two.save()) == (BLOCKS, BLOCKS)
    flush(store)
    one.leave()
    two.leave()
    assert (one.read(), two.read()) == (BLOCKS, BLOCKS)
    assert store.drop(two.namespace.fingerprint.hex()) == {"dropped": BLOCKS, "complete": True}
    assert (one.cover(), two.cover()) == (BLOCKS, 0)
    assert one.read() == BLOCKS


def test_blocks_of_both_domains_are_recovered_from_the_disk_after_a_restart(opened, tmp_path):
    store, acme, birch = opened(disk(tmp_path))
    acme.save()
    birch.save()
    flush(store)
    store.close()
    store, acme, birch = opened(disk(tmp_path))
    assert store.recovery.blocks == 2 * BLOCKS
    assert (acme.read(), birch.read()) == (BLOCKS, BLOCKS)


def test_blocks_of_both_domains_are_recovered_from_regions_after_a_crash(opened, tmp_path):
    """Without a clean close there are no footers: what is found is found by its envelopes."""
    store, acme, birch = opened(disk(tmp_path / "first"))
    acme.save()
    birch.save()
    flush(store)
    (tmp_path / "second").mkdir()
    for file in (tmp_path / "first").iterdir():
        (tmp_path / "second" / file.name).write_bytes(file.read_bytes())
    store, acme, birch = opened(disk(tmp_path / "second"))
    assert store.recovery.blocks == 2 * BLOCKS
    assert (acme.read(), birch.read()) == (BLOCKS, BLOCKS)


def test_an_eviction_by_a_tier_removes_only_the_named_domains_block(opened, tmp_path):
    store, acme, birch = opened(
        DiskTier(DiskConfig(path=str(tmp_path), capacity_bytes=4 * MIB, region_bytes=MIB // 4)),
        host_bytes=32 * MIB,
    )
    acme.save()
    flush(store)
    for number in range(40):
        birch.save(chain_of(f"filling {number}", BLOCKS))
        flush(store)
    birch.save()
    flush(store)
    below = [StoreView(store).held(one.namespace, KEYS, 1) for one in (acme, birch)]
    assert below == [0, BLOCKS]
    birch.leave()
    assert birch.read() == BLOCKS


def test_a_corrupt_block_of_one_domain_leaves_the_block_of_another(opened, tmp_path):
    store, acme, birch = opened(disk(tmp_path))
    acme.save()
    birch.save()
    flush(store)
    acme.record(5)[700] ^= 1
    assert acme.read() == 5
    assert birch.read() == BLOCKS
    assert acme.save() == 0  # the disk still holds a good copy
    assert acme.read() == BLOCKS


def test_a_fault_of_one_domain_does_not_explain_a_miss_of_another(opened, monkeypatch):
    store, acme, birch = opened()
    acme.save()
    birch.save()
    acme.record(5)[700] ^= 1
    assert acme.fetch().outcome is Outcome.CORRUPT
    [fault] = store.status().faults
    assert fault.domain == acme.namespace.domain.hex()
    monkeypatch.setattr("holdfast.store.fetch.slots", lambda *_: 5)  # none for block 5
    assert birch.fetch().outcome is Outcome.FULL


def test_erasing_one_domain_leaves_the_other(opened, tmp_path):
    ring = KeyRing(tmp_path / "ring.json")
    for name, secret in SECRETS.items():
        ring.enrol(name, secret)
    store, acme, birch = opened(disk(tmp_path / "blocks"), ring=ring)
    acme.save()
    birch.save()
    flush(store)
    assert store.erase("acme")["blocks"] == BLOCKS
    assert (acme.cover(), birch.cover()) == (0, BLOCKS)
    birch.leave()
    assert birch.read() == BLOCKS


def test_reserving_keys_that_another_domain_holds_reveals_nothing(opened):
    _, acme, birch = opened()
    acme.save()
    for keys in (KEYS, chain_of("never saved", BLOCKS)):
        reserved = birch.store.reserve(birch.namespace, keys, birch.namespace.fingerprint, 0)
        assert -1 not in reserved.places
        assert reserved.outcome is Outcome.OK
        birch.store.abort(reserved.ticket)


def test_names_that_another_domain_committed_first_can_be_saved(opened):
    _, acme, birch = opened()
    early = acme.store.reserve(acme.namespace, KEYS, acme.namespace.fingerprint, 0)
    assert birch.save() == BLOCKS
    acme.store.abort(early.ticket)
    assert acme.save() == BLOCKS
    assert (acme.read(), birch.read()) == (BLOCKS, BLOCKS)


@pytest.mark.parametrize("squatted", [True, False])
def test_blocks_of_another_host_are_found_even_if_another_domain_has_the_same_keys(
    opened, squatted
):
    far = {}
    here, acme, _ = opened(SharedMemoryTier(far, "pool"))
    assert acme.save() == BLOCKS
    flush(here)
    other, acme, birch = opened(SharedMemoryTier(far, "pool"))
    if squatted:
        assert birch.save() == BLOCKS
        flush(other)
        assert other.look(birch.namespace, KEYS, 60.0).blocks == BLOCKS
    assert other.look(acme.namespace, KEYS, 60.0).blocks == BLOCKS
    assert acme.read() == BLOCKS


def test_a_lookup_of_one_domain_does_not_answer_a_lookup_of_another(opened):
    far = {}
    here, acme, _ = opened(SharedMemoryTier(far, "pool"))
    acme.save()
    flush(here)
    other, acme, birch = opened(SharedMemoryTier(far, "pool"))
    assert other.look(birch.namespace, KEYS, 60.0).blocks == 0, "and that is believed for a while"
    assert other.look(acme.namespace, KEYS, 60.0).blocks == BLOCKS


def test_a_damaged_record_of_one_domain_deletes_no_record_of_another(opened):
    far = {}
    store, acme, birch = opened(SharedMemoryTier(far, "pool"))
    acme.save()
    birch.save()
    flush(store)
    assert len(far) == 2 * BLOCKS
    place, record = far[acme.namespace, KEYS[3]]
    far[acme.namespace, KEYS[3]] = place, record[:700] + bytes([record[700] ^ 1]) + record[701:]
    acme.leave()
    birch.leave()
    assert acme.read() == 3
    assert birch.read() == BLOCKS
    assert len(far) == 2 * BLOCKS - 1
