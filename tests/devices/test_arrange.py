"""Conversions between engines' pages and portable blocks, against pages packed by definition."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.devices.arrange import Arrangement
from holdfast.devices.page_format import cpu_format, latent_format, plain_format
from holdfast.errors import BlockError
from holdfast.testing import packings

PLAIN = {
    ("hnd", False): packings.pack_hnd,
    ("nhd", False): packings.pack_nhd,
    ("hnd", True): packings.pack_hnd_fused,
    ("nhd", True): packings.pack_nhd_fused,
}


class Case:
    """Random states of some blocks, as pages of an engine and as portable layers."""

    def __init__(self, form, packer, per_block):
        self.form, self.packer, self.per_block = form, packer, per_block
        random = np.random.default_rng(1)
        kind = np.dtype(f"u{form.element_bytes}")
        shape = (2, 3, form.states[0].heads.length, per_block * form.page_tokens)
        self.states = [
            random.integers(
                0, 1 << 8 * form.element_bytes, (*shape, state.head_size), np.uint64
            ).astype(kind)
            for state in form.states
        ]
        self.pages = self.pages_of(slice(None))
        self.blocks = self._each_layer(packings.portable_layer, self.states)

    def pages_of(self, heads):
        """Return the pages of some heads."""

        def pack(states):
            return packings.pack_block(self.packer, *states, self.form.page_tokens)

        return self._each_layer(pack, [state[:, :, heads] for state in self.states])

    def _each_layer(self, made, states):
        layers = [
            [made([state[block, layer] for state in states]) for layer in range(3)]
            for block in range(2)
        ]
        return np.array(layers).view(np.uint8)

    def check(self):
        assert self.pages.shape[-1] == self.form.page_bytes
        arrangement = Arrangement(self.form, self.per_block)
        found = np.zeros_like(self.blocks)
        arrangement.to_blocks(self.pages, found)
        assert (found == self.blocks).all()
        back = np.zeros_like(self.pages)
        arrangement.to_pages(self.blocks, back)
        assert (back == self.pages).all()


COUNTS = {"heads": st.integers(1, 5), "per_block": st.integers(1, 3)}


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(sorted(PLAIN)),
    tokens=st.integers(1, 40),
    sizes=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    element_bytes=st.sampled_from([1, 2, 4]),
    counts=st.fixed_dictionaries(COUNTS),
)
def test_plain_pages_become_portable_blocks_and_return(kind, tokens, sizes, element_bytes, counts):
    order, fused = kind
    form = plain_format(order, counts["heads"], tokens, sizes, element_bytes, fused=fused)
    Case(form, PLAIN[kind], counts["per_block"]).check()


@settings(deadline=None, max_examples=40)
@given(
    isa=st.sampled_from(["vec", "vec16", "amx"]),
    tokens=st.sampled_from([32, 64, 96, 128]),
    size=st.sampled_from([32, 64, 80, 96, 112, 128]),
    element_bytes=st.sampled_from([1, 2, 4]),
    counts=st.fixed_dictionaries(COUNTS),
)
def test_packed_pages_of_a_processor_become_portable_blocks_and_return(
    isa, tokens, size, element_bytes, counts
):
    form = cpu_format(isa, counts["heads"], tokens, size, element_bytes)
    is_tiled = isa == "amx" and size % 32 == 0
    packer = packings.pack_amx if is_tiled else packings.pack_vec
    Case(form, packer, counts["per_block"]).check()


@settings(deadline=None, max_examples=20)
@given(tokens=st.integers(1, 40), size=st.integers(1, 100), per_block=st.integers(1, 4))
def test_pages_of_latents_are_portable_as_they_are(tokens, size, per_block):
    form = latent_format(tokens, size, 2)
    shape = (2, 3, per_block, form.page_bytes)
    pages = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    found = np.zeros((2, 3, per_block * form.page_bytes), np.uint8)
    Arrangement(form, per_block).to_blocks(pages, found)
    assert (found == pages.reshape(found.shape)).all()
    back = np.zeros_like(pages)
    Arrangement(form, per_block).to_pages(found, back)
    assert (back == pages).all()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_rank_writes_and_reads_its_heads_of_a_whole_block(ranks):
    heads, sizes = 4 // ranks, (64, 48)
    whole = plain_format("nhd", 4, 32, sizes, 2, fused=True)
    case = Case(whole, packings.pack_nhd_fused, per_block=2)
    form = plain_format("nhd", heads, 32, sizes, 2, fused=True)
    found = np.zeros_like(case.blocks)
    for rank in range(ranks):
        head_bytes = [2 * 32 * size * 2 for size in sizes]
        starts = [rank * heads * head_bytes[0], 4 * head_bytes[0] + rank * heads * head_bytes[1]]
        pages = case.pages_of(slice(rank * heads, (rank + 1) * heads))
        Arrangement(form, 2, starts).to_blocks(pages, found)
        back = np.zeros_like(pages)
        Arrangement(form, 2, starts).to_pages(case.blocks, back)
        assert (back == pages).all()
    assert (found == case.blocks).all()


def test_blocks_at_equal_distances_are_converted_in_place():
    form = cpu_format("vec", 2, 32, 32, 2)
    case = Case(form, packings.pack_vec, per_block=1)
    record = case.blocks[0].size + 144
    memory = np.full(3 * record, 7, np.uint8)
    strides = (-record, case.blocks.strides[1], 1)
    start = memory[2 * record + 128 :]
    window = np.lib.stride_tricks.as_strided(start, case.blocks.shape, strides)
    Arrangement(form, 1).to_blocks(case.pages, window)
    assert (window == case.blocks).all()
    assert (memory[: record + 128] == 7).all()
    assert (memory[2 * record - 16 : 2 * record + 128] == 7).all()
    assert (memory[-16:] == 7).all()


def test_memory_that_does_not_fit_the_format_is_refused():
    form = cpu_format("vec", 2, 32, 32, 2)
    arrangement = Arrangement(form, 1)
    pages = np.zeros((1, 1, 1, form.page_bytes), np.uint8)
    blocks = np.zeros((1, 1, form.page_bytes), np.uint8)
    with pytest.raises(BlockError, match="with cpu-vec a block has 1 of 8192 bytes"):
        arrangement.to_blocks(pages[..., 2:], blocks)
    with pytest.raises(BlockError, match="with cpu-vec a block has 2 of 8192 bytes"):
        Arrangement(form, 2).to_blocks(pages, blocks)
    with pytest.raises(BlockError, match="layers of 8190 bytes; the states end at byte 8192"):
        arrangement.to_blocks(pages, blocks[..., 2:])
    with pytest.raises(BlockError, match="layers of 8192 bytes; the states end at byte 8194"):
        Arrangement(form, 1, [0, 4098]).to_pages(blocks, pages)
    with pytest.raises(BlockError, match="pass pages as"):
        arrangement.to_pages(blocks[0], pages)
    with pytest.raises(BlockError, match="pages are uint16"):
        arrangement.to_pages(blocks, pages.view(np.uint16))
    with pytest.raises(BlockError, match="given for the 2 states"):
        Arrangement(form, 1, [0])
    with pytest.raises(BlockError, match="0 pages in a block"):
        Arrangement(form, 0)


def test_a_format_of_an_unknown_processor_or_size_is_refused():
    with pytest.raises(BlockError, match="pages of 'neon' is not known; known are vec, vec16, amx"):
        cpu_format("neon", 1, 32, 64, 2)
    with pytest.raises(BlockError, match="16 tokens in a page of amx; pass a multiple of 32"):
        cpu_format("amx", 1, 16, 64, 2)
    with pytest.raises(BlockError, match="heads is 0"):
        plain_format("nhd", 0, 16, (64, 64), 2, fused=True)
