"""The kernels under Triton's interpreter, on tensors of the CPU; run by `test_kernels.py`."""

import math

import pytest
import torch

from holdfast.devices.base import Move, Pages
from holdfast.devices.cuda.compiled import arguments_of, variant_of
from holdfast.devices.cuda.kernels import pause
from holdfast.devices.cuda.torch_device import (
    TorchCopies,
    TritonCopies,
    empty_stage,
    page_words,
    word_of,
)
from holdfast.devices.driver import PageConversion, PageCopy, PageTable

TENSORS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def pairs(entries):
    return torch.tensor(entries, dtype=torch.int32).reshape(-1)


def addresses(tensors):
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)


def random_bytes(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def aligned(align, *shape):
    """Zeros whose first byte is at a multiple of 256 and `align` bytes."""
    room = torch.zeros(math.prod(shape) + 256 + align, dtype=torch.uint8)
    start = -room.data_ptr() % 256 + align
    return room[start : start + math.prod(shape)].view(shape)


def launch(work, bases, entries, stage):
    """Launch a kernel as the driver does: with the numbers and constants of its variant."""
    kernel, constants, _ = variant_of(work).kernel()
    numbers = arguments_of(work)
    words = stage.view(-1).view(TENSORS[min(work.table.aligned_bytes, 8)])
    kernel[(min(numbers[0], 5),)](bases, pairs(entries), words, *numbers, **constants)


def run_copy(layers, stage, entries, sizes, *, to_pages):
    page_bytes, stride, per_block, align = sizes
    table = PageTable(0, len(layers), stride, page_bytes, align)
    work = PageCopy(table, 0, len(entries), 0, stage[0].numel(), per_block, to_pages)
    launch(work, addresses(layers), entries, stage)


@pytest.mark.parametrize(
    ("page_bytes", "padding", "offset", "align"),
    [
        pytest.param(256, 0, 0, 16, id="16 bytes at a time"),
        pytest.param(256, 64, 8, 8, id="padded pages at a multiple of 8"),
        pytest.param(252, 4, 4, 4, id="words of 4 bytes"),
        pytest.param(250, 6, 2, 2, id="words of 2 bytes"),
        pytest.param(33, 2, 5, 1, id="single bytes"),
        pytest.param(1152, 0, 0, 16, id="latents of MLA, not a power of two"),
    ],
)
@pytest.mark.parametrize(("per_block", "layers"), [(1, 3), (3, 5)])
def test_opaque_pages_come_back_and_others_are_left_alone(
    page_bytes, padding, offset, align, per_block, layers
):
    torch.manual_seed(0)
    count, stride = 20, page_bytes + padding
    sizes = (page_bytes, stride, per_block, align)
    raw = [aligned(offset, count * stride) for _ in range(layers)]
    for layer in raw:
        layer.copy_(random_bytes(count * stride))
    views = [layer.as_strided((count, page_bytes), (stride, 1)) for layer in raw]
    ids = torch.randperm(count)[: 3 * per_block].tolist()
    stage = aligned(0, 3, layers, per_block, page_bytes)
    run_copy(views, stage, [(page, at) for at, page in enumerate(ids)], sizes, to_pages=False)
    for block in range(3):
        for at, view in enumerate(views):
            assert torch.equal(stage[block, at], view[ids[block * per_block :][:per_block]])
    expected = [layer.clone() for layer in raw]
    others = [page for page in range(count) if page not in ids][: 3 * per_block - 1]
    entries = [(page, slot + 1) for slot, page in enumerate(others)]  # without the first page
    if not entries:
        return
    run_copy(views, stage, entries, sizes, to_pages=True)
    for at, layer in enumerate(raw):
        wanted = expected[at].as_strided((count, page_bytes), (stride, 1))
        for page, slot in entries:
            wanted[page] = stage[slot // per_block, at, slot % per_block]
        assert torch.equal(layer, expected[at])


def test_the_device_through_pytorch_copies_pages_by_the_kernel_as_by_operations():
    torch.manual_seed(3)
    count, size, per_block = 12, 48, 3
    raw = [random_bytes(count, size) for _ in range(3)]
    pages = Pages.uniform(tuple(layer.data_ptr() for layer in raw), size, size, count, per_block)
    layers = [page_words(layer, pages, word_of(raw, pages)) for layer in raw]
    saved, loaded = [[5, 1, 9], [0, 11, 7]], [Move(0, [3, 4], first=1), Move(0, [8, 2, 10])]
    stages, results = [], []
    before = [layer.clone() for layer in raw]
    for copies in (TorchCopies(layers), TritonCopies(layers, pages)):
        for layer, old in zip(raw, before, strict=True):
            layer.copy_(old)
        stages.append(empty_stage(layers, pages, 2))
        copies.pack(stages[-1], [Move(0, ids) for ids in saved])
        copies.unpack(stages[-1], loaded)
        results.append([layer.clone() for layer in raw])
    assert torch.equal(*stages)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert not torch.equal(results[0][0], before[0])


ORDERS = ["K and V apart", "NHD", "HND", "K and V in the last axis", "HND, K and V apart"]


def engine_pages(order, layers, count, shape, dtype):
    """Views [page, token, head, dim] of each layer's K and V, in an engine's order."""
    tokens, heads, size = shape
    views = []
    for _ in range(layers):

        def new(*shape):
            return torch.randn(*shape).to(dtype)

        if order == "K and V apart":
            views.append([new(count, tokens, heads, size) for _ in "kv"])
        elif order == "NHD":
            both = new(count, 2, tokens, heads, size)
            views.append([both[:, 0], both[:, 1]])
        elif order == "HND":
            both = new(count, 2, heads, tokens, size)
            views.append([both[:, 0].transpose(1, 2), both[:, 1].transpose(1, 2)])
        elif order == "K and V in the last axis":
            both = new(count, heads, tokens, 2 * size)
            views.append([both[..., :size].transpose(1, 2), both[..., size:].transpose(1, 2)])
        else:
            both = new(2, count, heads, tokens, size)
            views.append([both[0].transpose(1, 2), both[1].transpose(1, 2)])
    return views


def run_convert(views, stage, entries, per_block, first_head=0, *, to_pages):
    """`stage` is [block, layer, k|v, head, token, dim]."""
    matrices = [matrix for layer in views for matrix in layer]
    _, tokens, heads, size = matrices[0].shape
    item = matrices[0].element_size()
    page, token, head = (stride * item for stride in matrices[0].stride()[:3])
    head_bytes = size * item
    starts = [matrix.data_ptr() for matrix in matrices]
    align = math.gcd(16, head_bytes, page, token, head, *starts)
    work = PageConversion(
        PageTable(0, len(matrices), page, 0, align), 0, len(entries), 0,
        stage[0].numel() * item, per_block, to_pages, stage[0, 0, 0].numel() * item, heads, tokens,
        head_bytes, head, token,
    )  # fmt: skip
    first = first_head * per_block * tokens * size  # as if the stage began with these heads
    launch(work, addresses(matrices), entries, stage.view(-1)[first:])


def same(one, other):
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.bfloat16, (16, 2, 32)),
        (torch.float32, (4, 1, 24)),
        (torch.uint8, (8, 4, 16)),
        (torch.uint8, (4, 2, 6)),
    ],
)
def test_portable_blocks_are_head_major_and_fill_pages_of_another_order(order, dtype, shape):
    torch.manual_seed(1)
    (tokens, heads, size), layers, count, per_block, blocks = shape, 2, 7, 2, 2
    views = engine_pages(order, layers, count, shape, dtype)
    ids = torch.randperm(count)[: blocks * per_block].tolist()
    stage = torch.zeros(blocks, layers, 2, heads, per_block * tokens, size, dtype=dtype)
    run_convert(views, stage, [(p, at) for at, p in enumerate(ids)], per_block, to_pages=False)
    for block in range(blocks):
        pages = ids[block * per_block : (block + 1) * per_block]
        for layer, matrices in enumerate(views):
            for which, matrix in enumerate(matrices):
                wanted = matrix[pages].reshape(per_block * tokens, heads, size).transpose(0, 1)
                assert same(stage[block, layer, which], wanted)
    for other in (ORDERS[ORDERS.index(order) - 1], ORDERS[ORDERS.index(order) - 3]):
        into = engine_pages(other, layers, count, shape, dtype)
        wanted = [[matrix.clone() for matrix in matrices] for matrices in into]
        entries = [(p, slot) for slot, p in enumerate(ids)][1:]  # without the first page
        run_convert(into, stage, entries, per_block, to_pages=True)
        for layer in range(layers):
            for which in range(2):
                for page, slot in entries:
                    block, start = slot // per_block, slot % per_block * tokens
                    rows = stage[block, layer, which, :, start : start + tokens]
                    wanted[layer][which][page] = rows.transpose(0, 1)
                assert same(into[layer][which], wanted[layer][which])


def test_ranks_fill_one_block_together_and_another_number_of_ranks_reads_it():
    torch.manual_seed(2)
    layers, count, per_block, blocks, tokens, size, dtype = 2, 9, 2, 2, 8, 16, torch.bfloat16
    whole = engine_pages("NHD", layers, count, (tokens, 4, size), dtype)
    ids = torch.randperm(count)[: blocks * per_block].tolist()
    entries = [(page, at) for at, page in enumerate(ids)]
    stage = torch.zeros(blocks, layers, 2, 4, per_block * tokens, size, dtype=dtype)
    for ranks, heads, to_pages in ((4, 1, False), (2, 2, True)):
        for rank in range(ranks):
            first = rank * heads
            mine = engine_pages("HND", layers, count, (tokens, heads, size), dtype)
            pairs_of = [
                each
                for matrices in zip(mine, whole, strict=True)
                for each in zip(*matrices, strict=True)
            ]
            if not to_pages:
                for matrix, full in pairs_of:
                    matrix.copy_(full[:, :, first : first + heads])
            run_convert(mine, stage, entries, per_block, first, to_pages=to_pages)
            for matrix, full in pairs_of:
                assert same(matrix[ids], full[ids][:, :, first : first + heads])


def test_the_pause_writes_its_flag():
    flag = torch.zeros(1, dtype=torch.int32)
    pause[(1,)](flag)
    assert flag.tolist() == [1]
