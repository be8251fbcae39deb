"""Two models that differ in anything that shapes KV state never find each other's contexts."""

import copy
import functools
import importlib
import sys
from pathlib import Path
from types import MethodType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from random_models import new_model, prompt_of  # noqa: E402

import holdfast  # noqa: E402
from holdfast.client.weights_digest import NoDigestError  # noqa: E402

BLOCK, HELD = 32, 160
IDS = prompt_of(1, 170)


@pytest.fixture
def saved(store, tmp_path):
    """A model in a folder, and one prompt of it in the store."""
    new_model("llama").save_pretrained(tmp_path / "model")
    model = loaded(tmp_path / "model")
    assert fetched(model, store) == 0
    assert fetched(model, store) == HELD
    return SimpleNamespace(model=model, folder=tmp_path / "model", store=store)


def loaded(folder, **settings):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, **{"dtype": torch.float32} | settings
    )


def fetched(model, store, **more):
    cache = holdfast.transformers.cache(model, IDS, store, block_tokens=BLOCK, **more)
    return cache.prefix.fetched


def add_to_one_weight(model):
    with torch.no_grad():
        model.model.layers[2].self_attn.k_proj.weight[5, 5] += 0.01


def add_behind_the_count_of_changes(model):
    weight = model.model.layers[2].self_attn.k_proj.weight
    weight.data += 0.001 * torch.ones_like(weight)


def replace_one_weight(model):
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight * 1.01)


def test_the_model_of_the_same_files_finds_the_context(saved):
    assert fetched(loaded(saved.folder), saved.store) == HELD


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": torch.bfloat16},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}},
        {"rms_norm_eps": 1e-5},
    ],
)
def test_other_settings_are_another_model(settings, saved):
    assert fetched(loaded(saved.folder, **settings), saved.store) == 0


@pytest.mark.parametrize(
    "change", [add_to_one_weight, add_behind_the_count_of_changes, replace_one_weight]
)
def test_weights_that_change_after_loading_are_another_model(change, saved):
    change(saved.model)
    assert fetched(saved.model, saved.store) == 0
    other = loaded(saved.folder)
    change(other)
    assert fetched(other, saved.store) == HELD  # that of the changed model
    assert fetched(loaded(saved.folder), saved.store) == HELD


def test_files_that_change_after_loading_do_not_name_the_loaded_weights(saved):
    other = new_model("llama")
    add_to_one_weight(other)
    before = loaded(saved.folder)
    other.save_pretrained(saved.folder)
    fetched(before, saved.store)  # under the name of its tensors
    assert fetched(loaded(saved.folder), saved.store) == 0


def test_a_model_without_a_folder_is_named_by_its_tensors(store):
    model = new_model("llama")
    assert [fetched(model, store), fetched(copy.deepcopy(model), store)] == [0, HELD]
    add_to_one_weight(model)
    assert fetched(model, store) == 0


@pytest.mark.parametrize(
    "mark", [{"peft_config": {"default": "lora"}}, {"_hf_peft_config_loaded": True}]
)
def test_a_model_with_adapters_needs_a_name_for_each(mark, saved):
    for name, value in mark.items():
        setattr(saved.model, name, value)
    with pytest.raises(NoDigestError, match=r"adapters.*pass model_digest="):
        fetched(saved.model, saved.store)
    found = [fetched(saved.model, saved.store, model_digest=name) for name in ("7", "7", "8")]
    assert found == [0, HELD, 0]


def test_quantised_weights_need_a_name(saved):
    saved.model.config.quantization_config = {"quant_method": "of a test"}
    with pytest.raises(NoDigestError, match=r"quantised.*pass model_digest="):
        fetched(saved.model, saved.store)


OWN_CODE = """
from torch import nn
class OwnNorm(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.weight, self.epsilon = norm.weight, norm.variance_epsilon
    def forward(self, states):
        return nn.functional.rms_norm(states, self.weight.shape, self.weight, self.epsilon) * SCALE
"""


def put_own_code(model, path, scale, monkeypatch):
    """Replace one part of a model by one of a class in a file of its user's."""
    path.write_text(f"SCALE = {scale}\n{OWN_CODE}")
    monkeypatch.syspath_prepend(path.parent)
    monkeypatch.delitem(sys.modules, path.stem, raising=False)
    importlib.invalidate_caches()
    layer = model.model.layers[0]
    layer.input_layernorm = importlib.import_module(path.stem).OwnNorm(layer.input_layernorm)


def with_own_code(folder, path, scale, monkeypatch):
    model = loaded(folder)
    put_own_code(model, path, scale, monkeypatch)
    return model


def test_a_part_of_another_class_with_the_same_weights_makes_another_model(
    saved, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert fetched(saved.model, saved.store) == HELD
    put_own_code(saved.model, tmp_path / "own_norm.py", 2, monkeypatch)
    assert fetched(saved.model, saved.store) == 0


def test_code_of_the_users_own_is_part_of_the_model(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    path = tmp_path / "own_norm.py"
    models = (with_own_code(saved.folder, path, scale, monkeypatch) for scale in (1, 1, 2))
    assert [fetched(model, saved.store) for model in models] == [0, HELD, 0]
    model = with_own_code(saved.folder, path, 1, monkeypatch)
    monkeypatch.delattr(sys.modules["own_norm"], "__file__")
    with pytest.raises(NoDigestError, match=r"own_norm, which has no source file; pass model_dig"):
        fetched(model, saved.store)
    assert fetched(model, saved.store, model_digest="7") == 0


@pytest.mark.parametrize("where", ["object", "class"])
def test_a_forward_pass_that_was_replaced_makes_another_model(where, saved, monkeypatch):
    norm = saved.model.model.layers[1].input_layernorm
    original = type(norm).forward

    @functools.wraps(original)
    def doubled(self, states):
        return 2 * original(self, states)

    if where == "object":
        monkeypatch.setattr(norm, "forward", MethodType(doubled, norm))
    else:
        monkeypatch.setattr(type(norm), "forward", doubled)
    assert [fetched(saved.model, saved.store) for _ in range(2)] == [0, HELD]
    monkeypatch.undo()
    assert fetched(saved.model, saved.store) == HELD


def test_attention_of_the_users_own_makes_another_model(saved, monkeypatch):
    attention = transformers.AttentionInterface
    original = attention()["sdpa"]

    def with_half_of_the_values(module, query, key, value, *more, **settings):
        return original(module, query, key, value / 2, *more, **settings)

    monkeypatch.setattr(
        attention,
        "_global_mapping",
        {**attention()._global_mapping, "own": with_half_of_the_values},
    )
    saved.model.set_attn_implementation("own")
    assert [fetched(saved.model, saved.store) for _ in range(2)] == [0, HELD]
    saved.model.set_attn_implementation("sdpa")
    assert fetched(saved.model, saved.store) == HELD


def test_source_files_are_read_once_as_long_as_they_do_not_change(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr("holdfast.engines.transformers.computation.UNCHANGED_S", 0.0)
    path, read, read_bytes = tmp_path / "own_norm.py", [], Path.read_bytes
    model = with_own_code(saved.folder, path, 1, monkeypatch)

    def note_and_read(file):
        read.append(file)
        return read_bytes(file)

    monkeypatch.setattr(Path, "read_bytes", note_and_read)
    for change in (None, None, path.touch, None):
        if change is not None:
            change()
        fetched(model, saved.store)
    assert read.count(path) == 2


def test_a_setting_does_not_hide_how_a_model_computes(saved):
    """The settings of a model may have any name."""
    for value in ("one", "another"):
        saved.model.config.autocast = value
        with torch.autocast("cpu", torch.bfloat16):
            assert [fetched(saved.model, saved.store) for _ in range(2)] == [0, HELD]


def test_a_hook_that_may_change_states_needs_a_name(saved):
    layer = saved.model.model.layers[1]
    handle = layer.register_forward_hook(lambda module, given, output: output + 0.1)
    with pytest.raises(NoDigestError, match=r"forward hook .* pass model_digest="):
        fetched(saved.model, saved.store)
    assert [fetched(saved.model, saved.store, model_digest="7") for _ in range(2)] == [0, HELD]
    handle.remove()
    assert fetched(saved.model, saved.store) == HELD


def test_the_block_size_is_part_of_the_name(saved):
    cache = holdfast.transformers.cache(saved.model, IDS, saved.store, block_tokens=16)
    assert cache.prefix.fetched == 0


@pytest.mark.parametrize(("kind", "shared"), [("default", HELD), ("linear", HELD), ("dynamic", 0)])
def test_other_engines_find_a_models_contexts_unless_they_rotate_in_another_way(
    kind, shared, store, tmp_path
):
    model = new_model("llama")
    settings = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    model.config.rope_parameters = settings if kind != "default" else model.config.rope_parameters
    model.save_pretrained(tmp_path)
    assert fetched(loaded(tmp_path), store) == 0
    layout = holdfast.Layout.portable(
        layers=4, kv_heads=2, head_size=16, dtype="float32", block_tokens=BLOCK
    )
    session = store.session(holdfast.portable_fingerprint(tmp_path, layout))
    assert session.cover(IDS[0].tolist()) == shared


def test_a_model_that_was_converted_after_loading_rotates_in_another_way(saved):
    """`to` rounds the frequencies of the rope, too; loading with a data type does not."""
    right = loaded(saved.folder, dtype=torch.bfloat16)
    converted = loaded(saved.folder).to(torch.bfloat16)
    assert [fetched(model, saved.store) for model in (right, converted)] == [0, 0]
    assert fetched(loaded(saved.folder).bfloat16(), saved.store) == HELD  # rounded alike
    assert fetched(loaded(saved.folder, dtype=torch.bfloat16), saved.store) == HELD
    back = loaded(saved.folder, dtype=torch.float16).to(torch.bfloat16).to(torch.float32)
    assert fetched(back, saved.store) == 0


def test_a_name_of_weights_does_not_stand_for_rounded_rotations(saved):
    named = {"model_digest": "7"}
    fetched(loaded(saved.folder, dtype=torch.bfloat16), saved.store, **named)
    assert fetched(loaded(saved.folder).to(torch.bfloat16), saved.store, **named) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_autocast_computes_is_of_another_model(dtype, saved):
    half = loaded(saved.folder, dtype=torch.bfloat16)
    assert [fetched(half, saved.store) for _ in range(2)] == [0, HELD]
    for model in (saved.model, half):
        with torch.autocast("cpu", dtype):
            assert [fetched(model, saved.store) for _ in range(2)] == [0, HELD]
        assert fetched(model, saved.store) == HELD


def test_attention_that_leaves_out_a_limit_of_the_settings_is_of_another_model(store):
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=1000, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, attn_logit_softcapping=5.0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.set_attn_implementation("eager")
    assert [fetched(model, store) for _ in range(2)] == [0, HELD]
    model.set_attn_implementation("sdpa")
    assert [fetched(model, store) for _ in range(2)] == [0, HELD]
