"""Pages of equal size, read with another dtype, layout or part of the heads.

A page saved as bf16 was read as fp16; vLLM 0.26 packed pages otherwise, at the same size, and
every store that knew only sizes served them; equal-sized reads returned other ranks' heads.
Threads: https://github.com/sgl-project/sglang/issues/33268
https://github.com/LMCache/LMCache/issues/4463 https://github.com/ai-dynamo/dynamo/issues/14416
https://github.com/vllm-project/vllm/issues/55191
"""

import msgspec
import numpy as np
import pytest

from holdfast.blocks.fingerprint import Fingerprint
from holdfast.blocks.layout import WHOLE, ExactLayout, HeadState, Layout

SAVED = Layout.portable(layers=2, kv_heads=2, head_size=16, dtype="bfloat16", block_tokens=16)
TOKENS = np.arange(48)


def namespace(layout):
    return Fingerprint("model digest", layout, "{}", "none", "none")


PAGES = ExactLayout(
    dtype="bfloat16",
    block_tokens=16,
    arrangement="vllm-0.25",
    layers=2,
    kv_heads=2,
    head_size=16,
    page_tokens=16,
    page_bytes=SAVED.payload_bytes // 2,
    slice=WHOLE,
)
OTHER_RANK = msgspec.structs.replace(WHOLE, tp_rank=1, tp_size=2)
CASES = {
    "other dtype": (SAVED, msgspec.structs.replace(SAVED, dtype="float16")),
    "other heads": (SAVED, msgspec.structs.replace(SAVED, layers=(HeadState(4, 8, 8),) * 2)),
    "other layers": (SAVED, msgspec.structs.replace(SAVED, layers=(HeadState(2, 32, 32),))),
    "keys and values apart": (
        SAVED,
        msgspec.structs.replace(SAVED, layers=(HeadState(2, 8, 24),) * 2),
    ),
    "pages of an engine": (SAVED, PAGES),
    "other packing": (PAGES, msgspec.structs.replace(PAGES, arrangement="vllm-0.26")),
    "other rank": (PAGES, msgspec.structs.replace(PAGES, slice=OTHER_RANK)),
}


@pytest.mark.parametrize(("saved", "read"), CASES.values(), ids=CASES)
def test_blocks_of_equal_size_and_another_layout_are_not_shared(open_store, saved, read):
    assert read.payload_bytes == saved.payload_bytes
    store = open_store()
    blocks = np.ones((3, saved.payload_bytes), np.uint8)
    store.session(namespace(saved)).save(TOKENS, blocks)
    into = np.zeros_like(blocks)
    assert store.session(namespace(read)).fetch(TOKENS, into).tokens == 0
    assert not into.any()
    assert store.session(namespace(saved)).fetch(TOKENS, into).tokens == 48
