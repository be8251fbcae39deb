"""What a store says of itself: counts, verification, dropping."""

import pytest

from holdfast.blocks.namespace import Namespace
from holdfast.errors import BlockError
from holdfast.index.residency import Residency
from holdfast.testing.memory import MemoryTier

MIB = 1 << 20


def test_the_listing_counts_blocks_and_bytes_by_tier(harness) -> None:
    one = harness(MIB, MemoryTier(64 * MIB))
    one.save(one.chain(1, 7))
    one.flush()
    (entry,) = one.store.listing()
    assert entry["fingerprint"] == one.namespace.fingerprint.hex()
    assert entry["domain"] == "default"
    assert entry["blocks"] == 7
    size = 7 * one.namespace.slot_bytes
    held = {"blocks": 7, "bytes": size, "raw_bytes": size}
    assert entry["tiers"] == {"host": held, "memory": held}


def test_the_listing_looks_at_each_copy_once_however_many_namespaces_there_are(
    harness, monkeypatch
) -> None:
    one = harness(16 * MIB)
    looked_at: list[int] = []
    namespace_of_row = Residency.namespace

    def counting(index: Residency, row: int) -> Namespace:
        looked_at.append(row)
        return namespace_of_row(index, row)

    for namespaces in (200, 3_200):
        for number in range(namespaces):
            namespace = one.namespace._replace(
                fingerprint=number.to_bytes(16, "little"), raw_bytes=100
            )
            key = number.to_bytes(16, "big")
            one.store.commit(one.store.reserve(namespace, [key], namespace.fingerprint, 0).ticket)
        looked_at.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Residency, "namespace", counting)
            entries = one.store.listing()
        assert len(entries) == namespaces
        assert all(entry["tiers"]["host"]["blocks"] == 1 for entry in entries)
        assert len(looked_at) == 3 * namespaces


def test_status_reports_fill_recovery_and_faults(harness) -> None:
    one = harness(MIB)
    one.save(one.chain(1, 3))
    status = one.store.status()
    assert status.blocks == 3
    assert status.tiers[0].used_bytes == 3 * one.namespace.slot_bytes
    assert status.faults == []
    assert status.waiting_to_write == 0


def test_drop_forgets_one_fingerprint_only(harness) -> None:
    one = harness(MIB)
    chain = one.chain(1, 3)
    one.save(chain)
    assert one.store.drop("00" * 16) == {"dropped": 0, "complete": True}
    assert one.store.drop(one.namespace.fingerprint.hex()) == {"dropped": 3, "complete": True}
    assert one.store.cover(one.namespace, chain.keys).blocks == 0
    assert one.store.listing() == []


def test_a_drop_does_not_change_blocks_that_a_reader_has_leased(harness) -> None:
    one = harness(MIB)
    chain = one.chain(1, 3)
    one.save(chain)
    fetched = one.store.fetch(one.namespace, chain.keys, 1.0)
    arena, size = one.store.arena(one.namespace.domain).view, one.namespace.slot_bytes
    before = [bytes(arena[place : place + size]) for place in fetched.places]
    assert len(before) == 3
    one.store.drop("*")
    one.save(one.chain(2, 50))
    assert [bytes(arena[place : place + size]) for place in fetched.places] == before
    assert one.store.release(fetched.lease)
    assert one.store.cover(one.namespace, chain.keys).blocks == 0


def test_an_empty_fingerprint_drops_nothing(harness) -> None:
    one = harness(MIB)
    one.save(one.chain(1, 3))
    with pytest.raises(BlockError, match=r"fingerprint is empty; name one .* everything with '\*'"):
        one.store.drop("")
    assert one.store.status().blocks == 3


def test_fields_of_a_status_are_read_by_name_too(harness) -> None:
    one = harness(MIB)
    one.save(one.chain(1, 3))
    status = one.store.status()
    assert status["tiers"][0]["records"] == status.tiers[0].records == 3
    with pytest.raises(KeyError, match="no_field"):
        status["no_field"]
