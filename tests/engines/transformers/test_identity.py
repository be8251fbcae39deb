"""Two models that differ in anything that shapes KV state never find each other's contexts."""

import copy
from types import SimpleNamespace

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
