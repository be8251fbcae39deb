"""Layouts: offsets and sizes are as documented, slices cover exactly, the impossible is refused."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.blocks.layout import (
    ExactLayout,
    HeadState,
    LatentState,
    Layout,
    PortableLayout,
    RankSlice,
    State,
)
from holdfast.errors import BlockError
from holdfast.limits import LAYERS_MAX, PAYLOAD_BYTES_MAX

EXACT = ExactLayout(
    dtype="bfloat16",
    block_tokens=128,
    layers=2,
    kv_heads=4,
    head_size=8,
    page_tokens=16,
    page_bytes=2048,
    packing="amx",
    engine="vllm",
    engine_version="0.32.0",
    backend="CPU_ATTN",
    device="cpu",
    slice=RankSlice(0, 1, 0, 1),
)
ALIKE = Layout.portable(layers=2, kv_heads=4, head_size=8, dtype="bfloat16", block_tokens=16)
MIXED = PortableLayout(
    "float16",
    4,
    (HeadState(2, 6, 4), LatentState(10), HeadState(kv_heads=4, key_size=3, value_size=5)),
)

layer_states = st.one_of(
    st.builds(LatentState, st.integers(1, 9)),
    st.builds(HeadState, st.sampled_from([1, 2, 4, 8]), st.integers(1, 9), st.integers(1, 9)),
)
portable_layouts = st.builds(
    PortableLayout,
    st.sampled_from(["float32", "bfloat16", "int8"]),
    st.integers(1, 40),
    st.lists(layer_states, min_size=1, max_size=5).map(tuple),
)


def runs_of(layout_slice):
    return [
        (run.layer, str(run.state), (run.heads.start, run.heads.stop), run.offset, run.nbytes)
        for run in layout_slice.runs()
    ]


def element_labels(layout):
    """Return (layer, state, head, token, dim) of each element, in the order that format.md says."""
    labels = []
    for layer, state in enumerate(layout.layers):
        if isinstance(state, LatentState):
            sizes = {"latent": (1, state.latent_size)}
        else:
            sizes = {"k": (state.kv_heads, state.key_size), "v": (state.kv_heads, state.value_size)}
        for name, (heads, size) in sizes.items():
            labels += [
                (layer, name, head, token, dim)
                for head in range(heads)
                for token in range(layout.block_tokens)
                for dim in range(size)
            ]
    return labels


def test_an_exact_block_is_all_pages_of_all_layers():
    assert EXACT.pages_per_block == 8
    assert EXACT.raw_bytes == 2 * 8 * 2048


def test_the_width_of_an_element_follows_from_the_dtype():
    assert (ALIKE.element_bytes, EXACT.element_bytes) == (2, 2)
    assert msgspec.structs.replace(EXACT, dtype="a new type").element_bytes == 1


def test_a_portable_block_of_layers_that_are_alike_matches_the_golden_vector():
    assert ALIKE.raw_bytes == 4096
    assert ALIKE.layer_offsets() == [0, 2048, 4096]
    assert runs_of(ALIKE.slice(heads=range(1, 3))) == [
        (0, "k", (1, 3), 256, 512),
        (0, "v", (1, 3), 1280, 512),
        (1, "k", (1, 3), 2304, 512),
        (1, "v", (1, 3), 3328, 512),
    ]
    assert msgspec.json.encode(ALIKE, order="sorted") == (
        b'{"block_tokens":16,"dtype":"bfloat16","kind":"portable","layers":['
        b'{"key_size":8,"kind":"heads","kv_heads":4,"value_size":8},'
        b'{"key_size":8,"kind":"heads","kv_heads":4,"value_size":8}]}'
    )


def test_a_portable_block_of_unlike_layers_matches_the_golden_vector():
    assert MIXED.raw_bytes == 496
    assert MIXED.layer_offsets() == [0, 160, 240, 496]
    assert runs_of(MIXED.whole()) == [
        (0, "k", (0, 2), 0, 96),
        (0, "v", (0, 2), 96, 64),
        (1, "latent", (0, 1), 160, 80),
        (2, "k", (0, 4), 240, 96),
        (2, "v", (0, 4), 336, 160),
    ]
    assert runs_of(MIXED.rank(1, 2)) == [
        (0, "k", (1, 2), 48, 48),
        (0, "v", (1, 2), 128, 32),
        (1, "latent", (0, 1), 160, 80),
        (2, "k", (2, 4), 288, 48),
        (2, "v", (2, 4), 416, 80),
    ]
    assert msgspec.json.encode(MIXED, order="sorted") == (
        b'{"block_tokens":4,"dtype":"float16","kind":"portable","layers":['
        b'{"key_size":6,"kind":"heads","kv_heads":2,"value_size":4},'
        b'{"kind":"latent","latent_size":10},'
        b'{"key_size":3,"kind":"heads","kv_heads":4,"value_size":5}]}'
    )


@given(portable_layouts, st.data())
def test_the_runs_of_a_slice_hold_its_heads_of_its_layers_and_nothing_else(layout, data):
    labels = element_labels(layout)
    width = layout.element_bytes
    assert layout.raw_bytes == len(labels) * width
    count = len(layout.layers)
    first = data.draw(st.integers(0, count - 1))
    layers = range(first, data.draw(st.integers(first + 1, count)))
    shared = min(layout.layers[layer].heads for layer in layers)
    head = data.draw(st.integers(0, shared - 1))
    heads = range(head, data.draw(st.integers(head + 1, shared)))
    chosen = layout.slice(layers, heads)
    got = [
        label
        for run in chosen.runs()
        for label in labels[run.offset // width : (run.offset + run.nbytes) // width]
    ]
    assert got == [label for label in labels if label[0] in layers and label[2] in heads]
    assert chosen.nbytes == len(got) * width


@given(portable_layouts, st.sampled_from([1, 2, 4, 8]))
def test_what_the_ranks_write_covers_each_byte_once(layout, tp_size):
    written = np.zeros(layout.raw_bytes, np.uint8)
    for rank in range(tp_size):
        part = layout.rank(rank, tp_size)
        own = {(run.layer, run.state): run for run in part.runs()}
        for run in part.written_runs():
            written[run.offset : run.offset + run.nbytes] += 1
            held = own[run.layer, run.state]
            assert held.heads.start <= run.heads.start
            assert run.heads.stop <= held.heads.stop
    assert (written == 1).all()


def test_ranks_that_outnumber_the_heads_share_them_and_the_first_writes():
    layout = Layout.portable(layers=1, kv_heads=2, head_size=4, dtype="int8", block_tokens=1)
    held = [layout.rank(rank, 4).heads[0] for rank in range(4)]
    assert held == [range(1), range(1), range(1, 2), range(1, 2)]
    written = [layout.rank(rank, 4).written_runs() for rank in range(4)]
    assert [len(runs) for runs in written] == [2, 0, 2, 0]


def test_every_rank_holds_a_latent_and_the_first_writes_it():
    layout = Layout.portable_latent(layers=3, latent_size=576, dtype="bfloat16", block_tokens=16)
    assert layout.raw_bytes == 3 * 16 * 576 * 2
    assert [layout.rank(rank, 2).nbytes for rank in range(2)] == [layout.raw_bytes] * 2
    assert layout.rank(0, 2).written_runs() == layout.whole().runs()
    assert layout.rank(1, 2).written_runs() == []
    assert layout.whole().runs()[0].state is State.LATENT


def test_a_pipeline_stage_is_a_slice_of_layers():
    stage = ALIKE.rank(1, 2, layers=range(1, 2))
    assert [(run.layer, run.heads) for run in stage.runs()] == [(1, range(2, 4))] * 2


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (lambda: ALIKE.slice(layers=range(1, 3)), r"layers 1 to 3 .* but the layout has 2"),
        (lambda: ALIKE.slice(heads=range(3, 5)), r"heads 3 to 5 .* but layer 0 has 4"),
        (lambda: ALIKE.slice(heads=range(-1, 1)), r"heads -1 to 1 .* within 0 to 4"),
        (lambda: ALIKE.slice(heads=range(0, 4, 2)), r"in steps of 2 .* range of step 1"),
        (lambda: ALIKE.slice(heads=range(2, 2)), r"heads 2 to 2"),
        (lambda: MIXED.slice(heads=range(2)), r"heads 0 to 2 .* but layer 1 has 1"),
        (lambda: ALIKE.rank(2, 2), "tp_rank is 2; with tp_size 2 it is below 2"),
        (lambda: ALIKE.rank(0, 0), "tp_size is 0"),
        (lambda: ALIKE.rank(0, 3), "tp_size 3 and the 4 heads of layer 0"),
    ],
)
def test_a_slice_outside_the_layout_is_refused(ask, expected):
    with pytest.raises(BlockError, match=expected):
        ask()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layers": 0}, "layout.layers is 0"),
        ({"page_bytes": -1}, "layout.page_bytes is -1"),
        ({"kv_heads": 1.5}, "layout.kv_heads is 1.5"),
        ({"block_tokens": 100}, "block_tokens 100 is not a multiple of page_tokens 16"),
        ({"page_bytes": 1 << 30}, f"the limit is {PAYLOAD_BYTES_MAX}; lower block_tokens"),
    ],
)
def test_an_impossible_exact_layout_is_refused(changes, expected):
    with pytest.raises(BlockError, match=expected):
        msgspec.structs.replace(EXACT, **changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"dtype": "int3"}, "'int3' is unknown; known: float32, float16"),
        ({"layers": 0}, "layout.layers is 0"),
        ({"layers": LAYERS_MAX + 1}, f"the limit is {LAYERS_MAX}"),
        ({"kv_heads": 0}, "kv_heads is 0"),
        ({"head_size": True}, "key_size is True"),
        ({"value_size": 0}, "value_size is 0"),
        ({"block_tokens": 0}, "layout.block_tokens is 0"),
        ({"head_size": 1 << 30}, f"the limit is {PAYLOAD_BYTES_MAX}; lower block_tokens"),
    ],
)
def test_an_impossible_portable_layout_is_refused(changes, expected):
    fields = {"layers": 1, "kv_heads": 1, "head_size": 1, "dtype": "int8", "block_tokens": 1}
    with pytest.raises(BlockError, match=expected):
        Layout.portable(**fields | changes)


@given(portable_layouts)
def test_a_layout_survives_conversion_to_plain_data(layout):
    assert msgspec.convert(msgspec.to_builtins(layout), PortableLayout) == layout
