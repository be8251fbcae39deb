import json
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from described_engine import (
    HEAD_SIZE,
    HEADS,
    PAGES,
    SETTING,
    TOKENS,
    Configuration,
    config_of,
    groups_of,
    spec_of,
    tensors_of,
)

import holdfast
from holdfast.blocks.layout import Layout
from holdfast.client import weights_digest
from holdfast.client.weights_digest import NoDigestError
from holdfast.engines.vllm import describe
from holdfast.engines.vllm.checkpoint import Checkpoint
from holdfast.engines.vllm.describe import (
    block_tokens_of,
    fingerprint_of,
    portable_fingerprint_of,
)
from holdfast.engines.vllm.kv_groups import PagedGroup, geometry_of, paged_groups
from holdfast.engines.vllm.unsupported import UnsupportedError
from holdfast.engines.vllm.worker_rank import WorkerRank
from holdfast.errors import ConfigError


@pytest.fixture
def group():
    (group,) = paged_groups(config_of(), groups_of(spec_of()), tensors_of())
    return group


def pages_of(page_tokens):
    return PagedGroup(("a",), page_tokens, None)


@pytest.mark.parametrize(
    ("wish", "page", "tokens"),
    [(0, 16, 128), (0, 128, 128), (0, 96, 192), (0, 544, 544), (64, 32, 64), (128, 1024, 1024)],
)
def test_a_block_is_whole_pages(wish, page, tokens):
    assert block_tokens_of(SETTING._replace(block_tokens=wish), pages_of(page)) == tokens


def test_a_block_size_not_a_multiple_of_the_page_or_too_large_is_refused(group):
    with pytest.raises(ConfigError, match=r"tokens: 100 is not a multiple.*32 tokens; write 128"):
        block_tokens_of(SETTING._replace(block_tokens=100), pages_of(32))
    with pytest.raises(ConfigError, match=r"block_tokens: 1048576: .*limit is.*lower block_tokens"):
        fingerprint(group, setting=SETTING._replace(block_tokens=1 << 20))


def fingerprint(group, rank=0, setting=SETTING, stage=(0, 1), **changes):
    geometry = geometry_of(group, tensors_of(), PAGES)
    config = config_of(**changes)
    size = config.parallel_config.tensor_parallel_size
    return fingerprint_of(config, group, geometry, setting, WorkerRank(rank, size, *stage))


def model_of(**changes):
    model = config_of().model_config
    hf = Configuration(**(vars(model.hf_config) | changes.pop("hf", {})))
    fields = vars(model) | {"hf_config": hf, "hf_text_config": hf} | changes
    return {"model_config": SimpleNamespace(**fields)}


def test_the_same_engine_has_the_same_fingerprint(group):
    assert fingerprint(group).digest() == fingerprint(group).digest()
    named = model_of(hf={"_name_or_path": "elsewhere", "transformers_version": "0"})
    assert fingerprint(group, **named).digest() == fingerprint(group).digest()
    unset = model_of(model_class_overrides={})
    assert fingerprint(group, **unset).digest() == fingerprint(group).digest()


def test_whatever_changes_pages_changes_the_fingerprint(group):
    others = [
        fingerprint(group, setting=SETTING._replace(model_digest="other")),
        fingerprint(group, setting=SETTING._replace(block_tokens=64)),
        fingerprint(group, rank=1, parallel_config=SimpleNamespace(tensor_parallel_size=2)),
        fingerprint(group, stage=(0, 2)),
        fingerprint(group, stage=(1, 2)),
        fingerprint(group, **model_of(hf={"rope_theta": 5e5})),
        fingerprint(group, **model_of(hf={"rope_parameters": {"rope_type": "yarn", "factor": 2}})),
        fingerprint(group, **model_of(hf={"rope_parameters": {"rope_type": "yarn", "factor": 4}})),
        fingerprint(group, **model_of(hf={"sliding_window": 512})),
        fingerprint(group._replace(attention="window", window=512)),
        fingerprint(group._replace(attention="window", window=1024)),
        fingerprint(group, **model_of(hf={"hidden_size": 65})),
        fingerprint(group, **model_of(dtype=torch.float16)),
        fingerprint(group, **model_of(quantization="fp8")),
        fingerprint(group, **model_of(disable_sliding_window=True)),
        fingerprint(group, **model_of(model_impl="transformers")),
        fingerprint(group, **model_of(code_revision="other")),
        fingerprint(group, **model_of(model_class_overrides={"A": "mine:B"})),
        fingerprint(group, **model_of(model_class_overrides={"A": "mine:C"})),
        # vLLM takes fp8 on processors with AVX-512 only.
        fingerprint(group, cache_config=SimpleNamespace(cache_dtype="bfloat16")),
        fingerprint(group._replace(layers=("b", "a"))),
        fingerprint(group._replace(spec=spec_of(kv_quant_mode=SimpleNamespace(name="NVFP4")))),
    ]
    digests = {other.digest() for other in others} | {fingerprint(group).digest()}
    assert len(digests) == len(others) + 1


def test_max_model_len_is_in_the_fingerprint_of_longrope_models_only(group):
    """LongRoPE takes other factors, for every token, where max_model_len is beyond the first."""
    long = {"rope_parameters": {"rope_type": "longrope", "long_factor": [2.0]}}
    several = [
        fingerprint(group, **model_of(hf=hf, max_model_len=length)).digest()
        for hf in (long, {})
        for length in (4096, 16384)
    ]
    assert several[0] != several[1]
    assert several[2] == several[3]


def llama_4(length, *, file=None, option=None):
    """A Llama 4 as vLLM describes it: its length, generation_config.json and the option for it."""
    return {
        "hf": {"model_type": "llama4_text", "attn_temperature_tuning": True},
        "max_model_len": length,
        "override_generation_config": option or {},
        "try_get_generation_config": lambda: dict(file or {}),
    }


LLAMA_4_ENGINES = [
    ({"length": 32_768}, False),
    ({"length": 32_769}, True),
    ({"length": 131_072}, True),
    ({"length": 131_072, "file": {"attn_temperature_tuning": False}}, False),
    ({"length": 8_192, "option": {"attn_temperature_tuning": True}}, True),
    (
        {
            "length": 131_072,
            "file": {"attn_temperature_tuning": True},
            "option": {"attn_temperature_tuning": False},
        },
        False,
    ),
]
"""Engines with Llama 4, and whether vLLM computes it with temperature tuning."""


@pytest.mark.parametrize(("engine", "tuned"), LLAMA_4_ENGINES)
def test_llama_4_has_other_contexts_where_vllm_tunes_its_temperature(
    group, portable, engine, tuned
):
    """vLLM decides by the length and the generation config, where no setting of the model shows."""
    file = {"model_type": "llama4", "text_config": {"model_type": "llama4_text"}}
    for name in (
        lambda **options: fingerprint(group, **model_of(**llama_4(**options))).digest(),
        lambda **options: portable(file, model=llama_4(**options)).digest(),
    ):
        alike, other = (65_536, 16_384) if tuned else (16_384, 65_536)
        assert name(**engine) == name(length=alike)
        assert name(**engine) != name(length=other)


@pytest.mark.parametrize(("engine", "tuned"), LLAMA_4_ENGINES)
def test_vllm_tunes_the_temperature_of_llama_4_as_its_names_say(engine, tuned, monkeypatch):
    from vllm.model_executor.models.llama4 import Llama4ForCausalLM

    monkeypatch.setattr(Llama4ForCausalLM.__mro__[1], "__init__", lambda *_, **__: None)
    monkeypatch.setattr(Llama4ForCausalLM, "set_moe_parameters", lambda _: None)
    described = model_of(**llama_4(**engine))["model_config"]
    Llama4ForCausalLM(vllm_config=SimpleNamespace(model_config=described))
    assert described.hf_config.attn_temperature_tuning is tuned


def encoders(**changes):
    """A model of images and videos as vLLM describes it, with options of its encoders."""
    options = {"video_pruning_rate": None, "video_pruning_method": "evs"}
    options |= {"mm_encoder_attn_dtype": None, "mm_encoder_fp8_scale_path": None}
    return {"multimodal_config": SimpleNamespace(**(options | changes))}


@pytest.fixture(params=["exact", "portable"])
def name(request, group, portable):
    """Call with changes of a model to get the digest of its fingerprint, of exact and portable."""
    if request.param == "exact":
        return lambda changes: fingerprint(group, **model_of(**changes)).digest()
    return lambda changes: portable(model=changes).digest()


def test_options_of_encoders_are_in_the_fingerprint(name, tmp_path, monkeypatch):
    """vLLM prunes videos, and computes its encoders' attention, after the content is hashed."""
    monkeypatch.setattr(describe, "process_start_ns", lambda: time.time_ns() + 10**9)
    for file, content in {"a": '{"q": 1}', "b": '{"q": 2}', "copy of a": '{"q": 1}'}.items():
        (tmp_path / file).write_text(content)

    def scaled(file):
        path = str(tmp_path / file)
        return encoders(mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=path)

    several = [
        {},
        encoders(video_pruning_rate=0.5),
        encoders(video_pruning_rate=0.5, video_pruning_method="vidcom2"),
        encoders(mm_encoder_attn_dtype="fp8"),
        scaled("a"),
        scaled("b"),
    ]
    assert len({name(each) for each in several}) == len(several)
    assert name(scaled("copy of a")) == name(scaled("a"))
    for without in (encoders(), encoders(video_pruning_rate=0.0, video_pruning_method="vidcom2")):
        assert name(without) == name({})


def test_scales_that_vllm_may_have_read_with_another_content_have_no_digest(name, tmp_path):
    file = tmp_path / "scales.json"
    scaled = encoders(mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=str(file))
    with pytest.raises(NoDigestError, match=r"scale_path: .*cannot be read.*restore the file"):
        name(scaled)
    file.write_text("{}")
    with pytest.raises(NoDigestError, match=r"scale_path: .*changed after.*start the engine again"):
        name(scaled)


def gpu(backend, *, runner=False):
    layer = SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: backend))
    compiled = SimpleNamespace(static_forward_context={"a": layer, "b": layer})
    return {
        "device_config": SimpleNamespace(device_type="cuda"),
        "compilation_config": compiled,
        "use_v2_model_runner": runner,
    }


def test_the_attention_backend_and_the_runner_are_in_the_gpu_fingerprint(group):
    several = [gpu("FLASH_ATTN"), gpu("FLASHINFER"), gpu("FLASH_ATTN", runner=True)]
    assert len({fingerprint(group, **each).digest() for each in several}) == 3
    nameless = gpu("FLASH_ATTN") | {
        "compilation_config": SimpleNamespace(static_forward_context={})
    }
    with pytest.raises(UnsupportedError, match="attention backend of the model"):
        fingerprint(group, **nameless)


def test_the_instruction_set_and_the_version_are_in_an_exact_fingerprint(group, monkeypatch):
    import vllm
    from vllm.v1.attention.backends import cpu_attn

    ours = fingerprint(group)
    isa = cpu_attn._get_attn_isa(torch.bfloat16, TOKENS, HEAD_SIZE)
    pages = ours.representation
    assert pages.packing.startswith(f"{isa}:")
    assert (pages.engine, pages.engine_version, pages.device) == ("vllm", vllm.__version__, "cpu")
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_: "neon")
    other = fingerprint(group)
    monkeypatch.setattr(vllm, "__version__", "9.9.9")
    newer = fingerprint(group)
    assert len({each.digest() for each in (ours, other, newer)}) == 3


PORTABLE = Layout.portable(
    layers=2, kv_heads=HEADS, head_size=HEAD_SIZE, dtype="bfloat16", block_tokens=128
)
FILE = {"hidden_size": 64, "text_config": {"rope_theta": 1e4}, "transformers_version": "5.0"}


@pytest.fixture
def portable(group, tmp_path):
    """Call with the content of config.json and changes of vLLM's options to get a fingerprint."""

    def get(file=FILE, setting=SETTING, **changes):
        (tmp_path / "config.json").write_text(json.dumps(file))
        model = {"model": str(tmp_path), "hf_config_path": None, "hf_overrides": {}}
        model |= {"code_revision": None} | changes.pop("model", {})
        config = config_of(**changes, **model_of(**model))
        return portable_fingerprint_of(config, group, PORTABLE, setting)

    return get


def test_an_upgrade_of_the_engine_keeps_a_portable_fingerprint(portable, group, monkeypatch):
    import vllm
    from vllm.v1.attention.backends import cpu_attn

    before, exact = portable(), fingerprint(group)
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_: "neon")
    monkeypatch.setattr(vllm, "__version__", "9.9.9")
    upgraded = {
        "other library": portable(FILE | {"transformers_version": "6.0"}),
        "default that a new version adds": portable(model={"hf": {"new_default": 1}}),
        "tensor parallel": portable(parallel_config=SimpleNamespace(tensor_parallel_size=4)),
        "GPU": portable(**gpu("FLASHINFER", runner=True)),
    }
    assert {name: each.digest() for name, each in upgraded.items()} == dict.fromkeys(
        upgraded, before.digest()
    )
    assert fingerprint(group).digest() != exact.digest()


def test_whatever_changes_the_meaning_changes_a_portable_fingerprint(portable):
    long = {"rope_parameters": {"rope_type": "longrope", "long_factor": [2.0]}}
    several = [
        portable(),
        portable(FILE | {"hidden_size": 65}),
        portable(FILE | {"text_config": {"rope_theta": 5e5}}),
        portable(setting=SETTING._replace(model_digest="other")),
        portable(model={"hf_overrides": {"rope_theta": 5e5}}),
        portable(model={"dtype": torch.float16}),
        portable(model={"quantization": "fp8"}),
        portable(model={"disable_sliding_window": True}),
        portable(model={"code_revision": "other"}),
        portable(cache_config=SimpleNamespace(cache_dtype="fp8")),
        portable(FILE | long, model={"max_model_len": 4096}),
        portable(FILE | long, model={"max_model_len": 16384}),
    ]
    assert len({each.digest() for each in several}) == len(several)


def test_programs_share_models_that_were_compared_and_no_others(portable, tmp_path):
    def shared(kind, **model):
        own = portable({"model_type": kind, "hidden_size": 64}, model=model)
        of_all = holdfast.portable_fingerprint(tmp_path, PORTABLE, name=SETTING.model_digest)
        return own.meaning.model == of_all.meaning.model

    assert shared("llama")
    assert not shared("llama4")
    assert not shared("llama", model_impl="transformers")


def test_a_model_whose_files_do_not_say_its_meaning_has_no_portable_fingerprint(
    portable, group, tmp_path
):
    with pytest.raises(UnsupportedError, match="hf_overrides is a function"):
        portable(model={"hf_overrides": lambda config: config})
    with pytest.raises(UnsupportedError, match=r"model_class_overrides is \{'A': 'mine:B'\}"):
        portable(model={"model_class_overrides": {"A": "mine:B"}})
    nowhere = {"model": str(tmp_path / "none"), "hf_config_path": None, "hf_overrides": {}}
    (tmp_path / "none").mkdir()
    with pytest.raises(UnsupportedError, match=r"has no config.json"):
        portable_fingerprint_of(config_of(**model_of(**nowhere)), group, PORTABLE, SETTING)


def test_a_model_whose_settings_are_not_read_from_config_json_has_no_portable_fingerprint(
    portable, tmp_path, monkeypatch
):
    before = portable()
    with pytest.raises(UnsupportedError, match=r"config_format is 'mine'.*--config-format hf"):
        portable(model={"config_format": "mine"})
    (tmp_path / "params.json").write_text(json.dumps({"rope_theta": 1e9}))
    with pytest.raises(UnsupportedError, match=r"has params.json.*--config-format hf"):
        portable(model={"config_format": "auto"})
    assert portable(model={"config_format": "hf"}).digest() == before.digest()
    (tmp_path / "params.json").unlink()
    assert portable(model={"config_format": "auto"}).digest() == before.digest()

    def no_answer(*_):
        raise ConnectionError("no route")

    monkeypatch.setattr("vllm.transformers_utils.repo_utils.file_or_path_exists", no_answer)
    with pytest.raises(UnsupportedError, match=r"is unknown \(no route\).*--config-format hf"):
        portable(model={"config_format": "auto"})


def test_vllm_reads_params_json_of_a_model_that_has_no_portable_fingerprint(portable, tmp_path):
    from vllm.transformers_utils.config import get_config

    file = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "rope_theta": 1e6}
    params = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "hidden_dim": 128}
    params |= {"vocab_size": 100, "norm_eps": 1e-5, "rope_theta": 1e9}
    portable(file)
    (tmp_path / "consolidated.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / "params.json").write_text(json.dumps(params))
    read = get_config(tmp_path, trust_remote_code=False)
    assert (read.rope_parameters or read.to_dict())["rope_theta"] == 1e9
    with pytest.raises(UnsupportedError, match=r"has params.json"):
        portable(file)
    read = get_config(tmp_path, trust_remote_code=False, config_format="hf")
    assert read.rope_parameters["rope_theta"] == 1e6
    portable(file, model={"config_format": "hf"})


def test_weights_are_hashed_if_model_digest_is_not_set(group, monkeypatch, tmp_path):
    checkpoint = Checkpoint("safetensors", tmp_path, (tmp_path / "model.safetensors",))
    monkeypatch.setattr(describe, "checkpoint_of", lambda *_: checkpoint)
    monkeypatch.setattr(weights_digest, "CACHE_FILE", tmp_path / "memory")
    monkeypatch.setattr(describe, "process_start_ns", lambda: time.time_ns() + 10**9)
    unpinned, found = SETTING._replace(model_digest=""), set()
    for content in (b"one", b"two"):
        checkpoint.files[0].write_bytes(content)
        found.add(fingerprint(group, setting=unpinned).digest())
    checkpoint = checkpoint._replace(reader="pt")
    found.add(fingerprint(group, setting=unpinned).digest())
    assert len(found) == 3
    assert found.isdisjoint({fingerprint(group).digest()})


def test_weights_that_changed_after_the_engine_start_need_model_digest(
    group, monkeypatch, tmp_path
):
    checkpoint = Checkpoint("safetensors", tmp_path, (tmp_path / "model.safetensors",))
    monkeypatch.setattr(describe, "checkpoint_of", lambda *_: checkpoint)
    monkeypatch.setattr(weights_digest, "CACHE_FILE", tmp_path / "memory")
    checkpoint.files[0].write_bytes(b"one")
    with pytest.raises(NoDigestError, match="start the engine again, or set model_digest"):
        fingerprint(group, setting=SETTING._replace(model_digest=""))
    fingerprint(group)
