"""Sealed domains: sealed when it leaves the host, opened on the way back, nothing else believed."""

import pytest

from holdfast.blocks.envelope import SEAL_AES_GCM, SEAL_NONE, read_header, stamp
from holdfast.blocks.key import Chain
from holdfast.blocks.namespace import Namespace, domain_id
from holdfast.clock import ManualClock
from holdfast.codec.pack import pack, payload
from holdfast.errors import Outcome, RefusedError
from holdfast.keys.keyring import KeyRing
from holdfast.limits import RECLAIM_S
from holdfast.store import domains, save
from holdfast.store.options import StoreOptions
from holdfast.store.remote_lookups import FAILED_S
from holdfast.store.store import Store
from holdfast.store.write_batches import LOCAL_SEAL, SHARED_SEAL
from holdfast.testing.memory import MemoryTier, SharedMemoryTier
from holdfast.testing.payloads import payload_of
from holdfast.testing.store_control import write_all_through
from holdfast.testing.store_view import StoreView

MIB = 1 << 20
PAYLOAD = 20_000
SECRETS = {"acme": b"a" * 32, "globex": b"g" * 32}
FINGERPRINT = b"f" * 16


class House:
    """A store whose blocks have a payload that follows from their key; every read is checked."""

    def __init__(self, tier, ring=None, secrets=SECRETS, nbytes=PAYLOAD, **options):
        self.clock = ManualClock()
        self.tier = tier
        self.ring = ring or ring_of(secrets, derives=isinstance(tier, SharedMemoryTier))
        chosen = StoreOptions(ring=self.ring, clock=self.clock, **options)
        self.store = Store(8 * MIB + 4 * nbytes, [tier], secrets, chosen)
        self.store.start()
        self.nbytes = nbytes

    def namespace(self, name="acme"):
        return Namespace(FINGERPRINT, self.store.domain(name)[1], self.nbytes, 16)

    def chain(self, name="acme", blocks=6):
        chain = Chain(SECRETS[name], FINGERPRINT, 16)
        chain.extend(range(16 * blocks))
        return chain.keys

    def save(self, name="acme", blocks=6):
        namespace, keys = self.namespace(name), self.chain(name, blocks)
        reserved = self.store.reserve(namespace, keys, FINGERPRINT, 0)
        arena = self.store.arena(namespace.domain).view
        for key, place in zip(keys, reserved.places, strict=True):
            if place >= 0:
                payload(arena[place:], self.nbytes)[:] = payload_of(key, self.nbytes)
        saved = self.store.commit(reserved.ticket)
        self.flush()
        return saved

    def flush(self):
        """Wait until everything is written below."""
        StoreView(self.store).wait_until_written()

    def leave(self, name="acme"):
        """Leave copies below the host only."""
        domains.leave_memory(self.store, self.namespace(name).domain)

    def look(self, name="acme", blocks=6):
        return self.store.look(self.namespace(name), self.chain(name, blocks), 60.0).blocks

    def fetch(self, name="acme", blocks=6):
        namespace, keys = self.namespace(name), self.chain(name, blocks)
        fetched = self.store.fetch(namespace, keys, 5)
        arena = self.store.arena(namespace.domain).view
        for key, place in zip(keys, fetched.places, strict=False):
            found = bytes(payload(arena[place:], self.nbytes))
            assert found == bytes(payload_of(key, self.nbytes))
        assert self.store.release(fetched.lease)
        return len(fetched.places), fetched.outcome


def ring_of(secrets, path=None, *, derives=False):
    ring = KeyRing(path, derives=derives)
    for name, secret in secrets.items():
        ring.enrol(name, secret)
    return ring


@pytest.fixture
def house():
    made = []

    def make(tier=None, **more):
        made.append(House(tier or MemoryTier(32 * MIB), **more))
        return made[-1]

    yield make
    for each in made:
        each.store.close()


def below(tier):
    """Every record that a tier holds, as it lies there."""
    return [bytes(r[1] if isinstance(r, tuple) else r) for r in tier._records.values()]


def damage(tier, at):
    for place, record in tier._records.items():
        changed = bytearray(record)
        changed[at] ^= 0x40
        stamp(memoryview(changed), 0)
        tier._records[place] = bytes(changed)


def test_blocks_are_sealed_when_they_leave_the_host_and_opened_on_return(house):
    one = house()
    assert one.save() == 6
    records = below(one.tier)
    assert len(records) == 6
    for key in one.chain():
        assert not any(bytes(payload_of(key, PAYLOAD))[:64] in record for record in records)
    assert {read_header(record)[0].seal for record in records} == {SEAL_AES_GCM}
    assert one.fetch() == (6, Outcome.OK)
    one.leave()
    assert one.fetch() == (6, Outcome.OK)
    assert one.fetch() == (6, Outcome.OK)  # and lies in the arena as any other block


def test_no_nonce_is_used_twice(house):
    one = house()
    for blocks in range(1, 9):
        one.save(blocks=blocks)
    nonces = [read_header(record)[0].nonce for record in below(one.tier)]
    assert len(set(nonces)) == len(nonces) == 8


def test_an_unsealed_domain_beside_a_sealed_one_is_written_unsealed(house):
    one = house(ring=ring_of({"globex": SECRETS["globex"]}))
    one.save("acme")
    one.save("globex")
    seals = {
        read_header(record)[0].domain: read_header(record)[0].seal for record in below(one.tier)
    }
    assert seals == {
        domain_id(SECRETS["acme"]): SEAL_NONE,
        domain_id(SECRETS["globex"]): SEAL_AES_GCM,
    }
    one.leave("acme")
    one.leave("globex")
    assert one.fetch("acme") == one.fetch("globex") == (6, Outcome.OK)


@pytest.mark.parametrize(
    ("tier", "parallel"),
    [(lambda: MemoryTier(64 * MIB), LOCAL_SEAL), (lambda: SharedMemoryTier({}), SHARED_SEAL)],
)
def test_records_larger_than_the_staging_memory_are_written(house, tier, parallel):
    one = house(tier(), nbytes=parallel.group_bytes_max + 5)
    assert one.save(blocks=2) == 2
    one.leave()
    assert one.fetch(blocks=2) == (2, Outcome.OK)


@pytest.mark.parametrize("at", [33, 49, 65, 85, 100, 113, 125, 128, 5_000, 128 + PAYLOAD + 3])
def test_a_damaged_record_is_not_served_and_the_next_save_repairs_it(house, at):
    one = house()
    one.save()
    one.leave()
    damage(one.tier, at)
    assert one.fetch()[0] == 0
    assert one.save() >= 1
    one.leave()
    assert one.fetch()[0] >= 1


def test_a_block_damaged_in_memory_is_not_sealed_and_does_not_count_as_held(house):
    one = house(writes_behind=False)
    one.save()
    StoreView(one.store).record(one.namespace(), one.chain()[0])[700] ^= 1
    write_all_through(one.store)
    one.flush()
    assert len(below(one.tier)) == 5
    assert one.save() == 1, "the next save replaces it"


def test_an_unsealed_record_is_unreadable_in_a_sealed_domain(house):
    one = house()
    one.save()
    one.leave()
    for place, record in one.tier._records.items():
        forged = memoryview(bytearray(record))
        header = read_header(forged)[0]
        forged[128:160] = b"forged " * 4 + b"text"
        pack(forged, header._replace(seal=SEAL_NONE, epoch=0, nonce=bytes(12), key_id=bytes(4)))
        one.tier._records[place] = bytes(forged)
    assert one.fetch() == (0, Outcome.UNREADABLE)


def test_a_sealed_payload_with_an_unknown_codec_is_corrupt(house):
    one = house()
    one.save()
    one.leave()
    key = one.ring.current(one.namespace().domain)
    for place, record in one.tier._records.items():
        plain, coded = memoryview(bytearray(record)), memoryview(bytearray(record))
        assert key.open(plain) is Outcome.OK
        pack(plain, read_header(plain)[0]._replace(codec=1))
        with pytest.MonkeyPatch.context() as trusting:
            trusting.setattr("holdfast.codec.seal.matches", lambda *_: True)
            assert key.sealer(plain, b"n" * 12).seal(plain, coded) is Outcome.OK
        one.tier._records[place] = bytes(coded)
    assert one.fetch() == (0, Outcome.CORRUPT)


def test_a_record_in_the_place_of_another_domains_record_is_a_miss(house):
    one = house()
    one.save("acme")
    one.save("globex")
    one.leave("acme")
    one.leave("globex")
    records = one.tier._records
    for place, other in zip(list(records), list(reversed(list(records.values()))), strict=True):
        records[place] = other
    assert one.fetch("acme")[0] == one.fetch("globex")[0] == 0


def test_a_block_sealed_by_one_store_is_read_by_another_with_the_same_key_ring(house):
    far = {}
    one, other = house(SharedMemoryTier(far)), house(SharedMemoryTier(far))
    one.save()
    assert other.look() == 6
    assert other.fetch() == (6, Outcome.OK)


def test_a_store_with_another_key_ring_has_misses_and_changes_no_record(house, tmp_path, caplog):
    far = {}
    one = house(SharedMemoryTier(far))
    other = house(SharedMemoryTier(far), ring=ring_of(SECRETS, tmp_path / "ring"))
    one.save()
    before = dict(far)
    assert other.look() == 6
    assert other.fetch() == (0, Outcome.UNREADABLE)
    assert other.look() == 0, "what was unreadable is not planned with again"
    assert other.save() == 6
    other.leave()
    assert other.fetch()[0] == 0
    StoreView(other.store).wait_until_written()
    assert far == before
    one.leave()
    assert one.fetch() == (6, Outcome.OK)
    domains = {entry.domain: entry for entry in other.store.status().domains}
    assert domains["acme"].unreadable == 6
    [line] = [r.getMessage() for r in caplog.records if "are misses here" in r.getMessage()]
    assert "'acme'" in line
    assert "the same `keyring` file" in line


def test_the_key_ring_is_read_once_for_many_records_with_an_unknown_key(house, monkeypatch):
    far, readings = {}, []
    one, other = house(SharedMemoryTier(far)), house(SharedMemoryTier(far), ring=ring_of(SECRETS))
    watch = other.store.table.sealing.watch

    def read_at_once():
        watch.read_at = other.clock.now()
        readings.append(watch.read_at)

    monkeypatch.setattr(watch, "look_briefly", read_at_once)
    one.save()
    for _ in range(2):
        assert other.look() == 6
        assert other.fetch() == (0, Outcome.UNREADABLE)
        other.clock.advance(FAILED_S + 1)
    assert len(readings) == 2


def test_an_unreadable_remote_record_is_looked_up_again_after_a_pause(house, tmp_path):
    far = {}
    one = house(SharedMemoryTier(far))
    other = house(SharedMemoryTier(far), ring=ring_of(SECRETS, tmp_path / "ring"))
    one.save()
    other.look()
    other.fetch()
    assert other.look() == 0
    other.clock.advance(FAILED_S + 1)
    assert other.look() == 6


def test_a_damaged_shared_record_is_replaced_by_the_next_save_with_the_right_key(house, tmp_path):
    far = {}
    one, other = house(SharedMemoryTier(far)), house(SharedMemoryTier(far))
    third = house(SharedMemoryTier(far), ring=ring_of(SECRETS, tmp_path / "ring"))
    one.save()
    for key, (place, record) in far.items():
        far[key] = place, record[:200] + bytes([record[200] ^ 1]) + record[201:]
    damaged = dict(far)
    other.look()
    assert other.fetch() == (0, Outcome.CORRUPT)
    third.look()
    third.fetch()
    assert third.save() == 6
    assert far == damaged, "nothing proves the damage, and another ring replaces nothing"
    assert other.save() == 6
    other.leave()
    assert other.fetch() == (6, Outcome.OK)


def test_a_damaged_header_is_deleted_by_a_reader_of_any_ring(house):
    far = {}
    one, other = house(SharedMemoryTier(far)), house(SharedMemoryTier(far))
    one.save()
    for key, (place, record) in far.items():
        far[key] = place, record[:40] + bytes([record[40] ^ 1]) + record[41:]
    other.look()
    assert other.fetch() == (0, Outcome.CORRUPT)
    StoreView(other.store).wait_until_written()
    assert far == {}


def test_blocks_of_several_epochs_are_readable_until_their_epoch_is_retired(house, tmp_path):
    one = house(ring=ring_of(SECRETS, tmp_path / "ring"))
    one.save(blocks=3)
    assert one.ring.rotate("acme") == 2
    one.save(blocks=6)
    assert {read_header(record)[0].epoch for record in below(one.tier)} == {1, 2}
    one.leave()
    assert one.fetch() == (6, Outcome.OK)
    one.leave()
    assert one.ring.retire("acme") == 1
    assert one.fetch() == (0, Outcome.UNREADABLE)
    assert one.store.held(one.namespace(), one.chain()) == b"\0\0\0\1\1\1"


def test_an_erased_domain_is_gone_everywhere_and_the_others_are_not(house, tmp_path):
    far = {}
    ring = tmp_path / "ring"
    one = house(SharedMemoryTier(far), ring=ring_of(SECRETS, ring))
    one.save("acme")
    one.save("globex")
    image = dict(far)
    erased = one.store.erase("acme")
    assert (erased["domain"], erased["epochs"], erased["blocks"]) == ("acme", 1, 6)
    assert {name: tier["blocks"] for name, tier in erased["tiers"].items()} == {
        "host": 6,
        "shared memory": 6,
    }
    assert erased["everywhere"]
    assert one.store.held(one.namespace(), one.chain()) == bytes(6)
    assert one.fetch() == (0, Outcome.MISS)
    assert one.store.status().tiers[0].used_bytes == 0
    assert one.fetch("globex") == (6, Outcome.OK)
    one.store.close()
    far.clear()
    far.update(image)  # the disk comes back from a backup
    again = house(SharedMemoryTier(far), ring=ring_of(SECRETS, ring))
    assert again.look() == 6
    assert again.fetch() == (0, Outcome.UNREADABLE)
    assert again.look("globex") == 6
    assert again.fetch("globex") == (6, Outcome.OK)
    assert again.save() == 6  # the domain itself goes on
    assert again.fetch() == (6, Outcome.OK)


def test_an_erased_domains_memory_is_cleared(house):
    one = house()
    one.save()
    arena = one.store.arena(one.namespace().domain).view
    some = bytes(payload_of(one.chain()[0], PAYLOAD))[:64]
    assert some in bytes(arena)
    one.store.erase("acme")
    assert some not in bytes(arena)


def test_an_erasure_ends_leases_and_a_later_commit_publishes_nothing(house):
    one = house()
    one.save()
    lease = one.store.fetch(one.namespace(), one.chain(), 5).lease
    reserved = one.store.reserve(one.namespace(), [b"k" * 16], FINGERPRINT, 0)
    one.store.erase("acme")
    assert not one.store.release(lease)
    assert one.store.commit(reserved.ticket) == 0
    one.clock.advance(RECLAIM_S + 1)
    one.store.housekeep()
    assert one.store.status().tiers[0].used_bytes == 0


def test_a_commit_in_progress_during_an_erasure_publishes_nothing(house, monkeypatch):
    one = house()
    reserved = one.store.reserve(one.namespace(), one.chain(), FINGERPRINT, 0)

    def erased_once_it_is_packed(point):
        if point == "commit_packed":
            one.store.erase("acme")

    monkeypatch.setattr(save, "reach", erased_once_it_is_packed)
    assert one.store.commit(reserved.ticket) == 0


def test_recovered_records_that_cannot_be_opened_are_freed(house, tmp_path):
    records = {}
    path = tmp_path / "ring"
    one = house(MemoryTier(32 * MIB, records), ring=ring_of(SECRETS, path))
    one.save("acme")
    one.save("globex")
    one.store.close()
    kept = dict(records)
    ring_of(SECRETS, path).erase("acme")
    again = house(MemoryTier(32 * MIB, dict(kept)), ring=ring_of(SECRETS, path))
    assert again.store.recovery.wait(60)
    assert again.store.recovery.blocks == 6
    assert len(below(again.tier)) == 6
    assert again.fetch("acme")[0] == 0
    assert again.fetch("globex") == (6, Outcome.OK)


def test_an_erasure_is_refused_if_the_domain_is_not_sealed(house):
    with Store(4 * MIB, [], SECRETS) as store:
        store.start()
        with pytest.raises(RefusedError, match="not sealed"):
            store.erase("acme")


def test_a_target_verifies_received_records_of_its_own_domains_only(house):
    """A target without the key keeps ciphertext; a node with it checks at once."""
    one = house(ring=ring_of(SECRETS, derives=True))
    one.save()
    records = [memoryview(bytearray(record)) for record in below(one.tier)]
    for own in ({}, {"acme": SECRETS["acme"]}):
        secrets = {"globex": SECRETS["globex"], **own}
        ring = ring_of(secrets, derives=True)
        target = house(secrets=secrets, ring=ring, serves_peers=True)
        for change, outcome in ((0, Outcome.OK), (1, Outcome.CORRUPT if own else Outcome.OK)):
            target.store.forget(one.namespace(), one.chain())
            berths = target.store.receive_slots([read_header(record)[0] for record in records])
            for receive_slots, record in zip(berths, records, strict=True):
                receive_slots.slot[:] = record
                receive_slots.slot[300] ^= change
            assert target.store.publish_received(berths) == [outcome] * 6
        target.store.forget(one.namespace(), one.chain())


def test_a_record_that_goes_to_another_host_is_sealed(house):
    one = house()
    one.save()
    fetched = one.store.fetch_unverified(one.namespace(), one.chain(), 5)
    sent = one.store.outgoing(one.namespace(), fetched.lease, fetched.places)
    key = one.ring.current(one.namespace().domain)
    assert len(sent) == 6
    for record, name in zip(sent, one.chain(), strict=True):
        assert bytes(payload_of(name, PAYLOAD))[:64] not in bytes(record)
        assert key.open(record) is Outcome.OK
    one.store.release(fetched.lease)
