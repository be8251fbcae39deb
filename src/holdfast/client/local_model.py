"""The fingerprint of portable contexts of a model in a local folder, for programs that compute KV.

Engines that keep portable blocks derive the same fingerprint for the same folder, so both find each
other's contexts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from holdfast.blocks.fingerprint import Fingerprint
from holdfast.blocks.layout import PortableLayout
from holdfast.client.model_meaning import ANY, ModelSource, model_digest, positions_of
from holdfast.client.weights_digest import REMEDY, NoDigestError, files_digest

CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_NO_OVERRIDES: Mapping[str, Any] = MappingProxyType({})


def portable_fingerprint(
    folder: str | Path,
    layout: PortableLayout,
    *,
    name: str = "",
    overrides: Mapping[str, Any] = _NO_OVERRIDES,
    computed_by: str = ANY,
) -> Fingerprint:
    """Return the fingerprint of portable contexts of a Hugging Face model folder.

    `layout`: that of the whole model; its data type is also that of the computation. `name`: the
    engines' `model_digest`; empty: the safetensors files are read and hashed, once for each change
    of a file. `overrides`: fields of `config.json` that the program changes. `computed_by`: the
    engine whose contexts are meant, for types of models that engines do not share. Raises
    NoDigestError if the folder has no such files, OSError if one cannot be read.
    """
    source = local_source(
        folder, layout.dtype, name=name, overrides=overrides, computed_by=computed_by
    )
    return Fingerprint.portable(
        layout,
        model=model_digest(source),
        positions=positions_of(source),
        adapter="none",
        kv_quantisation="none",
        kv_scales="none",
    )


def local_source(
    folder: str | Path,
    dtype: str,
    *,
    name: str = "",
    overrides: Mapping[str, Any] = _NO_OVERRIDES,
    computed_by: str = ANY,
) -> ModelSource:
    """Return the model of a folder, computed in `dtype`; arguments and errors as above."""
    place = Path(folder)
    try:
        config = json.loads((place / CONFIG).read_bytes())
    except FileNotFoundError as error:
        raise NoDigestError(
            f"{str(place)!r} has no {CONFIG}; name the folder of a Hugging Face model"
        ) from error
    return ModelSource(
        weights=f"pinned:{name}" if name else _weights(place),
        config=config,
        overrides=overrides,
        dtype=dtype,
        quantised_on_load="none",
        code="none",
        computed_by=computed_by,
    )


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that engines read: those of the index, if there is one."""
    files = {*folder.glob("*.safetensors")}
    if (folder / _INDEX).is_file():
        index = json.loads((folder / _INDEX).read_bytes())
        files &= {folder / name for name in index["weight_map"].values()}
    return sorted(files)


def _weights(folder: Path) -> str:
    files = weight_files(folder)
    if not files:
        raise NoDigestError(f"{str(folder)!r} has no safetensors files; {REMEDY}")
    return files_digest("safetensors", folder, [*files, folder / CONFIG])
