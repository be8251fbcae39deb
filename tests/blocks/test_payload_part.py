"""Parts of payloads: ranges are checked, and copies of slices are what the layout says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.blocks.layout import HeadState, LatentState, Layout, PortableLayout
from holdfast.blocks.payload_part import (
    WHOLE,
    SliceCopy,
    check_part,
    covers,
    overlaps,
    packed_part,
)
from holdfast.errors import BlockError
from holdfast.limits import PART_RANGES_MAX

LAYOUT = Layout.portable(layers=3, kv_heads=4, head_size=2, dtype="float16", block_tokens=5)
SHAPE = (3, 2, 4, 5, 2)
"""Of a payload as elements: layer, k or v, head, token, dim."""
MIXED = PortableLayout("float16", 4, (HeadState(2, 6, 4), LatentState(10), HeadState(4, 3, 5)))


def payload_of(layout, seed):
    return np.random.default_rng(seed).integers(0, 256, layout.raw_bytes, np.uint8)


def read(layout, layout_slice, payload):
    copy = SliceCopy(layout.raw_bytes, layout_slice)
    row = np.zeros(copy.row_bytes, np.uint8)
    copy.read(payload.data, row.data)
    return row


def test_a_part_is_the_offset_and_length_of_each_range():
    assert packed_part([(1, 2), (256, 3)]).hex() == "01000000020000000001000003000000"


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (b"1234567", r"7 bytes are not up to 1024 ranges of 8 bytes"),
        (packed_part((2 * i, 1) for i in range(PART_RANGES_MAX + 1)), "are not up to 1024"),
        (packed_part([(0, 101)]), "bytes 0 to 101 of a payload of 100"),
        (packed_part([(100, 1)]), "bytes 100 to 101"),
        (packed_part([(10, 5), (14, 1)]), "follow byte 15"),
        (packed_part([(10, 5), (5, 5)]), "follow byte 15"),
        (packed_part([(10, 0)]), "not be empty"),
        (packed_part([(0xFFFF_FFFF, 0xFFFF_FFFF)]), "of a payload of 100"),
    ],
)
def test_a_part_outside_the_payload_is_refused(part, expected):
    with pytest.raises(BlockError, match=expected):
        check_part(part, 100)


def test_a_part_within_the_payload_is_accepted():
    check_part(WHOLE, 100)
    check_part(packed_part([(0, 50), (50, 50)]), 100)


ranges = st.sets(st.integers(0, 15), min_size=1).map(frozenset)


@given(ranges, st.lists(ranges, max_size=3, unique=True))
def test_overlap_and_cover_are_those_of_sets_of_bytes(mine, others):
    def part(numbers):
        return packed_part((number, 1) for number in sorted(numbers))

    parts = frozenset(map(part, others))
    assert overlaps(part(mine), parts) == any(mine & other for other in others) or any(
        one & other for one in others for other in others if one is not other
    )
    apart = sum(map(len, others)) == len(frozenset().union(*others))
    if apart:
        assert covers(parts, 16) == (frozenset().union(*others) == frozenset(range(16)))


def test_a_slice_has_its_heads_of_its_layers_in_the_order_of_the_payload():
    payload = payload_of(LAYOUT, 1)
    elements = payload.view("<u2").reshape(SHAPE)
    for heads in (range(1), range(1, 3), range(4)):
        for layers in (range(3), range(1, 2)):
            row = read(LAYOUT, LAYOUT.slice(layers, heads), payload)
            expected = elements[layers.start : layers.stop, :, heads.start : heads.stop]
            assert (row.view("<u2") == expected.ravel()).all()


@pytest.mark.parametrize("layout", [LAYOUT, MIXED], ids=["alike", "mixed"])
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_the_ranks_of_one_size_write_what_the_ranks_of_another_read(layout, tp_size):
    payload, filled = payload_of(layout, 2), np.zeros(layout.raw_bytes, np.uint8)
    for rank in range(tp_size):
        part = layout.rank(rank, tp_size)
        SliceCopy(layout.raw_bytes, part).write(read(layout, part, payload).data, filled.data)
    assert (filled == payload).all()
    for other in (1, 2, 4):
        for rank in range(other):
            part = layout.rank(rank, other)
            assert (read(layout, part, filled) == read(layout, part, payload)).all()


def test_a_rank_writes_only_its_own_bytes():
    filled = np.zeros(LAYOUT.raw_bytes, np.uint8)
    part = LAYOUT.rank(1, 2)
    SliceCopy(LAYOUT.raw_bytes, part).write(np.ones(part.nbytes, np.uint8).data, filled.data)
    elements = filled.view("<u2").reshape(SHAPE)
    assert not elements[:, :, :2].any()
    assert elements[:, :, 2:].all()


def test_a_slice_that_is_everything_is_no_part():
    for layout_slice in (None, LAYOUT.whole(), LAYOUT.rank(0, 1)):
        copy = SliceCopy(LAYOUT.raw_bytes, layout_slice)
        assert (copy.part, copy.writes, copy.row_bytes) == (WHOLE, True, LAYOUT.raw_bytes)


def test_a_rank_without_state_of_its_own_writes_nothing():
    layout = Layout.portable_latent(layers=2, latent_size=6, dtype="int8", block_tokens=4)
    first, second = (SliceCopy(layout.raw_bytes, layout.rank(rank, 2)) for rank in range(2))
    assert (first.part, first.writes) == (WHOLE, True)
    assert not second.writes
    assert second.row_bytes == layout.raw_bytes
