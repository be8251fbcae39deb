"""A store whose lower tier encodes records: fewer bytes below, the same bytes above."""

import errno
import hashlib
import threading

import numpy as np
import pytest

from holdfast.blocks.envelope import CODEC_NONE, Header, header_of_record, read_header, write_header
from holdfast.blocks.key import Chain
from holdfast.blocks.namespace import Namespace, domain_id
from holdfast.clock import ManualClock
from holdfast.codec.codec import codec_named, register, unregister
from holdfast.codec.pack import pack, payload
from holdfast.errors import FormatError, Outcome
from holdfast.fairness.shares import Quota
from holdfast.keys.keyring import KeyRing
from holdfast.policy.admit import AlwaysAdmit
from holdfast.store.options import StoreOptions, TierRules
from holdfast.store.probe_tiers import BLOCKS, probe_tier
from holdfast.store.store import Store
from holdfast.testing.extents import MemoryExtents, tier_on
from holdfast.testing.memory import MemoryTier, SharedMemoryTier
from holdfast.testing.store_control import leave_all, write_all_through
from holdfast.testing.store_view import StoreView
from holdfast.tiers.disk.region import SECTOR

MIB = 1 << 20
PAYLOAD = 60_000
SECRET = b"s" * 32
FINGERPRINT = b"f" * 16
PLANES = {1: TierRules(codec="planes")}
RAW = {1: TierRules(codec="off")}


def bytes_of(key):
    """A payload that follows from its key, and whose high bytes say little."""
    low = np.frombuffer(hashlib.shake_128(key).digest(PAYLOAD // 2), np.uint8)
    return np.stack([low, (low & 3) | 0x3C], axis=1).tobytes()


class House:
    """A store over one lower tier; every byte that it returns is checked."""

    def __init__(self, tier, rules=PLANES, host_bytes=4 * MIB, sealed=False, **options):
        self.clock, self.tier = ManualClock(), tier
        if sealed:
            options["ring"] = KeyRing(None, derives=True)
            options["ring"].enrol("default", SECRET)
        chosen = StoreOptions(clock=self.clock, rules=rules, **options)
        self.store = Store(host_bytes, [tier], {"default": SECRET}, chosen)
        self.view = StoreView(self.store)
        self.store.start()
        domain = self.store.domain("default")[1]
        self.namespace = Namespace(FINGERPRINT, domain, PAYLOAD, 16)
        self.store.note_element_bytes(self.namespace, 2)

    def keys(self, blocks=6, seed=0):
        chain = Chain(SECRET, FINGERPRINT, 16)
        chain.extend(range(1000 * seed, 1000 * seed + 16 * blocks))
        return chain.keys

    def save(self, blocks=6, seed=0):
        keys = self.keys(blocks, seed)
        reserved = self.store.reserve(self.namespace, keys, FINGERPRINT, 0)
        arena = self.store.arena(self.namespace.domain).view
        for key, place in zip(keys, reserved.places, strict=True):
            if place >= 0:
                payload(arena[place:], PAYLOAD)[:] = bytes_of(key)
        saved = self.store.commit(reserved.ticket)
        self.flush()
        return saved

    def flush(self):
        self.view.wait_until_written()

    def leave(self):
        leave_all(self.store)

    def fetch(self, blocks=6, seed=0):
        keys = self.keys(blocks, seed)
        self.store.look(self.namespace, keys, 60.0)
        fetched = self.store.fetch(self.namespace, keys, 20.0)
        arena = self.store.arena(self.namespace.domain).view
        for key, place in zip(keys, fetched.places, strict=False):
            record = arena[place : place + self.namespace.slot_bytes]
            assert read_header(record)[0].codec == CODEC_NONE
            assert bytes(payload(record, PAYLOAD)) == bytes_of(key)
        assert self.store.release(fetched.lease)
        return len(fetched.places), fetched.outcome

    def used_bytes(self, tier=1):
        return self.view.used_bytes(tier, self.namespace.domain)


@pytest.fixture
def house(monkeypatch):
    monkeypatch.setattr("holdfast.store.store._HOUSEKEEPING_S", 3_600.0)
    made = []

    def make(*args, **named):
        made.append(House(*args, **named))
        return made[-1]

    yield make
    for one in made:
        one.store.close()


@pytest.mark.parametrize("sealed", [False, True])
def test_encoded_blocks_take_fewer_bytes_below_and_come_back_unchanged(house, sealed):
    one = house(MemoryTier(16 * MIB), sealed=sealed)
    assert one.save() == 6
    raw = 6 * one.namespace.slot_bytes
    assert one.used_bytes() == one.tier.usage().used_bytes < 0.8 * raw
    assert one.used_bytes(tier=0) == raw
    one.leave()
    assert one.fetch() == (6, Outcome.OK)
    assert one.used_bytes() == one.tier.usage().used_bytes
    [entry] = one.store.listing()
    assert entry["tiers"]["memory"] == {
        "blocks": 6, "bytes": one.used_bytes(), "raw_bytes": raw
    }  # fmt: skip


@pytest.mark.parametrize("sealed", [False, True])
def test_encoded_blocks_are_recovered_with_their_stored_size(house, sealed):
    medium = MemoryExtents.formatted(64 * SECTOR, 16)
    one = house(tier_on(medium), sealed=sealed)
    one.save(20)
    used = one.used_bytes()
    again = house(tier_on(MemoryExtents(medium.image)), sealed=sealed)
    again.store.recovery.wait()
    assert again.store.status().recovered_blocks == 20
    assert again.used_bytes() == used < 0.8 * 20 * one.namespace.slot_bytes
    assert again.fetch(20) == (20, Outcome.OK)


def test_a_disk_holds_raw_and_encoded_records_of_one_namespace(house):
    records = {}
    house(MemoryTier(16 * MIB, records), RAW).save(4)
    raw = len(records)
    both = house(MemoryTier(16 * MIB, records), PLANES)
    both.store.recovery.wait()
    both.save(4, seed=1)
    both.leave()
    assert both.fetch(4) == both.fetch(4, seed=1) == (4, Outcome.OK)
    assert len(records) == 2 * raw
    assert len({len(record) for record in records.values()}) > 1


def test_a_store_without_a_codec_reads_what_one_with_a_codec_wrote(house):
    records = {}
    house(MemoryTier(16 * MIB, records), PLANES).save()
    later = house(MemoryTier(16 * MIB, records), RAW)
    later.store.recovery.wait()
    assert later.fetch() == (6, Outcome.OK)


@pytest.mark.parametrize("sealed", [False, True])
def test_a_record_of_a_shared_tier_is_decoded_although_its_size_was_not_known(house, sealed):
    records = {}
    one = house(SharedMemoryTier(records), sealed=sealed)
    one.save()
    assert max(len(record) for _, record in records.values()) < one.namespace.slot_bytes
    two = house(SharedMemoryTier(records), sealed=sealed)
    assert two.fetch() == (6, Outcome.OK)
    assert two.used_bytes() == sum(len(record) for _, record in records.values())


def test_the_estimate_of_a_probe_includes_the_time_of_decoding(house, monkeypatch):
    one = house(MemoryTier(16 * MIB))
    planes = type(codec_named("planes"))
    decode = planes.decode

    def slowly(self, stored, into):
        one.clock.advance(1)
        decode(self, stored, into)

    monkeypatch.setattr(planes, "decode", slowly)
    one.save(BLOCKS)
    probe_tier(one.store, 1)
    estimate = one.store.estimates.estimates(one.namespace.domain)[1]
    assert estimate.seconds(BLOCKS * one.namespace.slot_bytes) > BLOCKS / 2
    assert one.store.status().codecs[0].decoded == BLOCKS


def test_a_quota_counts_stored_bytes(house):
    size = Namespace(FINGERPRINT, b"", PAYLOAD, 16).slot_bytes
    quotas = {"default": {1: Quota(most_bytes=6 * size)}}
    raw = house(MemoryTier(16 * MIB), RAW, quotas=quotas)
    raw.save(12)
    encoded = house(MemoryTier(16 * MIB), PLANES, quotas=quotas)
    encoded.save(12)
    assert raw.tier.usage().records == 6
    assert encoded.tier.usage().records > 7
    assert encoded.used_bytes() <= 6 * size


class Noting(AlwaysAdmit):
    """Takes everything, and notes the sizes that it is asked about."""

    def __init__(self):
        self.sizes = []

    def allows(self, block, now_s):
        self.sizes.append(block.nbytes)
        return True


def test_a_write_budget_counts_the_size_that_records_of_the_model_had_before(house):
    budget = Noting()
    domain = domain_id(SECRET)
    rules = {1: TierRules(codec="planes", budgets={domain: budget})}
    one = house(MemoryTier(16 * MIB), rules)
    one.save()
    one.save(seed=1)
    size = one.namespace.slot_bytes
    assert budget.sizes[:6] == [size] * 6
    assert max(budget.sizes[6:]) < 0.8 * size


# Faults.


class FillingExtents(MemoryExtents):
    """A medium that runs full in the middle of a record."""

    full = False

    def write(self, offset, views):
        if self.full:
            super().write(offset, [view[: len(view) // 2 // SECTOR * SECTOR] for view in views])
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(offset, views)


@pytest.mark.parametrize("sealed", [False, True])
def test_a_medium_that_runs_full_in_a_shorter_record_loses_that_record_only(house, sealed):
    medium = FillingExtents(MemoryExtents.formatted(64 * SECTOR, 16).image)
    one = house(tier_on(medium), sealed=sealed)
    one.save(6)
    used = one.used_bytes()
    medium.full = True
    one.save(3, seed=1)
    assert one.used_bytes() == used
    medium.full = False
    again = house(tier_on(MemoryExtents(medium.image)), sealed=sealed)
    again.store.recovery.wait()
    assert again.fetch(6) == (6, Outcome.OK)
    assert again.fetch(3, seed=1) == (0, Outcome.MISS)
    assert again.used_bytes() == used


def forge(records, **fields):
    """Give every record other values in its header, and a tag that is right for them."""
    for place, record in records.items():
        forged = memoryview(bytearray(record))
        header = read_header(forged)[0]._replace(**fields)
        if header.stored_bytes <= len(forged):
            pack(forged, header)
        else:
            write_header(forged, header)
        records[place] = bytes(forged)


@pytest.mark.parametrize(
    ("fields", "outcome"),
    [
        pytest.param({"raw_bytes": PAYLOAD + 1}, Outcome.CORRUPT, id="raw length"),
        pytest.param({"raw_bytes": 2**32 - 1}, Outcome.CORRUPT, id="a bomb of 4 GB"),
        pytest.param({"payload_bytes": 1000}, Outcome.CORRUPT, id="stored length too short"),
        pytest.param({"payload_bytes": PAYLOAD}, Outcome.CORRUPT, id="as long as the raw one"),
        pytest.param({"codec": 0}, Outcome.CORRUPT, id="said to be raw"),
        pytest.param({"codec": 99}, Outcome.UNREADABLE, id="a codec of a later build"),
    ],
)
def test_an_encoded_record_with_a_forged_header_is_a_miss(house, fields, outcome):
    one = house(MemoryTier(16 * MIB))
    one.save()
    one.leave()
    forge(one.tier._records, **fields)
    found, told = one.fetch()
    assert found == 0
    assert told in {outcome, Outcome.MISS}
    assert one.save() == 6, "the next save replaces them"
    assert one.fetch() == (6, Outcome.OK)


def test_an_encoded_payload_that_does_not_decode_is_corrupt_and_counted(house):
    one = house(MemoryTier(16 * MIB))
    one.save(3)
    one.leave()
    for place, record in one.tier._records.items():
        forged = memoryview(bytearray(record))
        forged[128:192] = b"\xff" * 64
        pack(forged, read_header(forged)[0])
        one.tier._records[place] = bytes(forged)
    assert one.fetch(3) == (0, Outcome.CORRUPT)
    assert one.store.status().codecs[0].undecodable == 3
    assert one.tier.usage().records == 0, "their places are free"
    assert not one.used_bytes()


def test_swapped_encoded_records_are_misses(house):
    one = house(MemoryTier(16 * MIB))
    one.save(2)
    one.leave()
    first, second = one.tier._records
    one.tier._records[first], one.tier._records[second] = (
        one.tier._records[second],
        one.tier._records[first],
    )
    assert one.fetch(2)[0] == 0


def test_cut_records_are_misses(house):
    one = house(MemoryTier(16 * MIB))
    one.save(2)
    one.leave()
    for place, record in one.tier._records.items():
        one.tier._records[place] = record[:4096]
    assert one.fetch(2) == (0, Outcome.CORRUPT)


class Moody:
    """`planes` under another number, until it is told to fail."""

    number, name = 201, "moody"

    def __init__(self):
        self.mood = "well"

    def encode(self, raw, into, element_bytes):
        if self.mood == "raises":
            raise RuntimeError("no")
        return codec_named("planes").encode(raw, into, element_bytes)

    def decode(self, stored, into):
        if self.mood == "raises":
            raise RuntimeError("no")
        if self.mood == "refuses":
            raise FormatError("no")
        codec_named("planes").decode(stored, into)


@pytest.fixture
def moody():
    codec = Moody()
    register(codec)
    yield codec
    unregister(codec)


@pytest.mark.parametrize(
    ("mood", "outcome", "kept"),
    [
        ("raises", Outcome.UNREADABLE, True),
        ("missing", Outcome.UNREADABLE, True),
        ("refuses", Outcome.CORRUPT, False),
    ],
)
def test_a_decoder_that_fails_is_a_miss_and_a_shared_tier_keeps_what_others_may_read(
    house, moody, mood, outcome, kept
):
    records = {}
    one = house(SharedMemoryTier(records), {1: TierRules(codec="moody")})
    one.save()
    assert {header_of_record(record).codec for _, record in records.values()} == {201}
    two = house(SharedMemoryTier(records), {1: TierRules(codec="moody")})
    if mood == "missing":
        unregister(moody)
    moody.mood = mood
    assert two.fetch() == (0, outcome)
    assert (len(records) == 6) == kept
    assert two.save() == 6


def test_an_encoder_that_raises_leaves_the_records_raw(house, moody):
    one = house(MemoryTier(16 * MIB), {1: TierRules(codec="moody")})
    moody.mood = "raises"
    assert one.save() == 6
    one.leave()
    assert one.fetch() == (6, Outcome.OK)
    assert one.used_bytes() == 6 * one.namespace.slot_bytes


def test_a_block_damaged_in_memory_is_not_encoded(house):
    one = house(MemoryTier(16 * MIB), writes_behind=False)
    one.save()
    one.view.record(one.namespace, one.keys(1)[0])[700] ^= 1
    write_all_through(one.store)
    one.flush()
    assert one.tier.usage().records == 5
    assert one.save() == 1


def received(one, donor):
    """Hand the records of a donor's tier to a store, as another node does."""
    records = [bytes(record) for record in donor.tier._records.values()]
    headers = [header_of_record(record) for record in records]
    assert all(isinstance(header, Header) and header.codec for header in headers)
    slots = one.store.receive_slots(headers)
    for record, slot in zip(records, slots, strict=True):
        slot.record[:] = record
    return one.store.publish_received(slots, b"".join(record[:128] for record in records))


@pytest.mark.parametrize("sealed", [False, True])
def test_a_record_that_another_node_sent_encoded_is_sent_on_as_it_is_and_decoded_for_an_engine(
    house, sealed
):
    donor = house(MemoryTier(16 * MIB), sealed=sealed)
    donor.save()
    sent = sorted(map(len, donor.tier._records.values()))
    one = house(MemoryTier(16 * MIB), RAW, sealed=sealed, serves_peers=True)
    assert received(one, donor) == [Outcome.OK] * 6
    one.flush()
    assert sorted(map(len, one.tier._records.values())) == sent, "written as it came"
    for _ in range(2):
        fetched = one.store.fetch_unverified(one.namespace, one.keys(), 20.0)
        out = one.store.outgoing(one.namespace, fetched.lease, fetched.places)
        assert sorted(map(len, out)) == sent
        one.store.release(fetched.lease)
        one.leave()
    assert one.fetch() == (6, Outcome.OK)
    assert one.used_bytes(tier=0) == 6 * one.namespace.slot_bytes
    assert one.view.is_idle


def test_a_record_in_memory_that_another_node_sent_encoded_is_decoded_in_memory(house):
    donor = house(MemoryTier(16 * MIB))
    donor.save()
    one = house(MemoryTier(16 * MIB), RAW, serves_peers=True, writes_behind=False)
    received(one, donor)
    assert one.fetch() == (6, Outcome.OK)
    assert one.fetch() == (6, Outcome.OK)
    assert one.used_bytes(tier=0) == 6 * one.namespace.slot_bytes
    assert one.view.is_idle
    one.leave()
    assert not one.used_bytes(tier=0)


class WaitingTier(MemoryTier):
    """Waits before it writes its first batch, until a test lets it go on."""

    def __init__(self, capacity_bytes):
        super().__init__(capacity_bytes)
        self.begun, self.go_on = threading.Event(), threading.Event()

    def write(self, batch):
        self.begun.set()
        assert self.go_on.wait(60)
        return super().write(batch)


def test_a_received_block_that_is_decoded_while_it_is_written_is_on_the_tier_afterwards(house):
    donor = house(MemoryTier(16 * MIB))
    donor.save()
    one = house(WaitingTier(16 * MIB), RAW, serves_peers=True)
    received(one, donor)
    assert one.tier.begun.wait(60)
    assert one.fetch() == (6, Outcome.OK)
    one.tier.go_on.set()
    one.flush()
    assert one.used_bytes() == one.tier.usage().used_bytes == 6 * one.namespace.slot_bytes
    one.leave()
    assert one.fetch() == (6, Outcome.OK)


def test_a_received_record_that_does_not_decode_is_a_miss_here(house, moody):
    donor = house(MemoryTier(16 * MIB), {1: TierRules(codec="moody")})
    donor.save()
    one = house(MemoryTier(16 * MIB), RAW, serves_peers=True, writes_behind=False)
    received(one, donor)
    moody.mood = "refuses"
    assert one.fetch()[0] == 0
    assert one.save() >= 1
