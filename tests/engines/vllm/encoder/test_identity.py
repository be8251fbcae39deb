"""Encoder outputs of engines that differ in what changes an output are not shared."""

import time
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from holdfast.engines.vllm import describe
from holdfast.engines.vllm.encoder.identity import encoder_fingerprint
from holdfast.engines.vllm.encoder.options import read_encoder_options
from holdfast.engines.vllm.unsupported import UnsupportedError
from holdfast.errors import ConfigError


def config(**changes):
    """What vLLM tells of an engine; `changes` by name of a field of the model or of its media."""
    media = {
        "mm_processor_kwargs": {"size": 336},
        "media_io_kwargs": {},
        "video_pruning_rate": None,
        "video_pruning_method": "evs",
        "mm_encoder_attn_backend": None,
        "mm_encoder_attn_dtype": None,
        "mm_encoder_fp8_scale_path": None,
    }
    media |= {name: value for name, value in changes.items() if name in media}
    model = SimpleNamespace(
        hf_config=SimpleNamespace(to_dict=lambda: {"hidden_size": changes.get("hidden_size", 64)}),
        dtype=changes.get("dtype", "torch.bfloat16"),
        quantization=None,
        disable_sliding_window=False,
        multimodal_config=SimpleNamespace(**media),
    )
    device = SimpleNamespace(device_type=changes.get("device", "cpu"))
    return SimpleNamespace(model_config=model, load_config=None, device_config=device)


def digest(digest="weights", **changes):
    setting = read_encoder_options({"model_digest": digest})
    return encoder_fingerprint(config(**changes), setting).digest()


@pytest.mark.parametrize(
    "changes",
    [
        {"digest": "other weights"},
        {"hidden_size": 128},
        {"dtype": "torch.float16"},
        {"device": "cuda"},
        {"mm_processor_kwargs": {"size": 672}},
        {"media_io_kwargs": {"video": {"num_frames": 8}}},
        {"video_pruning_rate": 0.5},
        {"mm_encoder_attn_backend": "FLASH_ATTN"},
        {"mm_encoder_attn_dtype": "fp8"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_difference_is_never_a_hit(changes):
    assert digest(**changes) != digest()


def test_methods_of_pruning_a_video_are_a_difference():
    evs, vidcom2 = (
        digest(video_pruning_rate=0.5, video_pruning_method=method) for method in ("evs", "vidcom2")
    )
    assert len({evs, vidcom2, digest()}) == 3
    assert digest(video_pruning_method="vidcom2") == digest()  # nothing is pruned without a rate


def test_scales_of_an_encoders_attention_are_a_difference_by_their_content(tmp_path, monkeypatch):
    monkeypatch.setattr(describe, "process_start_ns", lambda: time.time_ns() + 10**9)
    for name, content in {"one": "1", "two": "2", "again": "1"}.items():
        (tmp_path / name).write_text(content)

    def scaled(name):
        path = str(tmp_path / name)
        return digest(mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=path)

    computed = digest(mm_encoder_attn_dtype="fp8")
    assert len({digest(), computed, scaled("one"), scaled("two")}) == 4
    assert scaled("again") == scaled("one")


def test_equal_engines_share_their_outputs():
    assert digest() == digest()


def test_a_model_without_an_encoder_is_refused():
    engine = config()
    engine.model_config.multimodal_config = None
    with pytest.raises(UnsupportedError, match="no encoder of images or audio"):
        encoder_fingerprint(engine, read_encoder_options({"model_digest": "weights"}))


def test_an_encoder_decoder_model_is_refused():
    engine = config()
    engine.model_config.is_encoder_decoder = True
    with pytest.raises(UnsupportedError, match="encoder-decoder"):
        encoder_fingerprint(engine, read_encoder_options({"model_digest": "weights"}))


def test_an_engine_whose_weights_are_replaced_is_refused():
    engine = config()
    engine.weight_transfer_config = SimpleNamespace(backend="nccl")
    with pytest.raises(UnsupportedError, match="weight_transfer_config replaces weights"):
        encoder_fingerprint(engine, read_encoder_options({"model_digest": "weights"}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hold": "x"}, "ec_connector_extra_config.hold is unknown; known are holdfast"),
        ({"domain": ""}, "ec_connector_extra_config.domain is empty"),
        ({"holdfast": "host:7070"}, "ec_connector_extra_config.holdfast"),
    ],
)
def test_a_wrong_option_is_refused_with_its_place(options, message):
    with pytest.raises(ConfigError, match=message):
        read_encoder_options(options)
