"""Models are made whole or not at all, and twice the same."""

import hashlib
import json

import pytest

from holdfast.errors import ConfigError, HoldfastError
from holdfast_bench.harness import model

pytest.importorskip("torch")
pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model.make("tiny", tmp_path_factory.mktemp("models") / "tiny")


def digest(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_the_folder_is_a_hugging_face_model_of_the_promised_size(folder):
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] >= 16_384
    with safe_open(folder / "model.safetensors", "pt") as weights:
        shapes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
    parameters = sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes.values())
    assert 18e6 < parameters < 20e6
    assert shapes["model.layers.3.self_attn.k_proj.weight"] == [4 * 32, 256]


@pytest.mark.parametrize(("name", "millions"), [("tiny", 19), ("small", 137), ("demo", 291)])
def test_each_model_shape_has_its_stated_parameter_count(name, millions):
    matrices = model._matrices(model.SHAPES[name])
    assert round(sum(rows * columns for _, rows, columns, _ in matrices) / 1e6) == millions


def test_the_demo_model_keeps_20_kib_per_token():
    shape = model.SHAPES["demo"]
    assert shape.head_size == 64
    assert 2 * shape.layers * shape.kv_heads * shape.head_size * 2 == 20 * 1024  # bfloat16


def test_any_text_survives_the_tokenizer(folder):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "def f(x):\n    return 'жук 🐞' + x\x00"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.get_vocab_size() == model.SHAPES["tiny"].vocabulary


def test_a_whole_model_is_used_again_untouched(folder):
    before = (folder / "model.safetensors").stat()
    assert model.make("tiny", folder) == folder
    assert (folder / "model.safetensors").stat() == before


def test_a_model_made_twice_has_the_same_bytes(folder, tmp_path):
    again = model.make("tiny", tmp_path / "again")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert digest(again / name) == digest(folder / name)


def test_a_model_of_another_revision_is_made_again(tmp_path):
    stale = tmp_path / "tiny"
    stale.mkdir()
    (stale / model.MARKER).write_text("{}")
    (stale / "model.safetensors").write_text("old")
    model.make("tiny", stale)
    assert model.is_complete(stale, model.SHAPES["tiny"])
    assert [child.name for child in tmp_path.iterdir()] == ["tiny"]


def test_a_folder_with_other_files_is_refused_and_left_unchanged(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(HoldfastError, match="holds no model made here"):
        model.make("tiny", tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_an_unknown_model_is_refused_with_the_known_names(tmp_path):
    with pytest.raises(ConfigError, match="'huge' is not one that can be made: tiny, small, demo"):
        model.make("huge", tmp_path / "huge")
