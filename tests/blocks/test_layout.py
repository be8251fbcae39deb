"""Layouts: their sizes add up, and what cannot be is refused."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.blocks.layout import PORTABLE, WHOLE, Layout
from holdfast.errors import BlockError
from holdfast.limits import PAYLOAD_BYTES_MAX

LAYOUT = Layout(
    arrangement="opaque",
    dtype="bfloat16",
    layers=2,
    kv_heads=4,
    head_size=8,
    page_tokens=16,
    page_bytes=2048,
    block_tokens=128,
    slice=WHOLE,
)


def test_a_block_is_all_pages_of_all_layers():
    assert LAYOUT.pages_per_block == 8
    assert LAYOUT.payload_bytes == 2 * 8 * 2048


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 16), st.integers(1, 64))
def test_the_portable_layout_is_one_page_of_all_layers_and_heads(
    layers, kv_heads, head_size, block_tokens
):
    layout = Layout.portable(
        layers=layers,
        kv_heads=kv_heads,
        head_size=head_size,
        dtype="float16",
        block_tokens=block_tokens,
    )
    assert layout.arrangement == PORTABLE
    assert layout.pages_per_block == 1
    assert layout.payload_bytes == layers * 2 * block_tokens * kv_heads * head_size * 2


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layers": 0}, "layout.layers is 0"),
        ({"page_bytes": -1}, "layout.page_bytes is -1"),
        ({"block_tokens": 100}, "block_tokens 100 is not a multiple of page_tokens 16"),
        ({"page_bytes": 1 << 30}, f"the limit is {PAYLOAD_BYTES_MAX}; lower block_tokens"),
    ],
)
def test_an_impossible_layout_is_refused(changes, expected):
    with pytest.raises(BlockError, match=expected):
        msgspec.structs.replace(LAYOUT, **changes)


def test_an_unknown_dtype_is_refused_with_the_known_ones():
    with pytest.raises(BlockError, match="'int3' is unknown; known: float32, float16"):
        Layout.portable(layers=1, kv_heads=1, head_size=1, dtype="int3", block_tokens=1)
