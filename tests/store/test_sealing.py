"""Sealed domains: sealed when it leaves the host, opened on the way back, nothing else believed."""

import time

import pytest

from holdfast.blocks.envelope import SEAL_AES_GCM, SEAL_NONE, read_header, stamp
from holdfast.blocks.key import Chain
from holdfast.blocks.world import World, domain_id
from holdfast.clock import ManualClock
from holdfast.codec.pack import pack, payload
from holdfast.errors import Outcome, RefusedError
from holdfast.limits import RECLAIM_S
from holdfast.store import domains
from holdfast.store.descent import FAR, NEAR
from holdfast.store.keyring import KeyRing
from holdfast.store.store import Store
from holdfast.testing.memory import MemoryTier, SharedMemoryTier
from holdfast.testing.payloads import payload_of

MIB = 1 << 20
PAYLOAD = 20_000
SECRETS = {"acme": b"a" * 32, "globex": b"g" * 32}
FINGERPRINT = b"f" * 16


class House:
    """A store whose blocks have a payload that follows from their key; every read is checked."""

    def __init__(self, tier, ring=None, secrets=SECRETS, nbytes=PAYLOAD):
        self.clock = ManualClock()
        self.tier = tier
        self.store = Store(8 * MIB + 4 * nbytes, [tier], secrets, clock=self.clock)
        self.ring = ring or ring_of(secrets, derives=isinstance(tier, SharedMemoryTier))
        self.store.seal_with(self.ring)
        self.store.start()
        self.nbytes = nbytes

    def world(self, name="acme"):
        return World(FINGERPRINT, self.store.domain(name)[1], self.nbytes, 16)

    def chain(self, name="acme", blocks=6):
        chain = Chain(SECRETS[name], FINGERPRINT, 16)
        chain.extend(range(16 * blocks))
        return chain.keys

    def save(self, name="acme", blocks=6):
        world, keys = self.world(name), self.chain(name, blocks)
        reserved = self.store.reserve(world, keys, FINGERPRINT, 0)
        arena = self.store.arena(world.domain).view
        for key, place in zip(keys, reserved.places, strict=True):
            if place >= 0:
                payload(arena[place:], self.nbytes)[:] = payload_of(key, self.nbytes)
        saved = self.store.commit(reserved.ticket)
        self.settle()
        return saved

    def settle(self):
        """Wait until everything is written below."""
        while True:
            with self.store.states.lock:
                if not self.store.states.unwritten():
                    return
            time.sleep(0.001)

    def leave(self, name="acme"):
        """Leave copies below the host only."""
        domains.leave_memory(self.store, self.world(name).domain)

    def look(self, name="acme", blocks=6):
        return self.store.look(self.world(name), self.chain(name, blocks)).blocks

    def fetch(self, name="acme", blocks=6):
        world, keys = self.world(name), self.chain(name, blocks)
        fetched = self.store.fetch(world, keys, 5)
        arena = self.store.arena(world.domain).view
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


def test_what_leaves_the_host_is_sealed_and_comes_back(house):
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


def test_a_domain_that_is_not_sealed_stays_as_it_was(house):
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
    ("tier", "abreast"),
    [(lambda: MemoryTier(64 * MIB), NEAR), (lambda: SharedMemoryTier({}), FAR)],
)
def test_records_larger_than_the_staging_memory_go_down_too(house, tier, abreast):
    one = house(tier(), nbytes=abreast.group_bytes_max + 5)
    assert one.save(blocks=2) == 2
    one.leave()
    assert one.fetch(blocks=2) == (2, Outcome.OK)


@pytest.mark.parametrize("at", [33, 49, 65, 85, 100, 113, 125, 128, 5_000, 128 + PAYLOAD + 3])
def test_no_damage_is_served_and_the_next_save_repairs_it(house, at):
    one = house()
    one.save()
    one.leave()
    damage(one.tier, at)
    assert one.fetch()[0] == 0
    assert one.save() >= 1
    one.leave()
    assert one.fetch()[0] >= 1


def test_damage_in_the_host_is_not_sealed_and_does_not_pass_for_held(house):
    one = house()
    one.store.write_behind = False
    one.save()
    view = one.store.arena(one.world().domain).view
    places = [place for place in one.store.states.index.places[0] if place >= 0]
    view[places[0] + 700] ^= 1
    with one.store.states.lock:
        for key in one.chain():
            one.store.states.line_up(one.store.states.index.find(key))
    one.store.ladder.wake()
    one.settle()
    assert len(below(one.tier)) == 5
    assert one.save() == 1, "the next save replaces it"


def test_a_plain_record_is_not_believed_in_a_sealed_domain(house):
    one = house()
    one.save()
    one.leave()
    for place, record in one.tier._records.items():
        forged = memoryview(bytearray(record))
        header = read_header(forged)[0]
        forged[128:160] = b"forged " * 4 + b"text"
        pack(forged, header._replace(seal=SEAL_NONE, epoch=0, nonce=bytes(12), key_id=bytes(4)))
        one.tier._records[place] = bytes(forged)
    assert one.fetch() == (0, Outcome.CORRUPT)


def test_a_sealed_payload_in_an_unknown_code_is_not_believed(house):
    one = house()
    one.save()
    one.leave()
    key = one.ring.current(one.world().domain)
    for place, record in one.tier._records.items():
        plain, coded = memoryview(bytearray(record)), memoryview(bytearray(record))
        assert key.open(plain) is Outcome.OK
        pack(plain, read_header(plain)[0]._replace(codec=1))
        with pytest.MonkeyPatch.context() as trusting:
            trusting.setattr("holdfast.codec.seal.matches", lambda *_: True)
            assert key.sealer(plain, b"n" * 12).seal(plain, coded) is Outcome.OK
        one.tier._records[place] = bytes(coded)
    assert one.fetch() == (0, Outcome.CORRUPT)


def test_records_of_one_domain_put_in_the_place_of_anothers_are_misses(house):
    one = house()
    one.save("acme")
    one.save("globex")
    one.leave("acme")
    one.leave("globex")
    records = one.tier._records
    for place, other in zip(list(records), list(reversed(list(records.values()))), strict=True):
        records[place] = other
    assert one.fetch("acme")[0] == one.fetch("globex")[0] == 0


def test_a_store_with_the_same_ring_reads_what_another_sealed(house):
    far = {}
    one, other = house(SharedMemoryTier(far)), house(SharedMemoryTier(far))
    one.save()
    assert other.look() == 6
    assert other.fetch() == (6, Outcome.OK)


def test_a_store_with_another_ring_has_a_miss_and_the_block_is_replaced(house, tmp_path):
    far = {}
    one = house(SharedMemoryTier(far))
    other = house(SharedMemoryTier(far), ring=ring_of(SECRETS, tmp_path / "ring"))
    one.save()
    assert other.look() == 6
    assert other.fetch() == (0, Outcome.MISS)
    assert other.save() == 6
    other.leave()
    assert other.fetch() == (6, Outcome.OK)


def test_what_another_host_damaged_is_discarded_there(house):
    far = {}
    one, other = house(SharedMemoryTier(far)), house(SharedMemoryTier(far))
    one.save()
    for key, (place, record) in far.items():
        far[key] = place, record[:200] + bytes([record[200] ^ 1]) + record[201:]
    other.look()
    assert other.fetch() == (0, Outcome.CORRUPT)
    other.store.ladder.close()
    assert far == {}


def test_epochs_live_side_by_side_until_they_are_retired(house, tmp_path):
    one = house(ring=ring_of(SECRETS, tmp_path / "ring"))
    one.save(blocks=3)
    assert one.ring.rotate("acme") == 2
    one.save(blocks=6)
    assert {read_header(record)[0].epoch for record in below(one.tier)} == {1, 2}
    one.leave()
    assert one.fetch() == (6, Outcome.OK)
    one.leave()
    assert one.ring.retire("acme") == 1
    assert one.fetch() == (0, Outcome.MISS)
    assert one.store.held(one.world(), one.chain()) == b"\0\0\0\1\1\1"


def test_an_erased_domain_is_gone_everywhere_and_the_others_are_not(house, tmp_path):
    far = {}
    ring = tmp_path / "ring"
    one = house(SharedMemoryTier(far), ring=ring_of(SECRETS, ring))
    one.save("acme")
    one.save("globex")
    image = dict(far)
    assert one.store.erase("acme") == {
        "domain": "acme",
        "epochs": 1,
        "blocks": 6,
        "everywhere": True,
    }
    assert one.store.held(one.world(), one.chain()) == bytes(6)
    assert one.fetch() == (0, Outcome.MISS)
    assert one.store.status()["tiers"][0]["used_bytes"] == 0
    assert one.fetch("globex") == (6, Outcome.OK)
    one.store.close()
    far.clear()
    far.update(image)  # the disk comes back from a backup
    again = house(SharedMemoryTier(far), ring=ring_of(SECRETS, ring))
    assert again.look() == 6
    assert again.fetch() == (0, Outcome.MISS)
    assert again.look("globex") == 6
    assert again.fetch("globex") == (6, Outcome.OK)
    assert again.save() == 6  # the domain itself goes on
    again.leave()
    assert again.fetch() == (6, Outcome.OK)


def test_an_erased_domains_memory_is_cleared(house):
    one = house()
    one.save()
    arena = one.store.arena(one.world().domain).view
    some = bytes(payload_of(one.chain()[0], PAYLOAD))[:64]
    assert some in bytes(arena)
    one.store.erase("acme")
    assert some not in bytes(arena)


def test_a_lease_ends_with_its_domain_and_a_ticket_publishes_nothing(house):
    one = house()
    one.save()
    lease = one.store.fetch(one.world(), one.chain(), 5).lease
    reserved = one.store.reserve(one.world(), [b"k" * 16], FINGERPRINT, 0)
    one.store.erase("acme")
    assert not one.store.release(lease)
    assert one.store.commit(reserved.ticket) == 0
    one.clock.advance(RECLAIM_S + 1)
    one.store.keep_house()
    assert one.store.status()["tiers"][0]["used_bytes"] == 0


def test_a_commit_under_way_does_not_outlive_the_domain(house):
    one = house()
    reserved = one.store.reserve(one.world(), one.chain(), FINGERPRINT, 0)
    ticket = one.store.states.tickets[reserved.ticket]
    one.store.erase("acme")
    one.store.states.tickets[reserved.ticket] = ticket  # as if it had been taken before
    assert one.store.commit(reserved.ticket) == 0


def test_survivors_that_can_not_be_opened_are_freed(house, tmp_path):
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


def test_where_nothing_is_sealed_nothing_can_be_erased(house):
    with Store(4 * MIB, [], SECRETS) as store:
        store.start()
        with pytest.raises(RefusedError, match="not sealed"):
            store.erase("acme")


def test_records_for_others_are_kept_as_they_come_and_ours_are_opened(house):
    """A target without the key keeps ciphertext; a node with it checks at once."""
    one = house(ring=ring_of(SECRETS, derives=True))
    one.save()
    records = [memoryview(bytearray(record)) for record in below(one.tier)]
    for own in ({}, {"acme": SECRETS["acme"]}):
        secrets = {"globex": SECRETS["globex"], **own}
        target = house(secrets=secrets, ring=ring_of(secrets, derives=True))
        target.store.take_foreign()
        for change, outcome in ((0, Outcome.OK), (1, Outcome.CORRUPT if own else Outcome.OK)):
            target.store.forget(one.world(), one.chain())
            berths = target.store.berth([read_header(record)[0] for record in records])
            for berth, record in zip(berths, records, strict=True):
                berth.slot[:] = record
                berth.slot[300] ^= change
            assert target.store.adopt(berths) == [outcome] * 6
        target.store.forget(one.world(), one.chain())


def test_a_record_that_goes_to_another_host_is_sealed(house):
    one = house()
    one.save()
    fetched = one.store.lend(one.world(), one.chain(), 5)
    sent = one.store.outgoing(one.world(), fetched.lease, fetched.places)
    key = one.ring.current(one.world().domain)
    assert len(sent) == 6
    for record, name in zip(sent, one.chain(), strict=True):
        assert bytes(payload_of(name, PAYLOAD))[:64] not in bytes(record)
        assert key.open(record) is Outcome.OK
    one.store.release(fetched.lease)
