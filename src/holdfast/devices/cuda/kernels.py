"""Kernels in Triton that copy an engine's pages to and from a stage in GPU memory.

Both take the pages and their slots as `rows`, pairs of 32-bit integers: a page, and its slot, which
is block * per_block + page of the block. Words are 1 to 8 bytes, so sizes and strides are in words.
`ALIGN` divides every address of a page, in bytes: with 16, threads move 16 bytes at a time.

Only numbers that a compiled kernel is made for are `constexpr`. The others are not specialised,
because Triton compiles again if a number becomes 1 or a multiple of 16. Loop bounds are
`constexpr`, because Triton's interpreter needs plain numbers there.
"""

from __future__ import annotations

import triton
import triton.language as tl

LAYERS_PER_JOB = 4
"""Layers of a page that one job of `copy_pages` copies, so that it reads the page's number once."""


@triton.jit
def _copy_words(to, source, COUNT: tl.constexpr, CHUNK: tl.constexpr):
    for start in range(0, COUNT, CHUNK):
        at = start + tl.arange(0, CHUNK)
        tl.store(to + at, tl.load(source + at, mask=at < COUNT), mask=at < COUNT)


@triton.jit(
    do_not_specialize=[
        "jobs",
        "layers",
        "jobs_per_page",
        "per_block",
        "block_words",
        "stride_words",
    ]
)
def copy_pages(
    bases,
    rows,
    stage,
    jobs,
    layers,
    jobs_per_page,
    per_block,
    block_words,
    stride_words,
    PAGE_WORDS: tl.constexpr,
    WORD: tl.constexpr,
    ALIGN: tl.constexpr,
    CHUNK: tl.constexpr,
    JOB_LAYERS: tl.constexpr,
    TO_PAGES: tl.constexpr,
):
    """Copy opaque pages to or from a stage `[block][layer][page of the block][word]`.

    `bases` has the address of each layer. One job is one page of up to `JOB_LAYERS` layers;
    `jobs_per_page` jobs cover all layers.
    """
    job = tl.program_id(0)
    programs = tl.num_programs(0)
    stage_words = stage.to(tl.pointer_type(WORD))
    while job < jobs:
        item = job // jobs_per_page
        first = (job - item * jobs_per_page) * JOB_LAYERS
        page = tl.load(rows + 2 * item).to(tl.int64)
        slot = tl.load(rows + 2 * item + 1)
        block = slot // per_block
        in_block = (slot - block * per_block).to(tl.int64)
        for step in range(JOB_LAYERS):
            layer = first + step
            if layer < layers:
                base = tl.load(bases + layer).to(tl.pointer_type(WORD))
                in_stage = (layer * per_block + in_block) * PAGE_WORDS
                paged = tl.multiple_of(base + page * stride_words, ALIGN)
                staged = tl.multiple_of(
                    stage_words + block.to(tl.int64) * block_words + in_stage, ALIGN
                )
                if TO_PAGES:
                    _copy_words(paged, staged, PAGE_WORDS, CHUNK)
                else:
                    _copy_words(staged, paged, PAGE_WORDS, CHUNK)
        job += programs


@triton.jit(
    do_not_specialize=[
        "jobs",
        "matrices",
        "heads",
        "per_block",
        "page_stride",
        "token_units",
        "head_stride",
        "block_words",
        "matrix_words",
        "first_head",
    ]
)
def convert_pages(
    bases,
    rows,
    stage,
    jobs,
    matrices,
    heads,
    per_block,
    page_stride,
    token_units,
    head_stride,
    block_words,
    matrix_words,
    first_head,
    WORD: tl.constexpr,
    ALIGN: tl.constexpr,
    ALIGN_WORDS: tl.constexpr,
    TOKENS: tl.constexpr,
    TOKENS_POW2: tl.constexpr,
    HEAD_WORDS: tl.constexpr,
    HEAD_POW2: tl.constexpr,
    TO_PAGES: tl.constexpr,
):
    """Copy pages of any order of elements to or from a stage `[block][matrix][head][token][word]`.

    A matrix is K or V of a layer; `bases` has the address of each, and matrices are `matrix_words`
    apart in the stage. The engine's heads are those from `first_head` on. One job is one head of
    one page of one matrix: `TOKENS` x `HEAD_WORDS` words, contiguous in the stage. `token_units`
    is the distance of two tokens in units of `ALIGN` bytes, so that the compiler knows its divisor.
    """
    job = tl.program_id(0)
    programs = tl.num_programs(0)
    token = tl.arange(0, TOKENS_POW2)[:, None]
    word = tl.arange(0, HEAD_POW2)[None, :]
    inside = (token < TOKENS) & (word < HEAD_WORDS)
    stage_words = stage.to(tl.pointer_type(WORD))
    while job < jobs:
        rest = job // heads
        head = job - rest * heads
        item = rest // matrices
        matrix = rest - item * matrices
        base = tl.load(bases + matrix).to(tl.pointer_type(WORD))
        page = tl.load(rows + 2 * item).to(tl.int64)
        slot = tl.load(rows + 2 * item + 1)
        block = slot // per_block
        in_block = slot - block * per_block
        start = tl.multiple_of(base + page * page_stride + head.to(tl.int64) * head_stride, ALIGN)
        paged = start + token * (token_units * ALIGN_WORDS) + word
        in_stage = block.to(tl.int64) * block_words + matrix.to(tl.int64) * matrix_words
        in_matrix = (first_head + head) * per_block + in_block
        in_stage += in_matrix.to(tl.int64) * (TOKENS * HEAD_WORDS)
        staged = tl.multiple_of(stage_words + in_stage, ALIGN) + token * HEAD_WORDS + word
        if TO_PAGES:
            tl.store(paged, tl.load(staged, mask=inside), mask=inside)
        else:
            tl.store(staged, tl.load(paged, mask=inside), mask=inside)
        job += programs


@triton.jit
def pause(flag):
    """Store one number: the least work that a copy engine must wait for between two copies."""
    tl.store(flag, 1)
