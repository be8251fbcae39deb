import json
import os

import pytest

pytest.importorskip("vllm")

from holdfast.engines.vllm import weights
from holdfast.engines.vllm.weights import NoDigestError, folder_digest


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"layers": 2}')
    (folder / "model.safetensors").write_bytes(b"w" * 1000)
    (folder / "README.md").write_text("words")
    return folder


@pytest.fixture
def memory(tmp_path):
    return tmp_path / "cache" / "digests.json"


def test_a_digest_depends_on_every_byte_of_config_and_weights(model, memory):
    first = folder_digest(model, memory)
    assert folder_digest(model, memory) == first
    (model / "README.md").write_text("other words")
    assert folder_digest(model, memory) == first
    (model / "config.json").write_text('{"layers": 3}')
    second = folder_digest(model, memory)
    (model / "model.safetensors").write_bytes(b"w" * 999 + b"v")
    third = folder_digest(model, memory)
    assert len({first, second, third}) == 3


def test_a_digest_does_not_depend_on_where_the_model_lies(model, memory, tmp_path):
    first = folder_digest(model, memory)
    model.rename(tmp_path / "elsewhere")
    assert folder_digest(tmp_path / "elsewhere", memory) == first


def test_weights_under_another_name_are_another_model(model, memory):
    first = folder_digest(model, memory)
    (model / "model.safetensors").rename(model / "weights.safetensors")
    assert folder_digest(model, memory) != first


def test_what_did_not_change_is_not_read_again(model, memory, monkeypatch):
    first = folder_digest(model, memory)
    monkeypatch.setattr(weights, "MIB", None)  # reading would now fail
    assert folder_digest(model, memory) == first
    os.utime(model / "config.json", ns=(1, 1))
    with pytest.raises(TypeError):
        folder_digest(model, memory)


def test_a_hub_cache_is_not_read_at_all(model, memory, tmp_path, monkeypatch):
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for number, file in enumerate([model / "config.json", model / "model.safetensors"]):
        blob = blobs / (str(number) * 64)
        file.rename(blob)
        file.symlink_to(blob)
    monkeypatch.setattr(weights, "MIB", None)
    first = folder_digest(model, memory)
    (model / "model.safetensors").unlink()
    (blobs / ("1" * 64)).rename(blobs / ("2" * 64))
    (model / "model.safetensors").symlink_to(blobs / ("2" * 64))
    assert folder_digest(model, memory) != first


def test_a_folder_without_weights_is_refused(model, memory):
    (model / "model.safetensors").unlink()
    with pytest.raises(NoDigestError, match="set model_digest"):
        folder_digest(model, memory)


def test_a_memory_that_is_damaged_or_not_to_be_had_costs_a_reading(model, memory):
    first = folder_digest(model, memory)
    memory.write_text("{not json")
    assert folder_digest(model, memory) == first
    assert json.loads(memory.read_text())
    assert folder_digest(model, model / "config.json" / "no folder") == first


@pytest.mark.parametrize("left", ["[]", '{"a": 1}', "{", "\x00"])
def test_a_memory_that_makes_no_sense_costs_a_second_reading(model, memory, left):
    first = folder_digest(model, memory)
    memory.write_text(left)
    assert folder_digest(model, memory) == first
    assert len(json.loads(memory.read_text())) == 2


def test_no_home_and_a_full_disk_cost_a_second_reading(model, monkeypatch, tmp_path):
    def homeless(_):
        raise RuntimeError("Could not determine home directory.")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    first = folder_digest(model, tmp_path / "digests.json")
    monkeypatch.setattr(weights.Path, "expanduser", homeless)
    assert folder_digest(model) == first
    monkeypatch.undo()
    monkeypatch.setattr(weights.json, "dump", full)
    assert folder_digest(model, tmp_path / "others.json") == first
