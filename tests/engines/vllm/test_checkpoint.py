"""Which files a digest covers, held against the files that vLLM's own loader opens."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from safetensors.torch import save_file
from vllm.config.load import LoadConfig
from vllm.model_executor import model_loader
from vllm.model_executor.model_loader import default_loader, sharded_state_loader, utils

from holdfast.client.weights_digest import NoDigestError
from holdfast.engines.vllm.checkpoint import checkpoint_of


class Model(torch.nn.Module):
    """A model class that leaves everything to the loader."""


@pytest.fixture(autouse=True)
def model_class(monkeypatch):
    """Have vLLM find that class, and return how to have it find another."""

    def found(kind):
        monkeypatch.setattr(utils, "get_model_cls", lambda _: kind)

    found(Model)
    return found


def tensors(value):
    return {"w": torch.full((4,), float(value))}


def safetensors(folder, name, value=1.0):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors(value), folder / name)


def pickled(folder, name, value=2.0):
    torch.save(tensors(value), folder / name)


@pytest.fixture
def folder(tmp_path):
    found = tmp_path / "model"
    found.mkdir()
    (found / "config.json").write_text("{}")
    return found


def config_of(folder, load_format="auto", load=(), **changes):
    fields = {
        "model": str(folder),
        "model_weights": "",
        "revision": None,
        "quantization": None,
        "quantization_config": None,
        "hf_config": SimpleNamespace(),
        "trust_remote_code": False,
    }
    return SimpleNamespace(
        load_config=LoadConfig(load_format=load_format, use_tqdm_on_load=False, **dict(load)),
        model_config=SimpleNamespace(**(fields | changes)),
    )


def files_of(config):
    return checkpoint_of(config.model_config, config.load_config)


def names_of(config):
    checkpoint = files_of(config)
    return {os.path.relpath(file, checkpoint.folder) for file in checkpoint.files}


def opened_by_vllm(config, kind, monkeypatch):
    """Return the files that vLLM's loader hands to what reads them, and by which function."""
    opened = {}

    def note(name):
        def read(*arguments, **_):
            (files,) = [each for each in arguments if isinstance(each, list)]
            opened[name] = {Path(file) for file in files}
            return iter(())

        return read

    for name in dir(default_loader):
        if name.endswith("weights_iterator"):
            monkeypatch.setattr(default_loader, name, note(name))
    loader = model_loader.get_model_loader(config.load_config)
    list(loader.get_all_weights(config.model_config, kind()))
    ((name, files),) = opened.items()
    return name, files


@pytest.fixture
def mixed(folder):
    """Two models, and more, in one folder."""
    safetensors(folder, "model.safetensors")
    pickled(folder, "pytorch_model.bin")
    pickled(folder, "weights.pt", 3.0)
    pickled(folder, "training_args.bin")
    safetensors(folder, "original/other.safetensors")
    return folder


@pytest.mark.parametrize("load_format", ["auto", "hf", "safetensors", "fastsafetensors", "pt"])
@pytest.mark.parametrize("layout", ["mixed", "consolidated", "indexed"])
def test_a_digest_covers_the_files_that_vllm_opens(load_format, layout, mixed, monkeypatch):
    if layout == "consolidated":
        safetensors(mixed, "consolidated.safetensors", 4.0)
    if layout == "indexed":
        safetensors(mixed, "a.safetensors")
        safetensors(mixed, "b.safetensors")
        index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
        (mixed / "model.safetensors.index.json").write_text(json.dumps(index))
    config = config_of(mixed, load_format)
    checkpoint = files_of(config)
    name, files = opened_by_vllm(config, Model, monkeypatch)
    assert set(checkpoint.files) == files | {mixed / "config.json"}
    assert (checkpoint.reader == "pt") == (name == "pt_weights_iterator")


@pytest.mark.parametrize(
    ("load_format", "names"),
    [
        ("auto", {"model.safetensors"}),
        ("hf", {"model.safetensors"}),
        ("safetensors", {"model.safetensors"}),
        ("fastsafetensors", {"model.safetensors"}),
        ("instanttensor", {"model.safetensors"}),
        ("pt", {"weights.pt"}),
    ],
)
def test_each_format_has_its_files_in_a_folder_of_several(load_format, names, mixed):
    assert names_of(config_of(mixed, load_format)) == {"config.json"} | names


def test_consolidated_files_are_chosen_for_mistral_and_auto_formats(mixed):
    safetensors(mixed, "consolidated.safetensors")
    consolidated = {"config.json", "consolidated.safetensors"}
    assert names_of(config_of(mixed, "auto")) == consolidated
    assert names_of(config_of(mixed, "mistral")) == consolidated
    assert names_of(config_of(mixed, "hf")) == consolidated | {"model.safetensors"}


def test_files_that_the_index_does_not_list_are_left_out(folder):
    for name in ("a", "b", "whole"):
        safetensors(folder, f"{name}.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert names_of(config_of(folder)) == {"config.json", "a.safetensors", "b.safetensors"}


def test_the_file_settings_of_a_model_class_are_respected(mixed, model_class, monkeypatch):
    class Overriding(Model):
        allow_patterns_overrides = ("*.bin",)

    class NeverPt(Model):
        fall_back_to_pt_during_load = False

    for kind, load_format in ((Overriding, "auto"), (NeverPt, "hf")):
        model_class(kind)
        config = config_of(mixed, load_format)
        _, files = opened_by_vllm(config, kind, monkeypatch)
        assert set(files_of(config).files) == files | {mixed / "config.json"}
    for name in ("model.safetensors", "pytorch_model.bin"):
        (mixed / name).unlink()
    (mixed / "training_args.bin").unlink()
    with pytest.raises(NoDigestError, match="hf"):
        files_of(config_of(mixed, "hf"))
    model_class(Model)
    assert names_of(config_of(mixed, "hf")) == {"config.json", "weights.pt"}


def test_a_model_with_secondary_weights_needs_model_digest(mixed, model_class):
    class Secondary(Model):
        def __init__(self):
            super().__init__()
            self.secondary_weights = []

    class Heir(Secondary):
        pass

    for kind in (Secondary, Heir):
        model_class(kind)
        with pytest.raises(NoDigestError, match=f"{kind.__name__} selects.*set model_digest"):
            files_of(config_of(mixed))


def test_a_digest_for_npcache_covers_its_cached_arrays(folder):
    pickled(folder, "pytorch_model.bin")
    config = config_of(folder, "npcache")
    loader = model_loader.get_model_loader(config.load_config)
    ((name, value),) = loader.get_all_weights(config.model_config, Model())
    assert (name, float(value[0])) == ("w", 2.0)
    checkpoint = files_of(config)
    assert checkpoint.reader == "npcache"
    assert names_of(config) == {"config.json", "np/weight_names.json", "np/w"}


def test_sharded_state_selects_the_files_of_this_rank(folder, monkeypatch):
    for rank in range(2):
        for part in range(2):
            safetensors(folder, f"model-rank-{rank}-part-{part}.safetensors")
    loader = sharded_state_loader.ShardedStateLoader
    monkeypatch.setattr(
        loader, "_render_default_pattern",
        staticmethod(lambda pattern=None, *, part: f"model-rank-1-part-{part}.safetensors"),
    )  # fmt: skip
    assert names_of(config_of(folder, "sharded_state")) == {
        "config.json", "model-rank-1-part-0.safetensors", "model-rank-1-part-1.safetensors",
    }  # fmt: skip


@pytest.mark.parametrize("load_format", ["tensorizer", "modelexpress", "ipc_cache", "dummy"])
def test_a_load_format_without_local_files_needs_model_digest(load_format, mixed):
    with pytest.raises(NoDigestError, match=rf"{load_format}.*set model_digest"):
        files_of(config_of(mixed, load_format))


def test_a_custom_loader_needs_model_digest(mixed, monkeypatch):
    class Own(default_loader.DefaultModelLoader):
        pass

    for name in ("own", "auto"):
        monkeypatch.setitem(model_loader._LOAD_FORMAT_TO_MODEL_LOADER, name, Own)
        with pytest.raises(NoDigestError, match=rf"'{name}' \(Own\).*set model_digest"):
            files_of(config_of(mixed, name))
    with pytest.raises(NoDigestError, match=r"'nowhere'.*set model_digest"):
        files_of(config_of(mixed, "nowhere"))


@pytest.mark.parametrize(
    ("load_format", "source"),
    [("runai_streamer", "s3://bucket/m"), ("sharded_state", "s3://bucket/m"), ("auto", "gs://b/m")],
)
def test_weights_at_a_url_need_model_digest(load_format, source, mixed):
    changes = {"model": source} if load_format == "auto" else {"model_weights": source}
    with pytest.raises(NoDigestError, match=rf"{source}.*set model_digest"):
        files_of(config_of(mixed, load_format, **changes))


def test_a_folder_without_weights_needs_model_digest(folder):
    with pytest.raises(NoDigestError, match="set model_digest"):
        files_of(config_of(folder))
    with pytest.raises(NoDigestError, match=r"'/models/m' is not a local folder.*set model_digest"):
        files_of(config_of("/models/m"))


def stated():
    """Return a checkpoint's config that says how its weights are quantised."""
    return SimpleNamespace(quantization_config={"quant_method": "fp8"})


def test_weights_quantised_during_load_need_model_digest(mixed):
    for changes in (
        {"quantization": "fp8"},
        {"quantization": "fp8", "hf_config": stated(), "quantization_config": {"linear": "fp8"}},
    ):
        with pytest.raises(NoDigestError, match=r"'fp8' is computed.*set model_digest"):
            files_of(config_of(mixed, **changes))
    known = config_of(mixed, quantization="fp8", hf_config=stated())
    assert names_of(known) == {"config.json", "model.safetensors"}
    inside = SimpleNamespace(text_config=stated())
    assert files_of(config_of(mixed, quantization="fp8", hf_config=inside))


def test_a_digest_covers_the_quantisation_config_file(mixed):
    (mixed / "quantize_config.json").write_text('{"bits": 4}')
    found = names_of(config_of(mixed, quantization="gptq"))
    assert found == {"config.json", "model.safetensors", "quantize_config.json"}


def test_a_digest_covers_model_code_if_remote_code_is_trusted(mixed):
    (mixed / "modeling.py").write_text("pass")
    assert "modeling.py" not in names_of(config_of(mixed))
    assert "modeling.py" in names_of(config_of(mixed, trust_remote_code=True))


def test_a_hub_model_is_read_from_its_snapshot_in_download_dir(tmp_path):
    commit = "c" * 40
    repo = tmp_path / "models--our--model"
    snapshot = repo / "snapshots" / commit
    (repo / "blobs").mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    snapshot.mkdir(parents=True)
    save_file(tensors(1.0), repo / "blobs" / ("b" * 64))
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs") / ("b" * 64))
    (repo / "blobs" / ("a" * 40)).write_text("{}")
    (snapshot / "config.json").symlink_to(Path("../../blobs") / ("a" * 40))
    config = config_of("our/model", load={"download_dir": str(tmp_path)})
    checkpoint = files_of(config)
    assert checkpoint.folder == snapshot
    assert names_of(config) == {"config.json", "model.safetensors"}
    with pytest.raises(NoDigestError, match="'our/model' is not a local folder"):
        files_of(config_of("our/model"))
