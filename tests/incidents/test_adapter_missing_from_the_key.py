"""KV computed with one LoRA adapter, served to another, or to the model without one.

The name of a block did not say which adapter, model or weights it was computed with.
Threads: https://github.com/vllm-project/vllm/issues/44250
https://github.com/LMCache/LMCache/issues/2961
https://github.com/sgl-project/sglang/issues/31920
https://github.com/InternLM/lmdeploy/issues/4930
"""

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from holdfast.blocks.fingerprint import Fingerprint, Meaning
from holdfast.blocks.layout import Layout
from holdfast.errors import BlockError
from holdfast.testing.embedded import fingerprint_for

LAYOUT = Layout.portable(layers=2, kv_heads=2, head_size=16, dtype="float16", block_tokens=16)
PLAIN = fingerprint_for(LAYOUT)
TOKENS = np.arange(64)


@pytest.mark.parametrize(
    "change", [{"adapter": "a1"}, {"model": "other weights"}, {"kv_quantisation": "fp8"}]
)
def test_blocks_computed_with_another_adapter_or_model_are_in_another_namespace(open_store, change):
    store = open_store()
    other = Fingerprint(msgspec.structs.replace(PLAIN.meaning, **change), LAYOUT)
    blocks = np.ones((4, LAYOUT.raw_bytes), np.uint8)
    store.session(PLAIN).save(TOKENS, blocks)
    assert store.session(PLAIN).cover(TOKENS) == 64
    assert store.session(other).cover(TOKENS) == 0
    assert store.session(other).fetch(TOKENS, np.zeros_like(blocks)).tokens == 0
    assert store.session(other).save(TOKENS, 2 * blocks) == 4
    into = np.zeros_like(blocks)
    assert store.session(PLAIN).fetch(TOKENS, into).tokens == 64
    assert (into == 1).all()


@pytest.mark.vllm
def test_the_connector_names_the_content_of_an_adapter(tmp_path):
    identity = pytest.importorskip("holdfast.engines.vllm.request_identity")
    adapters = identity.AdapterDigests(since_ns=1 << 62)
    media = identity.MediaDigests()
    found = []
    for number, content in enumerate((b"one", b"two", b"one"), 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(content)
        adapter = SimpleNamespace(lora_name="same", lora_int_id=number, lora_path=str(folder))
        asked = SimpleNamespace(cache_salt=None, lora_request=adapter, mm_features=[])
        found.append(identity.extras_of(identity.identity_of(asked, b"", adapters, media), 16)[0])
    assert found[0] == found[2] != found[1]
    plain = SimpleNamespace(cache_salt=None, lora_request=None, mm_features=[])
    assert identity.extras_of(identity.identity_of(plain, b"", adapters, media), 16) == {}


@pytest.mark.parametrize("adapter", [None, ""])
def test_a_fingerprint_without_an_adapter_is_refused(adapter):
    fields = msgspec.to_builtins(PLAIN.meaning)
    fields["adapter"] = adapter
    given = {name: value for name, value in fields.items() if value is not None}
    with pytest.raises((BlockError, msgspec.ValidationError), match="adapter"):
        msgspec.convert(given, Meaning)
