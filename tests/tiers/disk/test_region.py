"""The disk tier's format: golden vectors, round trips, and damage of every structure."""

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.blocks.envelope import stamp
from holdfast.errors import FormatError
from holdfast.limits import GIB, MIB
from holdfast.testing.payloads import key_of, namespace_of, record_of
from holdfast.tiers.disk import region
from holdfast.tiers.disk.region import (
    RegionEntry,
    RegionGeometry,
    RegionLife,
    RegionRow,
    RegionSnapshot,
    Superblock,
)

UUID = bytes(range(16))
LIFE = RegionLife(UUID, 3, (2 << 32) | 7)
GEOMETRY = RegionGeometry.of(64 * 4096, 8)


def entry(number, sector, payload_bytes=5_000, generation=LIFE.generation):
    record = record_of(namespace_of(payload_bytes), key_of(number))
    stamp(record, generation)
    return RegionEntry(bytes(record[:128]), sector, len(record) // 4096)


ENTRIES = [entry(0, 1), entry(1, 3), entry(2, 9)]
SNAPSHOT = RegionSnapshot(
    UUID, 5, [RegionRow(n, 4096 * n, n % 2) for n in range(8)], [(3, 9), (1, 1)]
)


# Golden vectors, as in docs/reference/format.md; a change here is a new format.


def test_superblock_bytes_are_as_documented():
    block = region.pack_superblock(Superblock(UUID, 2, GEOMETRY))
    assert len(block) == 4096
    assert block[:64].hex() == (
        "484f4c44464153540100000016ea033f000102030405060708090a0b0c0d0e0f"
        "0200000000000000000004000000000008000000000000000010000000000000"
    )
    assert block[64:] == bytes(4032)


def test_region_header_bytes_are_as_documented():
    block = region.pack_region_header(LIFE)
    assert len(block) == 4096
    assert block[:36].hex() == (
        "484652318d3420b70700000002000000000102030405060708090a0b0c0d0e0f03000000"
    )
    assert block[36:] == bytes(4060)


def test_footer_bytes_are_as_documented():
    footer = region.pack_footer(LIFE, ENTRIES[:1])
    assert len(footer) == 4096
    assert footer[-64:].hex() == (
        "48464631078e58970700000002000000000102030405060708090a0b0c0d0e0f"
        "0300000001000000" + "00" * 24
    )
    assert footer[-72:-64].hex() == "0100000002000000"
    assert footer[-200:-72] == ENTRIES[0].head
    assert footer[:-200] == bytes(3896)


def test_snapshot_bytes_are_as_documented():
    blob = region.pack_snapshot(RegionSnapshot(UUID, 5, [RegionRow(7, 4096, 1)], [(0, 9)]), 4096)
    assert len(blob) == 4096
    assert blob[:88].hex() == (
        "48465331c775d98d0500000000000000000102030405060708090a0b0c0d0e0f"
        "0100000001000000" + "00" * 24 + "07000000000000000010000001000000" + "0000000009000000"
    )


# Round trips.


def test_packed_structures_are_parsed_unchanged():
    block = Superblock(UUID, 2, GEOMETRY)
    assert region.parse_superblock(region.pack_superblock(block)) == block
    header = region.pack_region_header(LIFE)
    assert region.parse_region_header(header, UUID, 3) == LIFE.generation
    footer = region.pack_footer(LIFE, ENTRIES)
    listed = region.parse_footer(footer, LIFE, 64)
    assert [entry for _, entry in listed] == ENTRIES
    assert [header.key for header, _ in listed] == [key_of(n) for n in range(3)]
    assert region.parse_footer(b"x" * 4096 + footer, LIFE, 64) == listed
    blob = region.pack_snapshot(SNAPSHOT, GEOMETRY.snapshot_bytes)
    assert region.parse_snapshot(blob, UUID, 8) == SNAPSHOT


@given(st.integers(0, 400))
def test_a_footer_of_any_length_is_found_from_its_end(count):
    entries = [ENTRIES[0]._replace(sector=1 + n) for n in range(count)]
    footer = region.pack_footer(LIFE, entries)
    assert len(footer) == region.footer_bytes(count)
    assert region.footer_needs(footer[-64:], LIFE) == len(footer)
    found = region.parse_footer(footer, LIFE, 4096)
    assert [entry for _, entry in found] == entries


def test_a_footer_longer_than_the_bytes_read_is_not_parsed():
    footer = region.pack_footer(LIFE, ENTRIES * 100)
    assert region.parse_footer(footer[-4096:], LIFE, 4096) is None


def test_freed_records_that_do_not_fit_are_omitted():
    freed = [(n % 8, n) for n in range(10_000)]
    blob = region.pack_snapshot(SNAPSHOT._replace(freed=freed), GEOMETRY.snapshot_bytes)
    assert len(blob) <= GEOMETRY.snapshot_bytes
    found = region.parse_snapshot(blob, UUID, 8)
    assert len(found.freed) > 8 * region.FREED_PER_REGION - 1
    assert list(found.freed) == freed[: len(found.freed)]


# Identity: intact bytes of another life, file or place are rejected.


@pytest.mark.parametrize(
    "life",
    [LIFE._replace(uuid=bytes(16)), LIFE._replace(region=4), LIFE._replace(generation=1)],
)
def test_a_footer_or_header_of_another_region_life_is_rejected(life):
    assert region.parse_footer(region.pack_footer(life, ENTRIES), LIFE, 64) is None
    if life.generation == LIFE.generation:
        assert region.parse_region_header(region.pack_region_header(life), UUID, 3) == 0


def test_a_snapshot_of_another_file_or_geometry_is_rejected():
    blob = region.pack_snapshot(SNAPSHOT, GEOMETRY.snapshot_bytes)
    assert region.parse_snapshot(blob, bytes(16), 8) is None
    assert region.parse_snapshot(blob, UUID, 9) is None


def test_impossible_entries_are_omitted():
    entries = [
        entry(0, 0),  # on the region's header
        entry(1, 62),  # on the footer
        entry(2, 4, generation=9),  # of another life
        entry(3, 4)._replace(sectors=3),  # longer than its record
        entry(4, 4)._replace(head=bytes(128)),  # no header at all
        entry(5, 4),
    ]
    found = region.parse_footer(region.pack_footer(LIFE, entries), LIFE, 64)
    assert [entry for _, entry in found] == entries[-1:]


# Damage: one flipped bit, or a truncation, anywhere in the bytes that the CRC covers.

STRUCTURES = [
    ("superblock", region.pack_superblock(Superblock(UUID, 2, GEOMETRY)), 0, 4096),
    ("region header", region.pack_region_header(LIFE), 0, 4096),
    ("footer", region.pack_footer(LIFE, ENTRIES), 4096 - 64 - 3 * 136, 4096),
    ("snapshot", region.pack_snapshot(SNAPSHOT, GEOMETRY.snapshot_bytes), 0, 64 + 8 * 16 + 16),
]


def parse(name, blob):
    """Parse a structure by name; None if it is rejected."""
    if name == "superblock":
        try:
            return region.parse_superblock(blob)
        except FormatError:
            return None
    if name == "region header":
        return region.parse_region_header(blob, UUID, 3) or None
    if name == "footer":
        return region.parse_footer(blob, LIFE, 64)
    return region.parse_snapshot(blob, UUID, 8)


@pytest.mark.parametrize(("name", "blob", "start", "end"), STRUCTURES)
def test_every_flipped_bit_is_detected(name, blob, start, end):
    assert parse(name, blob) is not None
    for at in range(start, end):
        damaged = bytearray(blob)
        damaged[at] ^= 1 << at % 8
        assert parse(name, bytes(damaged)) is None, at


@pytest.mark.parametrize(("name", "blob", "start", "end"), STRUCTURES)
def test_every_truncation_is_detected(name, blob, start, end):
    significant = len(blob[:end].rstrip(b"\0"))
    for at in range(start, significant):
        cut = blob[:at].ljust(len(blob), b"\0")
        assert parse(name, cut) is None, at
        assert parse(name, blob[:at]) is None, at


@given(st.sampled_from([name for name, *_ in STRUCTURES]), st.binary(max_size=9_000))
def test_random_bytes_are_rejected_without_an_exception(name, noise):
    assert parse(name, noise) is None


@given(st.binary(min_size=64, max_size=64), st.integers(0, 2**32 - 1))
def test_a_footer_with_a_wrong_count_is_rejected(trailer, count):
    forged = bytearray(region.pack_footer(LIFE, ENTRIES)[-64:])
    forged[36:40] = count.to_bytes(4, "little")
    forged[4:8] = zlib.crc32(forged[8:]).to_bytes(4, "little")
    found = region.parse_footer(trailer + forged, LIFE, 64)
    assert found is None or (count == 0 and found == [])


def test_an_unknown_version_is_named():
    block = bytearray(region.pack_superblock(Superblock(UUID, 2, GEOMETRY)))
    block[8] = 9
    with pytest.raises(FormatError, match="format 9, this build reads 1"):
        region.parse_superblock(bytes(block))


@given(st.integers(1, 1 << 46), st.sampled_from([8 * 4096, MIB, 64 * MIB, 256 * MIB]))
def test_a_geometry_fills_its_capacity_and_does_not_exceed_it(capacity_bytes, region_bytes):
    if capacity_bytes // region_bytes > 1_000_000:
        capacity_bytes = region_bytes * 1_000_000
    geometry = RegionGeometry.within(capacity_bytes, region_bytes)
    assert geometry.region_count == 0 or geometry.file_bytes <= capacity_bytes
    more = RegionGeometry.of(region_bytes, geometry.region_count + 1)
    assert more.file_bytes > capacity_bytes


@pytest.mark.parametrize(
    ("capacity_bytes", "expected"),
    [(8 * MIB, MIB), (64 * MIB, 8 * MIB), (8 * GIB, 64 * MIB), (16 << 40, 256 * MIB)],
)
def test_the_default_region_size_depends_on_the_capacity(capacity_bytes, expected):
    assert region.region_bytes_for(capacity_bytes) == expected
