"""What keys name besides tokens: no two requests that differ in it share a block."""

import os
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch

from holdfast.blocks.key import Chain
from holdfast.engines.vllm.request_identity import (
    AdapterDigests,
    MediaDigests,
    UnnamedInputError,
    adapter_settings,
    extras_of,
    identity_of,
)

BLOCK, TOKENS = 16, 64
LATER = 1 << 62
"""A time after which no file of the tests changes."""
HASHES = ("a" * 64, "b" * 64)


def item(**fields):
    """An image as vLLM gives it to the model."""
    return {name: SimpleNamespace(data=data) for name, data in fields.items()}


PIXELS = item(pixel_values=torch.arange(12.0).reshape(3, 4), patches=[torch.tensor(3), 7])


def image(identifier=HASHES[0], offset=20, length=8, modality="image", data=PIXELS):
    place = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(identifier=identifier, mm_position=place, modality=modality, data=data)


def request(**fields):
    plain = {"cache_salt": None, "lora_request": None, "mm_features": []}
    return SimpleNamespace(**(plain | fields))


def keys(asked, adapters=None, media=None, *, salted=True, lookahead=0):
    identity = identity_of(asked, b"", adapters or AdapterDigests(), media or MediaDigests())
    extras = extras_of(identity, BLOCK, salted=salted, lookahead=lookahead)
    chain = Chain(bytes(32), b"f" * 16, BLOCK, extras, lookahead=lookahead)
    chain.extend(range(TOKENS))
    return chain.keys


@pytest.fixture
def adapter(tmp_path):
    def make(content=b"weights", name="one", number=1):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "adapter_model.safetensors").write_bytes(content)
        return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(folder))

    return make


def test_an_image_counts_from_the_block_in_which_it_begins():
    plain, shown = keys(request()), keys(request(mm_features=[image()]))
    assert shown[0] == plain[0]
    assert set(shown[1:]).isdisjoint(plain)


def test_an_image_right_after_a_block_counts_in_it_if_its_content_depends_on_the_next_token():
    shown = request(mm_features=[image(offset=BLOCK)])
    assert keys(shown)[0] == keys(request())[0]
    assert keys(shown, lookahead=1)[0] != keys(request(), lookahead=1)[0]
    first = request(mm_features=[image(offset=0)])
    assert keys(first, lookahead=1)[0] != keys(request(), lookahead=1)[0]


@pytest.mark.parametrize(
    "other",
    [
        image(HASHES[1]),
        image(offset=21),
        image(length=9),
        image(modality="audio"),
        image(data=item(pixel_values=torch.ones(3, 4), patches=[torch.tensor(3), 7])),
        image(data=item(pixel_values=torch.arange(12.0).reshape(4, 3), patches=[3, 7])),
        image(data=item(pixel_values=torch.arange(12.0).reshape(3, 4), patches=[torch.tensor(4)])),
    ],
    ids=["content", "position", "length", "kind", "data", "shape", "nested"],
)
def test_images_that_differ_share_no_block_from_there_on(other):
    first, second = (keys(request(mm_features=[each])) for each in (image(), other))
    assert first[0] == second[0]
    assert set(first[1:]).isdisjoint(second)


def test_the_content_of_an_image_is_in_its_name_whatever_name_vllm_has_for_it():
    """A client may give one name to two images; vLLM hashes it with the processor's options."""
    equal = item(pixel_values=torch.arange(12.0).reshape(3, 4), patches=[torch.tensor(3), 7])
    first, same, other = (
        keys(request(mm_features=[image(data=data)]))
        for data in (PIXELS, equal, item(pixel_values=torch.zeros(3, 4)))
    )
    assert first == same
    assert set(other[1:]).isdisjoint(first)


def test_a_name_that_has_had_two_contents_in_an_engine_is_declined_from_then_on():
    """The engine uses what it has computed for a name again."""
    media = MediaDigests()
    one, other = (image(data=item(pixel_values=torch.full((2,), n))) for n in (1.0, 2.0))
    assert keys(request(mm_features=[one]), media=media)
    for each in (other, one):
        with pytest.raises(UnnamedInputError, match="has had another content in this engine"):
            keys(request(mm_features=[each]), media=media)
    assert keys(request(mm_features=[image(HASHES[1])]), media=media)


@pytest.mark.parametrize(
    "first",
    [
        request(mm_features=[image(data=None)]),
        request(mm_features=[image("photo-1"), image(data=item(pixel_values=torch.ones(2)))]),
        request(
            lora_request=SimpleNamespace(lora_name="x", lora_int_id=1, lora_path="/nowhere"),
            mm_features=[image(data=item(pixel_values=torch.ones(2)))],
        ),
    ],
    ids=["content elsewhere", "beside another image", "with an adapter"],
)
def test_a_name_first_used_by_a_declined_request_has_no_other_content(first):
    """The engine keeps what it computes for a declined request, too."""
    media = MediaDigests()
    with pytest.raises(UnnamedInputError):
        keys(first, media=media)
    with pytest.raises(UnnamedInputError, match="has had another content in this engine"):
        keys(request(mm_features=[image()]), media=media)


@pytest.mark.parametrize("data", [None, item(pixel_values=None), item(address=0, monotonic_id=1)])
def test_an_image_whose_content_is_in_another_process_is_declined(data):
    with pytest.raises(UnnamedInputError, match="--mm-processor-cache-type lru") as raised:
        keys(request(mm_features=[image(data=data)]))
    assert raised.value.reason == "multimodal"


def test_an_image_with_content_that_has_no_digest_is_declined():
    """The text of a large array leaves elements out."""
    with pytest.raises(UnnamedInputError, match="type ndarray has no digest"):
        keys(request(mm_features=[image(data=item(sizes=np.arange(2_000)))]))


def test_a_second_image_leaves_the_keys_before_it():
    one, two = (
        keys(request(mm_features=[image()])),
        keys(request(mm_features=[image(), image(HASHES[1], offset=50)])),
    )
    assert one[:3] == two[:3]
    assert one[3] != two[3]


@pytest.mark.parametrize("named", ["photo-1", "", None, "A" * 64])
def test_an_image_whose_name_is_not_its_hash_is_declined(named):
    with pytest.raises(UnnamedInputError, match="no hash of its content") as raised:
        keys(request(mm_features=[image(named)]))
    assert raised.value.reason == "multimodal"


def test_keys_of_the_public_domain_name_all_but_the_salt():
    salted = request(cache_salt="s", mm_features=[image()])
    assert keys(salted, salted=False) == keys(request(mm_features=[image()]))
    assert set(keys(salted)).isdisjoint(keys(salted, salted=False))


def test_an_adapter_counts_from_the_first_block(adapter):
    adapters = AdapterDigests(since_ns=LATER)
    assert set(keys(request(lora_request=adapter()), adapters)).isdisjoint(keys(request()))


def test_adapters_of_equal_content_share_blocks_whatever_they_are_called(adapter):
    adapters = AdapterDigests(since_ns=LATER)
    one = keys(request(lora_request=adapter()), adapters)
    two = keys(request(lora_request=adapter(name="two", number=2)), adapters)
    other = keys(request(lora_request=adapter(b"other", "three", 3)), adapters)
    assert one == two
    assert set(one).isdisjoint(other)


def test_settings_of_adapters_separate_keys(adapter):
    lora = request(lora_request=adapter())
    config = SimpleNamespace(lora_dtype="bfloat16", target_modules=None)
    restricted = SimpleNamespace(lora_dtype="bfloat16", target_modules=["q_proj"])
    found = [
        keys(lora, AdapterDigests(adapter_settings(each), LATER))[0]
        for each in (None, config, restricted)
    ]
    assert len(set(found)) == 3


def test_an_adapter_replaced_under_its_name_is_declined(adapter, caplog):
    adapters = AdapterDigests(since_ns=LATER)
    lora = request(lora_request=adapter())
    before = keys(lora, adapters)
    adapter(b"new weights of another length")
    for _ in range(2):
        with pytest.raises(UnnamedInputError):
            keys(lora, adapters)
    assert caplog.text.count("its files changed after their first use") == 1
    # Loaded again from another folder, it is another adapter.
    reloaded = request(lora_request=adapter(b"new weights of another length", "two", number=2))
    assert set(keys(reloaded, adapters)).isdisjoint(before)


def test_an_adapter_loaded_again_by_its_name_and_path_with_other_files_is_declined(adapter, caplog):
    """vLLM's own cache names pages by the two, so it may have pages of either content."""
    adapters = AdapterDigests(since_ns=LATER)
    keys(request(lora_request=adapter(b"one", number=1)), adapters)
    reloaded = request(lora_request=adapter(b"two", number=2))
    for _ in range(2):
        with pytest.raises(UnnamedInputError, match="has no digest"):
            keys(reloaded, adapters)
    assert caplog.text.count("it may have had another content in this engine") == 1
    again = request(lora_request=adapter(b"two", number=3))
    with pytest.raises(UnnamedInputError, match="has no digest"):
        keys(again, adapters)


def test_an_adapter_that_appears_after_its_first_request_is_declined(adapter, tmp_path):
    """vLLM may have loaded it before its folder was exchanged."""
    adapters = AdapterDigests(since_ns=LATER)
    path = str(tmp_path / "one")
    first = SimpleNamespace(lora_name="one", lora_int_id=1, lora_path=path)
    for lora in (lambda: first, adapter):
        with pytest.raises(UnnamedInputError):
            keys(request(lora_request=lora()), adapters)


def test_an_adapter_loaded_again_by_its_name_and_path_with_equal_files_keeps_its_keys(adapter):
    adapters = AdapterDigests(since_ns=LATER)
    first, second = (keys(request(lora_request=adapter(number=n)), adapters) for n in (1, 2))
    assert first == second


def test_an_adapter_that_changed_after_the_start_of_the_engine_is_declined(adapter):
    lora = adapter()
    file = os.path.join(lora.lora_path, "adapter_model.safetensors")  # noqa: PTH118
    adapters = AdapterDigests(since_ns=os.stat(file).st_ctime_ns - 1)  # noqa: PTH116
    with pytest.raises(UnnamedInputError) as raised:
        keys(request(lora_request=lora), adapters)
    assert raised.value.reason == "lora"


def test_an_adapter_without_files_is_declined(tmp_path):
    lora = SimpleNamespace(lora_name="x", lora_int_id=1, lora_path=str(tmp_path))
    with pytest.raises(UnnamedInputError, match="no file that ends in"):
        keys(request(lora_request=lora))
