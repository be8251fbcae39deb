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
from holdfast.blocks.layout import Layout

SAVED = Layout.portable(layers=2, kv_heads=2, head_size=16, dtype="bfloat16", block_tokens=16)
TOKENS = np.arange(48)


def namespace(layout):
    return Fingerprint("model digest", layout, "{}", "none", "none")


READ = {
    "other dtype": msgspec.structs.replace(SAVED, dtype="float16"),
    "other packing": msgspec.structs.replace(SAVED, arrangement="vllm-0.26"),
    "other heads": msgspec.structs.replace(SAVED, kv_heads=4, head_size=8),
    "other rank": msgspec.structs.replace(
        SAVED, slice=msgspec.structs.replace(SAVED.slice, tp_rank=1, tp_size=2)
    ),
}


@pytest.mark.parametrize("read", READ.values(), ids=READ)
def test_pages_of_equal_size_and_another_layout_are_not_shared(open_store, read):
    assert read.payload_bytes == SAVED.payload_bytes
    store = open_store()
    blocks = np.ones((3, SAVED.payload_bytes), np.uint8)
    store.session(namespace(SAVED)).save(TOKENS, blocks)
    into = np.zeros_like(blocks)
    assert store.session(namespace(read)).fetch(TOKENS, into).tokens == 0
    assert not into.any()
    assert store.session(namespace(SAVED)).fetch(TOKENS, into).tokens == 48
