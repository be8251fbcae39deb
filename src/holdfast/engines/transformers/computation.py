"""How a model in memory computes, as far as neither its weights nor its settings say.

Two objects of equal weights and settings may compute other keys: one was converted after it was
loaded, one computes under autocast, one has an attention that leaves out a part of the settings,
one has code of its own.
"""

from __future__ import annotations

import functools
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from holdfast.client.weights_digest import UNCHANGED_S
from holdfast.regular_file import file_stamp

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Kinds of rope whose rotations depend on the length of the prompt, beyond a limit."""

SECTION = "_computation"
"""Name of the overrides' section: settings whose names begin with `_` are no overrides."""

_LIBRARIES = ("torch", "transformers")
_DECORATING = (*_LIBRARIES, "accelerate", "contextlib", "functools")
"""Libraries whose functions may stand around a forward pass without changing its values."""

_REMOTE_CODE = "transformers_modules."
"""Python modules of code that a model brings; transformers keeps its files in a folder."""

_FREQUENCIES = "inv_freq"
_FIRST_FREQUENCIES = "original_inv_freq"

_TOLERANCE = 1e-6
"""Relative difference of the frequencies of two devices; that of a rounded one is above 1e-4."""

_CAP = re.compile(r"attn_.*soft_?cap.*")
"""Settings that limit the scores of attention."""

_WITHOUT_CAP = ("sdpa",)
"""Implementations of attention that leave this limit out, without a word."""


def computation_of(model: Any) -> dict[str, dict[str, str]]:
    """Return what separates the KV state of a model from that of its settings; empty if nothing.

    It is a section among the overrides of the settings, under a name that no setting has.
    """
    found = {"rope_frequencies": _other_frequencies(model), **mode_of(model)}
    section = {name: value for name, value in found.items() if value}
    return {SECTION: section} if section else {}


class ModelCode(NamedTuple):
    """The code of a model that is not of PyTorch or transformers.

    `digest`: of the source files, and the names of functions that are not those of their class.
    `unknown`: names of Python modules without a source file.
    """

    digest: str
    unknown: tuple[str, ...]


def code_of(model: Any) -> ModelCode:
    """Return the code that a model brings, or its user has written; empty if there is none.

    That is the code of the classes of its parts, of functions that replace their forward passes,
    and of its attention.
    """
    functions = {_name_of(function): _module_of(function) for function in _functions_of(model)}
    other = {
        name: module
        for name, module in functions.items()
        if module.partition(".")[0] not in _DECORATING
    }
    parts = {type(part).__module__ for part in model.modules()}
    own = {name for name in parts if name.partition(".")[0] not in _LIBRARIES}
    files = {
        name: getattr(sys.modules.get(name), "__file__", None)
        for name in sorted({*own, *other.values()})
    }
    whole = xxhash.xxh3_128("\0".join(sorted(other)).encode())
    for name, file in files.items():
        if file is not None:
            beside = Path(file).parent.glob("*.py") if name.startswith(_REMOTE_CODE) else ()
            for source in sorted({Path(file), *beside}):
                whole.update(f"{source.name}\0".encode())
                whole.update(_digest_of(source))
    unknown = tuple(name for name, file in files.items() if file is None)
    return ModelCode(whole.hexdigest() if files else "", unknown)


def _functions_of(model: Any) -> Iterator[Callable[..., Any]]:
    """Yield the functions that compute a model: its parts' forward passes, and its attention.

    Those that decorators have wrapped are among them, and their wrappers.
    """
    settings = model.config.get_text_config(decoder=True)
    attention = ALL_ATTENTION_FUNCTIONS.get(getattr(settings, "_attn_implementation", None))
    own = (vars(part).get("forward") for part in model.modules())
    classes = {type(part) for part in model.modules()}
    ahead = [attention, *own, *(getattr(each, "forward", None) for each in classes)]
    seen = {id(None)}
    while ahead:
        function: Any = ahead.pop()
        function = getattr(function, "__func__", function)  # of a method
        if id(function) in seen:
            continue
        seen.add(id(function))
        ahead += [getattr(function, "__wrapped__", None), getattr(function, "func", None)]
        if not isinstance(function, functools.partial):
            yield function


def _module_of(function: Callable[..., Any]) -> str:
    """Return the Python module in which a function is written, also if it says another one."""
    written = getattr(function, "__globals__", {}).get("__name__")
    return str(written or getattr(function, "__module__", None) or type(function).__module__)


def _name_of(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    name = code.co_qualname if code is not None else type(function).__qualname__
    return f"{_module_of(function)}.{name}"


def _digest_of(source: Path) -> bytes:
    """Return the digest of a source file, which is read once as long as it does not change."""
    stamp = file_stamp(str(source))
    if stamp and time.time_ns() - stamp[-1] > UNCHANGED_S * 1e9:
        return _kept_digest(source, stamp)
    return xxhash.xxh3_128_digest(source.read_bytes())


@functools.lru_cache(maxsize=1_024)
def _kept_digest(source: Path, stamp: tuple[int, ...]) -> bytes:
    del stamp  # it makes another entry of a file that has changed
    return xxhash.xxh3_128_digest(source.read_bytes())


def mode_of(model: Any) -> dict[str, str]:
    """Return the part of `computation_of` that may change between two calls of one model."""
    device = model.device.type
    autocast = torch.is_autocast_enabled(device)
    settings = model.config.get_text_config(decoder=True)
    attention = str(getattr(settings, "_attn_implementation", ""))
    capped = any(value for name, value in settings.to_dict().items() if _CAP.fullmatch(name))
    return {
        "code": code_of(model).digest,
        "autocast": f"{torch.get_autocast_dtype(device)} of {model.dtype}" if autocast else "",
        "attention": attention if capped and attention in _WITHOUT_CAP else "",
    }


def forget_positions(model: Any) -> None:
    """Let a model number the tokens of its next prompt from 0, as `generate` does for a new prompt.

    Models with M-RoPE keep the difference that the images of the last prompt made, and add it to
    the positions of any prompt whose beginning is in a cache.
    """
    for module in model.modules():
        if getattr(module, "rope_deltas", None) is not None:
            module.rope_deltas = None


def _other_frequencies(model: Any) -> str:
    """Return a digest of a model's rope frequencies; empty if they are those of its settings.

    `model.half()` and `model.to(torch.bfloat16)` round them, too, which turns keys by radians at
    the end of a long prompt; a model that is loaded with `dtype=` keeps them in float32.
    """
    differs, whole = False, xxhash.xxh3_128()
    for name, module in model.named_modules():
        own = dict(_frequencies_of(module))
        if not own:
            continue
        settings = getattr(module, "config", None)
        fresh = None if settings is None else type(module)(config=settings)
        expected = {} if fresh is None else dict(_frequencies_of(fresh))
        for buffer, values in sorted(own.items()):
            differs |= not _alike(values, expected.get(buffer))
            whole.update(f"{name}.{buffer}\0".encode())
            whole.update(values.numpy())
    return whole.hexdigest() if differs else ""


def _frequencies_of(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the rope frequencies of a module, without those that the last prompt's length made."""
    buffers: Mapping[str, Any] = dict(module.named_buffers(recurse=False))
    if not any(name.endswith(_FIRST_FREQUENCIES) for name in buffers):
        return
    kinds = getattr(module, "rope_type", "")
    varies = not {*(kinds.values() if isinstance(kinds, Mapping) else [kinds])}.isdisjoint(
        LENGTH_DEPENDENT
    )
    for name, buffer in buffers.items():
        if name.endswith(_FIRST_FREQUENCIES if varies else _FREQUENCIES):
            yield name, buffer.detach().cpu().float()


def _alike(values: torch.Tensor, expected: torch.Tensor | None) -> bool:
    return (
        expected is not None
        and values.shape == expected.shape
        and torch.allclose(values, expected, rtol=_TOLERANCE, atol=0.0)
    )
