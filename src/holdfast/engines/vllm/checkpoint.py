"""The checkpoint files that vLLM's loader reads for a model, as selected by vLLM's own code.

A folder may hold several models: in safetensors, in PyTorch's format, consolidated, or in shards
for one tensor-parallel size. vLLM selects the files by the load format. This module does not
imitate the selection; it calls the loader's own again, on the folder that the loader used. If that
does not return the files, NoDigestError gives a remedy.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.client.weights_digest import REMEDY, NoDigestError

CONFIG = "config.json"

SELECTING_ATTRIBUTES = {
    "fall_back_to_pt_during_load": True,
    "allow_patterns_overrides": None,
    "secondary_weights": (),
}
"""Attributes of a model class that select what the default loader reads, and their defaults.

A model may also make the loader skip shards (`is_unused_checkpoint_weight`); the digest includes
such shards.
"""


class Checkpoint(NamedTuple):
    """The files, below `folder`, that the engine's weights were loaded from, and their `reader`."""

    reader: str
    folder: Path
    files: tuple[Path, ...]


def checkpoint_of(model: Any, load: Any) -> Checkpoint:
    """Return the files that this process's engine loaded for a model.

    `model` and `load`: vLLM's configurations. Raises NoDigestError if the files are unknown.
    """
    if load.load_format == "dummy":
        raise NoDigestError(f"load_format dummy generates weights; to share them, {REMEDY}")
    try:
        reader, folder, files = _selected(model, load)
        settings = _settings_files(model, folder)
    except NoDigestError:
        raise
    except Exception as error:  # vLLM's code of any version, on files that may be gone
        raise NoDigestError(
            f"vLLM does not say which files load_format {load.load_format!r} reads of "
            f"{_source(model)!r} ({type(error).__name__}: {error}); {REMEDY}"
        ) from error
    if not files:
        raise NoDigestError(
            f"load_format {load.load_format!r} reads no file of {str(folder)!r}; {REMEDY}"
        )
    return Checkpoint(reader, folder, (*files, *settings))


def _selected(model: Any, load: Any) -> tuple[str, Path, list[Path]]:
    """Return reader, folder and files of the loader that vLLM has for this load format."""
    from vllm.model_executor import model_loader

    kind = model_loader._LOAD_FORMAT_TO_MODEL_LOADER[load.load_format]  # noqa: SLF001  # vLLM's choice
    if kind is model_loader.DefaultModelLoader:
        return _by_default_loader(model, load)
    if kind is model_loader.ShardedStateLoader:
        folder = _folder(_source(model), model, load)
        pattern = kind._render_default_pattern(kind(load).pattern, part="*")  # noqa: SLF001  # as above
        return "sharded_state", folder, list(folder.glob(pattern))
    if kind is model_loader.RunaiModelStreamerLoader:
        folder = _folder(_source(model), model, load)
        files = kind(load)._prepare_weights(str(folder), None)  # noqa: SLF001  # as above
        return "safetensors", folder, [Path(file) for file in files]
    raise NoDigestError(
        f"load_format {load.load_format!r} ({kind.__name__}) does not say which files it reads; "
        f"{REMEDY}"
    )


def _by_default_loader(model: Any, load: Any) -> tuple[str, Path, list[Path]]:
    """Return reader, folder and files of the default loader, by the model's class.

    Only the loader has the model object, so values that a constructor sets are unknown here: raises
    NoDigestError if a constructor sets any of the `SELECTING_ATTRIBUTES`.
    """
    from vllm.model_executor.model_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.utils import get_model_cls

    kind = get_model_cls(model)
    constructors = [base.__dict__.get("__init__") for base in kind.__mro__]
    names_in_constructors = {
        name
        for each in constructors
        if (code := getattr(each, "__code__", None)) is not None
        for name in code.co_names
    }
    found = {name: getattr(kind, name, default) for name, default in SELECTING_ATTRIBUTES.items()}
    if found["secondary_weights"] or names_in_constructors & SELECTING_ATTRIBUTES.keys():
        raise NoDigestError(
            f"model class {kind.__name__} selects files of its own in its constructor; {REMEDY}"
        )
    folder, files, safetensors, _ = DefaultModelLoader(load)._prepare_weights(  # noqa: SLF001  # ditto
        str(_folder(model.model, model, load)),
        None,
        model.revision,
        found["fall_back_to_pt_during_load"],
        found["allow_patterns_overrides"],
    )
    if load.load_format == "npcache":  # the loader reads arrays that it once made from the files
        arrays = Path(folder) / "np"
        names = json.loads((arrays / "weight_names.json").read_bytes())
        read = [arrays / "weight_names.json", *(arrays / name for name in names)]
        return "npcache", Path(folder), read
    return ("safetensors" if safetensors else "pt"), Path(folder), [Path(file) for file in files]


def _settings_files(model: Any, folder: Path) -> list[Path]:
    """Return the files beside the weights that affect their use: settings and remote code.

    Raises NoDigestError for a quantisation that no file describes.
    """
    beside = [folder / CONFIG]
    if model.quantization is not None:
        from vllm.model_executor.layers.quantization import get_quantization_config

        names = get_quantization_config(model.quantization).get_config_filenames()
        stated = [folder / name for name in names if (folder / name).is_file()]
        config = model.hf_config
        is_described = bool(stated) or any(
            getattr(each, name, None) is not None
            for each in (config, getattr(config, "text_config", None))
            for name in ("quantization_config", "compression_config")
        )
        if model.quantization_config is not None or not is_described:
            raise NoDigestError(
                f"quantization {model.quantization!r} is computed while the weights are loaded, "
                f"and no file describes it; {REMEDY}, the quantisation included"
            )
        beside += stated
    if getattr(model, "trust_remote_code", False):
        beside += folder.glob("*.py")
    return [file for file in dict.fromkeys(beside) if file.is_file()]


def _source(model: Any) -> str:
    """Return the name of the weights; it differs from the model's for weights in object stores."""
    return str(getattr(model, "model_weights", "") or model.model)


def _folder(name: str, model: Any, load: Any) -> Path:
    """Return the local folder of a model that vLLM has loaded by this name."""
    folder = Path(name)
    if folder.is_dir():
        return folder
    if "://" in name:
        raise NoDigestError(f"weights at {name!r} are not in a local folder; {REMEDY}")
    from vllm import envs

    if envs.VLLM_USE_MODELSCOPE:
        raise NoDigestError(
            f"model {name!r} is from ModelScope; name its local folder, or {REMEDY}"
        )
    try:
        from huggingface_hub import snapshot_download

        where = {"revision": model.revision, "cache_dir": getattr(load, "download_dir", None)}
        return Path(snapshot_download(name, local_files_only=True, **where))
    except (ImportError, OSError, ValueError) as error:
        raise NoDigestError(f"model {name!r} is not a local folder ({error}); {REMEDY}") from error
