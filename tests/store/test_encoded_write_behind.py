"""Write-behind of encoded records: a group is encoded while the previous one is written."""

import threading

import numpy as np
import pytest

from holdfast.blocks.key import Chain
from holdfast.blocks.namespace import Namespace
from holdfast.codec.codec import codec_named
from holdfast.codec.pack import payload
from holdfast.keys.keyring import KeyRing
from holdfast.store.options import StoreOptions, TierRules
from holdfast.store.store import Store
from holdfast.testing.memory import MemoryTier

MIB = 1 << 20
PAYLOAD = 3 * MIB
BLOCK_TOKENS = 16
SECRET = b"s" * 32
FINGERPRINT = b"f" * 16
BLOCKS = 9
"""Three groups of three blocks."""


class OverlapTier(MemoryTier):
    """Waits in its first write until a block of the next group is being encoded."""

    def __init__(self):
        super().__init__(64 * MIB)
        self.encoded = threading.Semaphore(0)
        self.writes = 0

    def write(self, batch):
        self.writes += 1
        if self.writes == 1:
            for _ in range(4):
                assert self.encoded.acquire(timeout=60), "nothing is encoded beside a write"
        return super().write(batch)


class FailingTier(MemoryTier):
    """Raises in one of its writes."""

    def __init__(self, failing_write):
        super().__init__(64 * MIB)
        self._failing, self.writes = failing_write, 0

    def write(self, batch):
        self.writes += 1
        if self.writes == self._failing:
            raise OSError("the medium is away")
        return super().write(batch)


def content(key):
    """A payload that shrinks: two values of the high byte."""
    low = np.random.default_rng(list(key)).integers(0, 256, PAYLOAD // 2, np.uint8)
    return np.stack([low, (low & 1) | 0x3C], axis=1).tobytes()


@pytest.fixture
def opened():
    """Call for a store over a tier that encodes; `save` reserves and commits a chain."""
    stores = []

    def make(tier, **options):
        chosen = StoreOptions(rules={1: TierRules(codec="planes")}, **options)
        store = Store(64 * MIB, [tier], {"default": SECRET}, chosen)
        stores.append(store)
        return store

    yield make
    for store in stores:
        store.close()


def save(store):
    namespace = Namespace(FINGERPRINT, store.domain("default")[1], PAYLOAD, BLOCK_TOKENS)
    store.note_element_bytes(namespace, 2)
    chain = Chain(SECRET, FINGERPRINT, BLOCK_TOKENS)
    chain.extend(range(BLOCKS * BLOCK_TOKENS))
    reserved = store.reserve(namespace, chain.keys, FINGERPRINT, 0)
    arena = store.arena(namespace.domain).view
    for key, place in zip(chain.keys, reserved.places, strict=True):
        payload(arena[place:], PAYLOAD)[:] = content(key)
    assert store.commit(reserved.ticket) == BLOCKS
    store.start()
    return namespace, chain.keys


def leave_memory(store):
    deadline = threading.Event()
    for _ in range(6_000):
        if not store.table.unwritten():
            break
        store.mover.wake()
        deadline.wait(0.01)
    assert not store.table.unwritten(), "the writer did not finish"
    with store.table.lock:
        for row in list(store.table.index.rows()):
            store.table.remove_copy(row, 0)


def read(store, namespace, keys):
    """Fetch, check every byte, release; return how many blocks landed."""
    fetched = store.fetch(namespace, keys, 30.0)
    arena = store.arena(namespace.domain).view
    for key, place in zip(keys, fetched.places, strict=False):
        assert bytes(payload(arena[place:], PAYLOAD)) == content(key)
    assert store.release(fetched.lease)
    return len(fetched.places)


def test_a_group_is_encoded_while_the_previous_one_is_written(opened, monkeypatch):
    tier, encode = OverlapTier(), type(codec_named("planes")).encode

    def noted(self, *args):
        tier.encoded.release()
        return encode(self, *args)

    monkeypatch.setattr(type(codec_named("planes")), "encode", noted)
    store = opened(tier)
    namespace, keys = save(store)
    leave_memory(store)
    assert tier.writes == 3
    assert store.status().codecs[0].encoded == BLOCKS
    assert read(store, namespace, keys) == BLOCKS


def test_encoded_groups_of_a_sealed_domain_come_back_unchanged(opened):
    ring = KeyRing(None, derives=True)
    ring.enrol("default", SECRET)
    store = opened(MemoryTier(64 * MIB), ring=ring)
    namespace, keys = save(store)
    leave_memory(store)
    assert store.status().codecs[0].encoded == BLOCKS
    assert read(store, namespace, keys) == BLOCKS


@pytest.mark.parametrize("failing_write", [1, 2, 3])
def test_a_group_that_cannot_be_written_loses_only_its_own_blocks(opened, failing_write):
    tier = FailingTier(failing_write)
    store = opened(tier)
    namespace, keys = save(store)
    leave_memory(store)
    at = 3 * (failing_write - 1)
    lost, kept = keys[at : at + 3], keys[:at] + keys[at + 3 :]
    assert [store.look(namespace, [key], 60.0).blocks for key in lost] == [0] * 3
    assert sum(read(store, namespace, [key]) for key in kept) == 6
    assert tier.usage().records == 6


def test_an_encoder_that_fails_in_a_later_group_leaves_its_blocks_raw(opened, monkeypatch):
    codec, calls = type(codec_named("planes")), []
    encode = codec.encode

    def odd(self, *args):
        calls.append(1)
        if len(calls) == 5:
            raise RuntimeError("out of order")
        return encode(self, *args)

    monkeypatch.setattr(codec, "encode", odd)
    store = opened(MemoryTier(64 * MIB))
    namespace, keys = save(store)
    leave_memory(store)
    status = store.status().codecs[0]
    assert (status.encoded, status.mismatches) == (BLOCKS - 1, 1)
    assert read(store, namespace, keys) == BLOCKS
