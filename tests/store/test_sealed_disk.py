"""Sealed blocks on a real disk tier: found again after a crash, never in the clear, never wrong."""

import random
import shutil

import pytest

from holdfast.blocks.namespace import Namespace
from holdfast.codec.pack import payload
from holdfast.errors import Outcome
from holdfast.keys.keyring import KeyRing
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.testing.payloads import key_of, payload_of
from holdfast.testing.store_view import StoreView
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.tier import DiskTier

MIB = 1 << 20
PAYLOAD = 30_000
SECRET = b"s" * 32
KEYS = [key_of(number) for number in range(40)]


@pytest.fixture
def opened(tmp_path):
    """Open stores over a folder, all with the ring of this test."""
    stores = []

    def make(folder):
        tier = DiskTier(DiskConfig(path=str(folder), capacity_bytes=32 * MIB))
        ring = KeyRing(tmp_path / "ring.json")
        ring.enrol("default", SECRET)
        store = Store(16 * MIB, [tier], {"default": SECRET}, StoreOptions(ring=ring))
        store.start()
        store.recovery.wait()
        stores.append(store)
        return store

    yield make
    for store in stores:
        store.close()


def namespace_of(store):
    return Namespace(b"f" * 16, store.domain("default")[1], PAYLOAD, 16)


def save(store):
    reserved = store.reserve(namespace_of(store), KEYS, b"f" * 16, 0)
    arena = store.arena(namespace_of(store).domain).view
    for key, place in zip(KEYS, reserved.places, strict=True):
        if place >= 0:
            payload(arena[place:], PAYLOAD)[:] = payload_of(key, PAYLOAD)
    store.commit(reserved.ticket)
    StoreView(store).wait_until_written()


def fetch(store):
    """Fetch block by block; return how many came, each with the right bytes."""
    arena, namespace, good = store.arena(namespace_of(store).domain).view, namespace_of(store), 0
    for key in KEYS:
        fetched = store.fetch(namespace, [key], 10)
        for place in fetched.places:
            assert bytes(payload(arena[place:], PAYLOAD)) == bytes(payload_of(key, PAYLOAD))
        good += len(fetched.places)
        store.release(fetched.lease)
    return good


def crashed(folder, into):
    """Copy a store's folder as it lies while the store still runs: nothing was closed."""
    shutil.copytree(folder, into)
    return into


def test_blocks_come_back_after_a_crash(opened, tmp_path):
    save(opened(tmp_path / "disk"))
    again = opened(crashed(tmp_path / "disk", tmp_path / "copy"))
    assert again.recovery.blocks == len(KEYS)
    assert fetch(again) == len(KEYS)


def test_no_plain_payload_or_secret_is_on_the_disk(opened, tmp_path):
    save(opened(tmp_path / "disk"))
    image = (tmp_path / "disk" / "blocks.holdfast").read_bytes()
    for key in KEYS:
        assert bytes(payload_of(key, PAYLOAD))[1_000:1_064] not in image
    for secret in (SECRET, SECRET.hex().encode()):
        for file in (tmp_path / "disk").iterdir():
            assert secret not in file.read_bytes()


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_disk_serves_only_intact_blocks(opened, tmp_path, seed):
    save(opened(tmp_path / "disk"))
    folder = crashed(tmp_path / "disk", tmp_path / "copy")
    rng, file = random.Random(seed), folder / "blocks.holdfast"
    image = bytearray(file.read_bytes())
    used = image.rfind(b"HFE1") + PAYLOAD
    start = image.find(b"HFE1")
    for _ in range(12):
        image[rng.randrange(start, used)] ^= 1 << rng.randrange(8)
    at = rng.randrange(start, used) // 4096 * 4096
    image[at : at + 4096] = bytes(4096)
    file.write_bytes(image)
    again = opened(folder)
    assert len(KEYS) - 13 <= fetch(again) < len(KEYS)
    outcomes = {fault.outcome for fault in StoreView(again).faults}
    assert outcomes <= {Outcome.CORRUPT, Outcome.MISS, Outcome.GONE}
    save(again)
    assert fetch(again) == len(KEYS)


def test_a_copy_of_the_disk_serves_nothing_after_an_erasure(opened, tmp_path):
    first = opened(tmp_path / "disk")
    save(first)
    folder = crashed(tmp_path / "disk", tmp_path / "copy")
    first.erase("default")
    again = opened(folder)
    assert again.recovery.blocks == 0
    assert fetch(again) == 0


def test_unsealed_records_of_a_domain_that_is_now_sealed_are_overwritten(opened, tmp_path):
    folder = tmp_path / "disk"
    config = DiskConfig(path=str(folder), capacity_bytes=32 * MIB)
    with Store(16 * MIB, [DiskTier(config)], {"default": SECRET, "other": b"o" * 32}) as plain:
        plain.start()
        save(plain)
        other = Namespace(b"f" * 16, plain.domain("other")[1], PAYLOAD, 16)
        kept = plain.reserve(other, [b"k" * 16], b"f" * 16, 0)
        place = kept.places[0]
        payload(plain.arena(other.domain).view[place:], PAYLOAD)[:] = payload_of(b"o" * 16, PAYLOAD)
        plain.commit(kept.ticket)
    marks = [bytes(payload_of(key, PAYLOAD))[:64] for key in KEYS]
    image = (folder / "blocks.holdfast").read_bytes()
    assert all(mark in image for mark in marks)
    store = opened(folder)
    image = (folder / "blocks.holdfast").read_bytes()
    assert not any(mark in image for mark in marks)
    assert bytes(payload_of(b"o" * 16, PAYLOAD)) in image, "what is not sealed is left as it is"
    assert store.status().tiers[1].records == 1
