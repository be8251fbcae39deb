"""What makes the pages of two servers different: each field alone gives another fingerprint."""

import json
import os
import time
from types import SimpleNamespace

import pytest
import torch
from sglang_stubs import ARGUMENTS, HiCacheStorageConfig, HostPool, MLATokenToKVPoolHost

from holdfast.client.weights_digest import NoDigestError
from holdfast.engines.sglang import describe
from holdfast.engines.sglang.describe import (
    NAMING,
    PoolDescription,
    fingerprint_of,
    refuse_images,
    served_model,
)
from holdfast.engines.sglang.options import StorageOptions
from holdfast.errors import ConfigError

NODE = "unix:///run/holdfast/node.sock"
CONFIG = {"model_type": "llama", "rope_theta": 10_000.0, "num_hidden_layers": 2}


@pytest.fixture
def folder(tmp_path):
    return model_folder(tmp_path / "model")


def model_folder(path, config=CONFIG, weights=b"weights"):
    """Make a folder of a model whose files were there before this process."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "adapter_config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(weights)
    return path


def digest(folder, arguments=None, config=None, pool=None, described=None, **served):
    """Return the fingerprint of a server's KV pool, with these changes."""
    options = StorageOptions(NODE, model_digest=served.pop("name", "v1"))
    given = SimpleNamespace(**{**ARGUMENTS, "model_path": str(folder), **(arguments or {})})
    facts = {"version": "0.5.23", "device": "cpu AVX512", **served}
    model = served_model(given, options, **facts)
    pool = HostPool() if pool is None else pool
    described = described or PoolDescription("kv", "ranges", 512)
    return fingerprint_of(model, HiCacheStorageConfig(**(config or {})), pool, described).digest()


@pytest.mark.parametrize(
    "arguments",
    [
        {"json_model_override_args": '{"rope_scaling": {"factor": 2.0}}'},
        {"quantization": "fp8"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"dtype": "bfloat16"},
        {"attention_backend": "triton"},
        {"context_length": 1024},
        {"load_format": "dummy"},
        {"speculative_algorithm": "EAGLE"},
        {"model_impl": "transformers"},
        {"trust_remote_code": True, "revision": "abc"},
        {"forward_hooks": [{"hook_factory": "steer.make", "target_modules": ["model.layers.1"]}]},
        {"kt_method": "AMXINT4", "kt_num_gpu_experts": 2},
        {"flashinfer_mxfp4_moe_precision": "bf16"},
        {"enable_decoder_swa_bounded_replay": True},
        {"mm_process_config": {"image": {"max_pixels": 1}}},
    ],
)
def test_an_argument_that_changes_pages_changes_the_name(folder, arguments):
    assert digest(folder, arguments) != digest(folder)


@pytest.mark.parametrize("length", [None, 4097, 131_072])
def test_keys_that_depend_on_the_other_requests_of_a_batch_are_refused(tmp_path, length):
    """With LongRoPE SGLang takes the long factors for a batch with one position beyond 4096."""
    rope = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    config = CONFIG | {"rope_scaling": rope, "max_position_embeddings": 131_072}
    inner = {"text_config": config | {"original_max_position_embeddings": 4096}}
    for number, given in enumerate([inner["text_config"], inner]):
        folder = model_folder(tmp_path / str(number), given)
        with pytest.raises(ConfigError, match=r"LongRoPE.*start it with --context-length 4096"):
            digest(folder, {"context_length": length})
        assert digest(folder, {"context_length": 4096})
    unknown = model_folder(tmp_path / "unknown", config)
    with pytest.raises(ConfigError, match="LongRoPE"):
        digest(unknown, {"context_length": 4096})


@pytest.mark.parametrize(
    "config",
    [
        {"tp_size": 2},
        {"tp_rank": 1, "tp_size": 2},
        {"pp_size": 2},
        {"pp_rank": 1, "pp_size": 2},
        {"attn_cp_size": 2},
        {"dcp_size": 2, "logical_page_size": 8},
    ],
)
def test_a_rank_or_a_size_changes_the_name(folder, config):
    assert digest(folder, config=config) != digest(folder)


def test_ranks_of_one_size_have_names_of_their_own_unless_they_hold_copies(folder):
    ranks = [{"tp_rank": rank, "tp_size": 2, "is_mla_model": True} for rank in (0, 1)]
    copies = [digest(folder, config=rank, pool=MLATokenToKVPoolHost()) for rank in ranks]
    assert copies[0] == copies[1]
    shares = [digest(folder, config=rank) for rank in ranks]
    assert shares[0] != shares[1]


def test_the_configuration_weights_version_and_device_change_the_name(folder, tmp_path):
    other = model_folder(tmp_path / "other", {**CONFIG, "rope_theta": 5.0})
    assert digest(other) != digest(folder)
    assert digest(folder, name="v2") != digest(folder)
    assert digest(folder, version="0.5.24") != digest(folder)
    assert digest(folder, device="NVIDIA H100") != digest(folder)


def test_the_folder_itself_is_no_part_of_the_name(folder, tmp_path):
    assert digest(model_folder(tmp_path / "copy")) == digest(folder)


def test_the_pool_its_data_type_and_its_layout_change_the_name(folder):
    assert digest(folder, described=PoolDescription("swa", "ranges", 512)) != digest(folder)
    assert digest(folder, described=PoolDescription("kv", "flat", 512)) != digest(folder)
    assert digest(folder, described=PoolDescription("kv", "ranges", 256)) != digest(folder)
    assert digest(folder, pool=HostPool(dtype=torch.bfloat16)) != digest(folder)
    page_head = HostPool()
    page_head.layout = "page_head"
    assert digest(folder, pool=page_head) != digest(folder)


def test_the_size_of_the_pool_is_no_part_of_the_name(folder):
    assert digest(folder, pool=HostPool(pages=99)) == digest(folder)


def adapter_in(place, weights):
    """Make the folder of an adapter; return the argument that names it."""
    model_folder(place, weights=weights)
    os.utime(place / "model.safetensors")
    return {"lora_paths": [SimpleNamespace(lora_name="a", lora_path=str(place))]}


def test_an_adapter_that_was_replaced_under_its_name_is_another(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(describe, "process_start_ns", lambda: time.time_ns() + 10**9)
    first = digest(folder, adapter_in(tmp_path / "adapter", b"one"))
    assert first != digest(folder)
    assert first != digest(folder, adapter_in(tmp_path / "adapter", b"two"))


def test_an_adapter_that_changed_after_the_start_is_refused(folder, tmp_path):
    with pytest.raises(NoDigestError, match=r"adapter 'a' changed after .* start it again"):
        digest(folder, adapter_in(tmp_path / "adapter", b"one"))


def test_the_draft_model_is_part_of_the_name(folder, tmp_path):
    def draft(config):
        place = model_folder(tmp_path / "draft", config)
        return {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": str(place)}

    assert digest(folder, draft(CONFIG)) != digest(folder, draft({**CONFIG, "rope_theta": 1.0}))


def test_the_name_says_that_sglang_names_pages(folder):
    options = StorageOptions(NODE, model_digest="v1")
    given = SimpleNamespace(**{**ARGUMENTS, "model_path": str(folder)})
    model = served_model(given, options, "0.5.23", "cpu")
    described = PoolDescription("kv", "ranges", 512)
    found = fingerprint_of(model, HiCacheStorageConfig(), HostPool(), described)
    assert found.meaning.naming == NAMING


def test_weights_that_changed_after_the_start_are_refused(folder):
    with pytest.raises(NoDigestError, match="changed after this engine's process started"):
        digest(folder, name="")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"load_format": "dummy"}, "load_format is dummy"),
        ({"load_format": "remote_instance"}, "load_format is remote_instance"),
        ({"load_format": "presharded"}, "load_format is presharded"),
        ({"weight_cache_mode": "client"}, "weight_cache_mode is client"),
        ({"forward_hooks": [{"hook_factory": "steer.make"}]}, "forward_hooks is set"),
        ({"kt_weight_path": "/experts"}, "kt_weight_path is set"),
    ],
)
def test_weights_and_code_that_are_not_in_the_files_of_the_model_need_a_name(
    folder, arguments, named
):
    with pytest.raises(NoDigestError, match=f"{named}, so the files.*set model_digest"):
        digest(folder, arguments, name="")
    assert digest(folder, arguments, name="v1")


def test_a_model_without_files_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(NoDigestError, match="nothing identifies the model"):
        digest(tmp_path / "missing")


def test_images_are_refused_unless_their_names_are_accepted():
    images, text = SimpleNamespace(is_multimodal=True), SimpleNamespace(is_multimodal=False)
    refuse_images(text, StorageOptions(NODE))
    refuse_images(images, StorageOptions(NODE, images=True))
    with pytest.raises(ConfigError, match=r'64 bits of a hash.*"images": true'):
        refuse_images(images, StorageOptions(NODE))
