"""Heads of segment objects and index objects come back as they were written, or are refused."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import FormatError
from holdfast.tiers.segments.format import (
    DurableSegment,
    IndexedSegment,
    IndexObject,
    RemovedBlocks,
    SegmentName,
    head_bytes,
    next_number,
    parse_index_name,
    parse_segment_name,
    read_head,
    read_index,
    write_head,
    write_index,
)

NAME = SegmentName("7d", "00112233445566aa", "0123456789abcdef")
SPACE = b"n" * 16


def listed(blocks=3, name=NAME):
    keys = b"".join(bytes([number]) * 16 for number in range(blocks))
    return IndexedSegment(name.path, SPACE, keys, (2).to_bytes(4, "little") * blocks)


@given(st.lists(st.tuples(st.binary(min_size=16, max_size=16), st.integers(1, 9)), min_size=1))
def test_a_head_lists_its_records_in_order(records):
    sizes = [(key, 4096 * sectors) for key, sectors in records]
    head = write_head(SPACE, sizes)
    assert len(head) == head_bytes(len(records))
    namespace, found = read_head(head)
    assert namespace == SPACE
    assert [(record.key, record.nbytes) for record in found] == sizes
    starts = [record.start for record in found]
    assert starts[0] == len(head)
    assert all(b - a == size for a, b, (_, size) in zip(starts, starts[1:], sizes, strict=False))


@given(st.integers(0, 79), st.integers(1, 255))
def test_a_damaged_head_is_refused(at, flip):
    head = bytearray(write_head(SPACE, [(b"k" * 16, 4096), (b"l" * 16, 8192)]))
    head[at] ^= flip
    try:
        found = read_head(bytes(head))
    except FormatError:
        return
    assert at in (6, 7), "only the two bytes that are always zero may change"
    assert found[0] == SPACE


@pytest.mark.parametrize("nbytes", [0, 10, 32, 60])
def test_a_short_head_is_refused(nbytes):
    with pytest.raises(FormatError):
        read_head(write_head(SPACE, [(b"k" * 16, 4096), (b"l" * 16, 8192)])[:nbytes])


def test_an_index_object_comes_back():
    removed, durable = [RemovedBlocks(NAME.path, b"k" * 32)], [DurableSegment(NAME.path, 1.5)]
    content = IndexObject([listed()], removed, [NAME.path], ["1"], 2, durable)
    assert read_index(write_index(content)) == content


class EarlierIndexObject(msgspec.Struct, frozen=True, array_like=True):
    """The content of an index object as versions before durable segments know it."""

    segments: list[IndexedSegment] = []
    removed: list[RemovedBlocks] = []
    retired: list[str] = []
    replaces: list[str] = []
    level: int = 0


def test_earlier_and_later_versions_read_each_others_index_objects():
    fields = [listed()], [RemovedBlocks(NAME.path, b"k" * 32)], [NAME.path], ["1"], 2
    earlier = EarlierIndexObject(*fields)
    assert read_index(write_index(earlier)) == IndexObject(*fields)
    later = IndexObject(*fields, [DurableSegment(NAME.path, 1.5)])
    body = write_index(later)[12:]
    assert msgspec.msgpack.decode(body, type=EarlierIndexObject) == earlier


@given(st.data())
def test_a_damaged_index_object_is_refused(data):
    whole = bytearray(write_index(IndexObject([listed()])))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    try:
        read_index(bytes(whole))
    except FormatError:
        return
    assert at in (6, 7), "only the two bytes that are always zero may change"


@pytest.mark.parametrize(
    "segment",
    [
        IndexedSegment(NAME.path, SPACE, b"k" * 15, b"\1\0\0\0"),
        IndexedSegment(NAME.path, SPACE, b"k" * 16, b"\1\0\0"),
        IndexedSegment(NAME.path, b"short", b"k" * 16, b"\1\0\0\0"),
        IndexedSegment(NAME.path, SPACE, b"", b""),
        IndexedSegment("../../etc/passwd", SPACE, b"k" * 16, b"\1\0\0\0"),
        IndexedSegment(f"30d{NAME.path[2:]}x", SPACE, b"k" * 16, b"\1\0\0\0"),
    ],
)
def test_an_index_object_with_impossible_entries_is_refused(segment):
    with pytest.raises(FormatError):
        read_index(write_index(IndexObject([segment])))


def test_names_come_back_and_other_paths_are_none():
    assert parse_segment_name(NAME.path) == NAME
    assert parse_segment_name(NAME.path.replace("7d/", "7d/z")) is None
    assert parse_index_name("index/00112233445566aa/0123456789abcdef") is not None
    assert parse_index_name("index/../0123456789abcdef") is None
    assert listed().name == NAME


def test_numbers_increase_even_if_the_clock_goes_back():
    first = next_number("", 1_700_000_000.0)
    second = next_number(first, 1_600_000_000.0)
    assert second > first
    assert next_number(second, 1_700_000_001.0) > second
    assert SegmentName("1d", "0" * 16, first).created_s == pytest.approx(1_700_000_000.0)
