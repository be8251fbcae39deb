"""Whole records from other nodes: announced, received, checked, and only then seen by anybody."""

import pytest

from holdfast.blocks.envelope import stored_bytes, write_header
from holdfast.blocks.namespace import Namespace
from holdfast.errors import Outcome, RefusedError
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.testing.memory import MemoryTier
from holdfast.testing.payloads import header_of, is_right, key_of, namespace_of, record_of
from holdfast.testing.store_control import leave_all
from holdfast.testing.store_view import StoreView

PEERS = StoreOptions(serves_peers=True)

MIB = 1 << 20
NAMESPACE = namespace_of(20_000)
KEYS = [key_of(i) for i in range(6)]
HEADERS = [header_of(NAMESPACE, key) for key in KEYS]


@pytest.fixture
def store():
    with Store(
        4 * MIB, [MemoryTier(16 * MIB)], {"default": b"s" * 32}, StoreOptions(serves_peers=True)
    ) as made:
        made.start()
        yield made


def receive(berths, records=None):
    """Fill slots as a connection does, in pieces."""
    for receive_slots in berths:
        record = (records or {}).get(receive_slots.header.key) or record_of(
            receive_slots.namespace, receive_slots.header.key
        )
        if receive_slots.slot is not None:
            for at in range(0, len(record), 7000):
                receive_slots.slot[at : at + 7000] = record[at : at + 7000]


def put(store, headers=HEADERS):
    berths = store.receive_slots(headers)
    receive(berths)
    return store.publish_received(berths)


def test_a_received_record_is_invisible_until_it_is_published(store):
    berths = store.receive_slots(HEADERS)
    receive(berths)
    assert store.held(NAMESPACE, KEYS) == bytes(6)
    assert store.publish_received(berths) == [Outcome.OK] * 6
    assert store.held(NAMESPACE, KEYS) == b"\1" * 6


def test_records_leased_to_a_peer_are_the_published_ones(store):
    put(store)
    lent = store.fetch_unverified(NAMESPACE, KEYS, 5)
    assert len(lent.places) == 6
    for key, place in zip(KEYS, lent.places, strict=True):
        assert is_right(store.record(NAMESPACE, place), NAMESPACE, key)
    assert store.release(lent.lease)


def test_a_fetch_verifies_records_and_a_lease_for_a_peer_does_not(store):
    put(store)
    lent = store.fetch_unverified(NAMESPACE, KEYS, 5)
    store.record(NAMESPACE, lent.places[1])[5000] ^= 1
    store.release(lent.lease)
    lent = store.fetch_unverified(NAMESPACE, KEYS, 5)
    assert len(lent.places) == 6
    store.release(lent.lease)
    fetched = store.fetch(NAMESPACE, KEYS, 5)
    assert (len(fetched.places), fetched.outcome) == (1, Outcome.CORRUPT)
    store.release(fetched.lease)


def test_discarded_slots_of_received_records_are_free_again(store):
    view = StoreView(store)
    before = view.used_slots(NAMESPACE), view.memory_bytes(NAMESPACE)
    berths = store.receive_slots(HEADERS)
    assert StoreView(store).used_slots(NAMESPACE) == 6
    store.discard_received(berths)
    assert (view.used_slots(NAMESPACE), view.memory_bytes(NAMESPACE)) == before
    assert store.held(NAMESPACE, KEYS) == bytes(6)


def test_two_senders_of_one_record_leave_one_copy(store):
    first, second = store.receive_slots(HEADERS), store.receive_slots(HEADERS)
    receive(first)
    receive(second)
    assert store.publish_received(first) == store.publish_received(second) == [Outcome.OK] * 6
    assert StoreView(store).used_slots(NAMESPACE) == 6


def test_a_record_held_on_a_lower_tier_needs_no_slot(store):
    put(store)
    StoreView(store).wait_until_written()
    leave_all(store)
    assert [receive_slots.held for receive_slots in store.receive_slots(HEADERS)] == [True] * 6
    assert StoreView(store).used_slots(NAMESPACE) == 0


def test_a_key_of_another_namespace_is_another_block(store):
    put(store)
    other = namespace_of(20_000, seed=1)
    assert put(store, [header_of(other, KEYS[0])]) == [Outcome.OK]
    assert store.held(NAMESPACE, KEYS) == b"\1" * 6
    assert store.held(other, KEYS) == b"\1" + bytes(5)


def test_one_key_put_in_two_namespaces_at_once_is_held_in_both(store):
    other = namespace_of(20_000, seed=1)
    first, second = (
        store.receive_slots(HEADERS[:1]),
        store.receive_slots([header_of(other, KEYS[0])]),
    )
    receive(first)
    receive(second)
    assert store.publish_received(first) == [Outcome.OK]
    assert store.publish_received(second) == [Outcome.OK]
    assert StoreView(store).used_slots(NAMESPACE) == 2


@pytest.mark.parametrize("said", [True, False])
@pytest.mark.parametrize("at", [0, 5, 15, 20, 100, 127])
def test_a_record_whose_header_differs_from_the_announced_one_is_not_published(store, at, said):
    berths = store.receive_slots(HEADERS[:2])
    damaged = record_of(NAMESPACE, KEYS[0])
    damaged[at] ^= 0x10
    receive(berths, {KEYS[0]: damaged})
    announced = b"".join(record_of(NAMESPACE, key)[:128] for key in KEYS[:2]) if said else b""
    assert store.publish_received(berths, announced) == [Outcome.CORRUPT, Outcome.OK]
    assert store.held(NAMESPACE, KEYS[:2]) == b"\0\1"
    assert put(store, HEADERS[:2]) == [Outcome.OK] * 2


@pytest.mark.parametrize("written", ["written below first", "still being written"])
@pytest.mark.parametrize("at", [128, 10_000, 20_127, 20_128, 20_143])
def test_a_damaged_payload_is_held_unverified_until_each_copy_has_had_a_reader(store, at, written):
    berths = store.receive_slots(HEADERS[:2])
    damaged = record_of(NAMESPACE, KEYS[0])
    damaged[at] ^= 0x10
    receive(berths, {KEYS[0]: damaged})
    assert store.publish_received(berths) == [Outcome.OK] * 2
    if written == "written below first":
        StoreView(store).wait_until_written()
    outcomes = []
    for _ in range(3):  # a copy in memory, one below, and then the block that is saved again
        fetched = store.fetch(NAMESPACE, KEYS[:2], 5)
        outcomes.append(fetched.outcome)
        assert len(fetched.places) == (2 if fetched.outcome is Outcome.OK else 0)
        store.release(fetched.lease)
        assert put(store, HEADERS[:2]) == [Outcome.OK] * 2
    assert outcomes[0] is Outcome.CORRUPT
    assert outcomes[2] is Outcome.OK


def test_a_sealed_record_of_another_node_is_published_without_being_opened(store):
    header = HEADERS[0]._replace(seal=1, epoch=3, nonce=b"n" * 12)
    [receive_slots] = store.receive_slots([header])
    write_header(receive_slots.slot, header)
    assert store.publish_received([receive_slots]) == [Outcome.OK]
    assert store.held(NAMESPACE, KEYS[:1]) == b"\1"


def test_replacing_an_unverified_record_counts_no_failed_check(store):
    header = HEADERS[0]._replace(seal=1, epoch=3, nonce=b"n" * 12)
    for epoch, held in ((3, False), (3, False), (2, True)):
        [receive_slots] = store.receive_slots([header._replace(epoch=epoch)])
        assert receive_slots.held == held
        if not held:
            write_header(receive_slots.slot, header)
            assert store.publish_received([receive_slots]) == [Outcome.OK]
            assert store.check_suspects(NAMESPACE, KEYS[:1]) == 0, "it cannot be opened here"
    assert StoreView(store).used_slots(NAMESPACE) == 1
    assert store.status().failed_checks == []


def test_an_impossible_size_evicts_nothing(store):
    put(store)
    huge = namespace_of(5 * MIB)
    assert put(store, [header_of(huge, key_of(9))]) == [Outcome.FULL]
    assert store.held(NAMESPACE, KEYS) == b"\1" * 6


def test_a_full_store_accepts_the_records_that_fit_and_refuses_the_rest_as_full(store):
    namespace = namespace_of(MIB - 4096)
    assert stored_bytes(namespace.raw_bytes) == MIB
    headers = [header_of(namespace, key_of(i)) for i in range(6)]
    berths = store.receive_slots(headers)
    assert [receive_slots.slot is not None for receive_slots in berths] == [True] * 4 + [False] * 2
    receive(berths)
    assert store.publish_received(berths) == [Outcome.OK] * 4 + [Outcome.FULL] * 2


def test_pinned_blocks_are_not_evicted_for_received_records(store):
    namespace = namespace_of(MIB - 4096)
    put(store, [header_of(namespace, key_of(0))])
    assert store.pin(namespace, [key_of(0), key_of(1)], 60) == 1
    for i in range(1, 9):
        put(store, [header_of(namespace, key_of(i))])
    assert store.held(namespace, [key_of(0)]) == b"\1"


def test_forgotten_blocks_are_gone_from_every_tier(store):
    put(store)
    StoreView(store).wait_until_written()
    assert store.forget(NAMESPACE, [*KEYS[:2], key_of(99)]) == 2
    assert store.held(NAMESPACE, KEYS) == b"\0\0\1\1\1\1"
    assert store.forget(NAMESPACE._replace(domain=b"d" * 16), KEYS) == 0


def test_a_store_that_serves_no_peers_refuses_records_of_unknown_domains():
    with Store(MIB, [], {"default": b"s" * 32}) as store:
        told = rf"domain {NAMESPACE.domain.hex()}: there is no key of it here, .*under `domains`"
        with pytest.raises(RefusedError, match=told):
            store.receive_slots(HEADERS)
        own = Namespace(NAMESPACE.fingerprint, store.domain("default")[1], 20_000, 128)
        assert put(store, [header_of(own, KEYS[0])]) == [Outcome.OK]
        assert store.held(own, KEYS[:2]) == b"\1\0"


def test_a_message_with_one_refused_namespace_takes_no_slot():
    with Store(MIB, [], {"default": b"s" * 32}) as store:
        own = Namespace(NAMESPACE.fingerprint, store.domain("default")[1], 20_000, 128)
        with pytest.raises(RefusedError):
            store.receive_slots([header_of(own, KEYS[0]), HEADERS[1]])
        assert StoreView(store).used_slots(own) == 0


def test_a_full_memory_evicts_the_oldest_blocks_for_a_whole_message():
    with Store(4 * MIB, [], {"default": b"s" * 32}, PEERS) as store:
        store.start()
        old = [header_of(NAMESPACE, key_of(100 + i)) for i in range(300)]
        for at in range(0, 300, 50):
            put(store, old[at : at + 50])
        held = store.held(NAMESPACE, [header.key for header in old])
        assert 0 < sum(held) < 300, "it is full"
        used = StoreView(store).memory_bytes(NAMESPACE)
        assert put(store, [old[-1], *HEADERS]) == [Outcome.OK] * 7
        assert store.held(NAMESPACE, [old[-1].key, *KEYS]) == b"\1" * 7
        assert StoreView(store).memory_bytes(NAMESPACE) == used
        assert StoreView(store).used_bytes(0, NAMESPACE.domain) == used
        left = store.held(NAMESPACE, [header.key for header in old])
        assert sum(held) - sum(left) == 6
        oldest = held.find(1) // 50 * 50
        assert left[oldest + 50 :] == held[oldest + 50 :], "those of the oldest message went"


def test_blocks_that_are_said_to_be_in_use_outlive_others():
    with Store(4 * MIB, [], {"default": b"s" * 32}, PEERS) as store:
        store.start()
        old = [header_of(NAMESPACE, key_of(100 + i)) for i in range(100)]
        put(store, old)
        used = [header.key for header in old[20:30]]
        assert store.use(NAMESPACE, [*used, key_of(9_999)]) == 10
        at = 1_000
        while 1 in store.held(NAMESPACE, [header.key for header in old[30:]]):
            put(store, [header_of(NAMESPACE, key_of(at + i)) for i in range(5)])
            at += 5
        assert store.held(NAMESPACE, used) == b"\1" * 10


def test_received_records_of_another_size_evict_old_blocks():
    with Store(4 * MIB, [], {"default": b"s" * 32}, PEERS) as store:
        store.start()
        put(store, [header_of(NAMESPACE, key_of(100 + i)) for i in range(300)])
        large = namespace_of(200_000)
        keys = [key_of(500 + i) for i in range(4)]
        assert put(store, [header_of(large, key) for key in keys]) == [Outcome.OK] * 4
        assert store.held(large, keys) == b"\1" * 4


def test_a_lease_for_a_peer_needs_no_plan_if_blocks_are_in_memory_or_not_held(store, monkeypatch):
    put(store)
    monkeypatch.setattr(store, "planner", None)  # whoever asks it fails
    lent = store.fetch_unverified(NAMESPACE, KEYS, 5)
    assert (len(lent.places), lent.outcome, lent.sources) == (6, Outcome.OK, {"host": 6})
    missed = store.fetch_unverified(NAMESPACE, [key_of(99)], 5)
    assert (missed.places, missed.outcome, missed.sources) == ([], Outcome.MISS, {})
    assert store.release(lent.lease)
    assert store.release(missed.lease)
    assert not store.status().leases


def test_a_record_that_is_in_a_message_twice_takes_one_slot(store):
    assert put(store, [HEADERS[0], HEADERS[1], HEADERS[0]]) == [Outcome.OK] * 3
    assert StoreView(store).used_slots(NAMESPACE) == 2
    used = StoreView(store).used_bytes(0, NAMESPACE.domain)
    assert used == 2 * NAMESPACE.slot_bytes
    lent = store.fetch_unverified(NAMESPACE, KEYS[:2], 5)
    assert [
        is_right(store.record(NAMESPACE, p), NAMESPACE, k)
        for p, k in zip(lent.places, KEYS, strict=False)
    ] == [True] * 2
    store.release(lent.lease)


def test_a_pin_of_a_context_that_is_not_held_creates_no_lease(harness) -> None:
    one = harness()
    assert one.store.pin(one.namespace, one.chain(1, 2).keys, 60.0) == 0
    assert not one.view.leases
