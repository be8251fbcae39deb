"""KV state served although one property of it differed: other weights, dtype, pages, ranks, ropes.

Sizes and names were equal, so engines and stores took the bytes for their own. Each case changes
one property, keeps the bytes' number, and must be a miss in both directions. Threads:
https://github.com/vllm-project/vllm/issues/49261 https://github.com/sgl-project/sglang/issues/24758
https://github.com/sgl-project/sglang/issues/33268 https://github.com/sgl-project/sglang/issues/36420
https://github.com/vllm-project/vllm/issues/55904 https://github.com/LMCache/LMCache/issues/4463
https://github.com/ai-dynamo/dynamo/issues/14416 https://github.com/vllm-project/vllm/issues/55191
https://github.com/vllm-project/vllm/issues/56311 https://github.com/vllm-project/vllm/issues/44250
https://github.com/LMCache/LMCache/issues/4825 https://github.com/LMCache/LMCache/issues/1139
https://github.com/vllm-project/vllm/issues/42625 https://github.com/sgl-project/sglang/issues/30321
"""

import msgspec
import numpy as np
import pytest

from holdfast.blocks.fingerprint import Fingerprint, KvGroup, Meaning
from holdfast.blocks.layout import (
    ExactLayout,
    HeadState,
    LatentState,
    Layout,
    PortableLayout,
    RankSlice,
)

PORTABLE = Layout.portable(layers=2, kv_heads=2, head_size=16, dtype="bfloat16", block_tokens=16)
EXACT = ExactLayout(
    dtype="bfloat16",
    block_tokens=16,
    layers=2,
    kv_heads=2,
    head_size=16,
    page_tokens=16,
    page_bytes=PORTABLE.raw_bytes // 2,
    packing="vec",
    engine="vllm",
    engine_version="0.31.0",
    backend="CPU_ATTN",
    device="cpu",
    slice=RankSlice(0, 1, 0, 1),
)
MEANING = Meaning(
    model="digest of config and weights",
    positions='{"rope_theta":10000.0}',
    adapter="none",
    kv_quantisation="none",
    kv_scales="none",
    naming="tokens",
    block_tokens=16,
    kv_group=KvGroup.all_layers(2),
)
TOKENS = np.arange(48)
BLOCKS = np.ones((3, PORTABLE.raw_bytes), np.uint8)


def meaning(**changes):
    return Fingerprint(msgspec.structs.replace(MEANING, **changes), PORTABLE)


def portable(layers, **changes):
    layout = msgspec.structs.replace(PORTABLE, layers=layers, **changes)
    group = KvGroup.all_layers(len(layers))
    return Fingerprint(msgspec.structs.replace(MEANING, kv_group=group), layout)


def exact(**changes):
    layout = msgspec.structs.replace(EXACT, **changes)
    group = KvGroup.all_layers(layout.layers)
    return Fingerprint(msgspec.structs.replace(MEANING, kv_group=group), layout)


def longer_blocks():
    layers = (HeadState(1, 16, 16),) * 2  # half the heads, twice the tokens
    layout = PortableLayout("bfloat16", 32, layers)
    return Fingerprint(msgspec.structs.replace(MEANING, block_tokens=32), layout)


SAVED, PAGES = meaning(), exact()
SECOND_RANK = RankSlice(tp_rank=1, tp_size=2, pp_rank=0, pp_size=1)
FIRST_RANK = msgspec.structs.replace(SECOND_RANK, tp_rank=0)
CASES = {
    "model and weights": (SAVED, meaning(model="digest of others")),
    "rope and overrides": (SAVED, meaning(positions='{"rope_theta":500000.0}')),
    "adapter": (SAVED, meaning(adapter="digest of a LoRA adapter")),
    "KV quantisation": (SAVED, meaning(kv_quantisation="int8 by channel")),
    "KV scales": (SAVED, meaning(kv_scales="digest of scales")),
    "input of the keys": (SAVED, meaning(naming="hashes of the engine")),
    "block size": (SAVED, longer_blocks()),
    "attention of the layers": (SAVED, meaning(kv_group=KvGroup("recurrent", 0, (0, 1)))),
    "window of the layers": (
        meaning(kv_group=KvGroup("window", 1024, (0, 1))),
        meaning(kv_group=KvGroup("window", 4096, (0, 1))),
    ),
    "which layers of the model": (SAVED, meaning(kv_group=KvGroup("full", 0, (0, 2)))),
    "KV dtype": (SAVED, portable(PORTABLE.layers, dtype="float16")),
    "head count": (SAVED, portable((HeadState(4, 8, 8),) * 2)),
    "layer count": (SAVED, portable((HeadState(2, 8, 8),) * 4)),
    "sizes of keys and values": (SAVED, portable((HeadState(2, 8, 24),) * 2)),
    "latent or heads": (SAVED, portable((LatentState(64),) * 2)),
    "portable or exact": (SAVED, PAGES),
    "dtype of pages": (PAGES, exact(dtype="float16")),
    "page layout": (PAGES, exact(page_tokens=8, page_bytes=EXACT.page_bytes // 2)),
    "head count of pages": (PAGES, exact(kv_heads=4, head_size=8)),
    "layer count of pages": (PAGES, exact(layers=4, page_bytes=EXACT.page_bytes // 2)),
    "model runner, instruction set, fused packing": (PAGES, exact(packing="amx")),
    "engine": (PAGES, exact(engine="sglang")),
    "engine version": (PAGES, exact(engine_version="0.32.0")),
    "attention backend": (PAGES, exact(backend="FLASHINFER")),
    "device": (PAGES, exact(device="NVIDIA H100")),
    "tensor-parallel size": (PAGES, exact(slice=FIRST_RANK)),
    "pipeline size": (PAGES, exact(slice=RankSlice(0, 1, 0, 2))),
    "tensor-parallel rank": (exact(slice=FIRST_RANK), exact(slice=SECOND_RANK)),
    "pipeline stage": (
        exact(slice=RankSlice(0, 1, 0, 2)),
        exact(slice=RankSlice(0, 1, 1, 2)),
    ),
}


def check_no_hit(saved, read):
    """Save in one session; check that the other finds nothing, and the first one everything."""
    assert read.namespace != saved.namespace
    assert saved.save(TOKENS, BLOCKS) == 3
    rows = len(TOKENS) // read.namespace.block_tokens
    into = np.zeros((rows, BLOCKS.shape[1]), np.uint8)
    assert read.cover(TOKENS) == 0
    assert read.fetch(TOKENS, into).tokens == 0
    assert not into.any()
    into = np.zeros_like(BLOCKS)
    assert saved.fetch(TOKENS, into).tokens == 48
    assert (into == BLOCKS).all()


@pytest.mark.parametrize(("one", "other"), CASES.values(), ids=CASES)
def test_a_difference_in_one_field_is_never_a_hit(open_store, one, other):
    assert one.representation.raw_bytes == other.representation.raw_bytes
    for saved, read in ((one, other), (other, one)):
        if saved.representation.block_tokens == 16:
            store = open_store()
            check_no_hit(store.session(saved), store.session(read))


def differences(one, other):
    """Yield the names of the fields in which two structs of one type differ, and their types."""
    if isinstance(one, msgspec.Struct) and type(one) is type(other):
        for field in one.__struct_fields__:
            if getattr(one, field) != getattr(other, field):
                yield f"{type(one).__name__}.{field}"
                yield from differences(getattr(one, field), getattr(other, field))


def test_every_field_of_a_fingerprint_has_a_case():
    kinds = (Fingerprint, Meaning, KvGroup, PortableLayout, ExactLayout, RankSlice)
    fields = {f"{kind.__name__}.{field}" for kind in kinds for field in kind.__struct_fields__}
    found = {name for case in CASES.values() for name in differences(*case)}
    assert fields - found == {"ExactLayout.block_tokens"}  # follows from the meaning's


def test_another_tenant_is_never_a_hit(open_store):
    store = open_store()
    check_no_hit(store.session(SAVED, "default"), store.session(SAVED, "acme"))


def test_fingerprints_that_agree_in_their_first_eight_bytes_are_never_a_hit(
    open_store, monkeypatch
):
    """Events of vLLM carry 64 bits of a hash, and an early LMCache kept no more."""
    store = open_store()
    monkeypatch.setattr(
        Fingerprint, "digest", lambda self: b"equal 64" + self.meaning.model[:8].encode()
    )
    one, other = meaning(model="01234567"), meaning(model="01234568")
    check_no_hit(store.session(one), store.session(other))
