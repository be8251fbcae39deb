import numpy as np
import pytest

from holdfast.blocks.layout import HeadState, LatentState, Layout, PortableLayout
from holdfast.devices.context_tensors import blocks_to_tensors, tensors_to_blocks
from holdfast.errors import BlockError

TOKENS = 16
LAYERS = (HeadState(2, 8, 8), HeadState(4, 8, 6), LatentState(20))
LAYOUT = PortableLayout("float16", TOKENS, LAYERS)


def random_layers(tokens, random=None):
    random = random or np.random.default_rng(1)
    return [
        [
            random.integers(0, 1000, (state.heads, tokens, size)).astype(np.float16)
            for _, size in state.states
        ]
        for state in LAYERS
    ]


def payload(layers, block):
    """Return a block's payload from the definition of the portable layout."""
    span = slice(block * TOKENS, (block + 1) * TOKENS)
    return b"".join(state[:, span].tobytes() for states in layers for state in states)


def test_tensors_of_layers_that_differ_become_blocks_and_return():
    layers = random_layers(3 * TOKENS + 5)
    blocks = tensors_to_blocks(LAYOUT, layers)
    assert [row.tobytes() for row in blocks] == [payload(layers, block) for block in range(3)]
    found = random_layers(3 * TOKENS + 5, np.random.default_rng(2))
    rest = [[state[:, 3 * TOKENS :].copy() for state in states] for states in found]
    blocks_to_tensors(LAYOUT, blocks, found)
    for right, states, after in zip(layers, found, rest, strict=True):
        for one, other, end in zip(right, states, after, strict=True):
            assert (one[:, : 3 * TOKENS] == other[:, : 3 * TOKENS]).all()
            assert (other[:, 3 * TOKENS :] == end).all()


def test_tensors_of_torch_with_any_strides_of_heads_and_tokens_are_used_in_place():
    torch = pytest.importorskip("torch")
    layout = Layout.portable(
        layers=1, kv_heads=2, head_size=8, dtype="bfloat16", block_tokens=TOKENS
    )
    # Token before head in memory, as after a projection.
    keys, values = (torch.randn(2 * TOKENS, 2, 8).bfloat16().transpose(0, 1) for _ in range(2))
    blocks = tensors_to_blocks(layout, [(keys, values)])
    found = [torch.zeros(2, 2 * TOKENS, 8, dtype=torch.bfloat16) for _ in range(2)]
    blocks_to_tensors(layout, blocks, [found])
    assert torch.equal(found[0], keys)
    assert torch.equal(found[1], values)


@pytest.mark.parametrize("other", ["float16", "float32"])
def test_tensors_of_another_data_type_are_refused_although_their_elements_may_have_its_size(other):
    torch = pytest.importorskip("torch")
    layout = Layout.portable(
        layers=1, kv_heads=2, head_size=8, dtype="bfloat16", block_tokens=TOKENS
    )
    states = [torch.randn(2, TOKENS, 8).to(getattr(torch, other)) for _ in range(2)]
    message = f"layer 0: .* is of {other}, the layout says bfloat16"
    with pytest.raises(BlockError, match=message):
        tensors_to_blocks(layout, [states])
    with pytest.raises(BlockError, match=message):
        tensors_to_blocks(layout, [[state.numpy() for state in states]])
    blocks = tensors_to_blocks(layout, [[state.bfloat16() for state in states]])
    with pytest.raises(BlockError, match=message):
        blocks_to_tensors(layout, blocks, [states])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda layers: layers[:2], "2 layers given, the layout has 3"),
        (lambda layers: [layers[0], layers[1], layers[0]], "layer 2: 2 tensors given, it has 1"),
        (lambda layers: [layers[1], layers[0], layers[2]], "has 4 heads, 40 tokens and 16 bytes"),
        (lambda layers: [[s.astype("f4") for s in states] for states in layers], "is of float32"),
        (lambda layers: [[s[None] for s in states] for states in layers], "without a batch"),
        (lambda layers: [[s[..., ::2] for s in states] for states in layers], "are contiguous"),
        (lambda layers: [[s.tolist() for s in states] for states in layers], "shape .* pass"),
    ],
)
def test_tensors_that_do_not_fit_the_layout_are_refused(change, named):
    layers = random_layers(40)
    blocks = tensors_to_blocks(LAYOUT, layers)
    with pytest.raises(BlockError, match=named):
        blocks_to_tensors(LAYOUT, blocks, change(layers))


@pytest.mark.parametrize("change", ["ravel", "tolist"])
def test_states_that_are_no_tensors_of_heads_and_tokens_are_refused(change):
    layers = [[getattr(state, change)() for state in states] for states in random_layers(40)]
    with pytest.raises(BlockError, match=r"layer 0: k has shape .*pass \[head\]"):
        tensors_to_blocks(LAYOUT, layers)


def test_blocks_that_do_not_fit_are_refused():
    layers = random_layers(40)
    blocks = tensors_to_blocks(LAYOUT, layers)
    with pytest.raises(BlockError, match="pass bytes"):
        blocks_to_tensors(LAYOUT, blocks[:, 2:], layers)
    with pytest.raises(BlockError, match="16 tokens and 16 bytes a token; expected 2, at least 32"):
        blocks_to_tensors(LAYOUT, blocks, random_layers(16))
