"""What SGLang needs of CUDA builds, replaced for a CPU: Python imports this file at its start.

SGLang 0.5.23 serves on a CPU, but it imports packages that exist for CUDA only, and the copies
between its host pools and its device pool are CUDA kernels. Here are an importable `sgl_kernel`
whose functions raise, the names of torchvision's operators, those copies in torch, and the form of
latent attention (MLA) that needs no CUDA kernel. On request (`NEW_TOKENS_ONLY`) attention is that
of a prompt's new tokens only, as on GPUs. It is for tests and benches only.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

KERNELS = "sgl_kernel"

RESERVE = "HICACHE_HOST_MEMORY_RESERVE_BYTES"

NEW_TOKENS_ONLY = "HOLDFAST_SGLANG_NEW_TOKENS_ONLY"
"""Name of a variable; if it is set, attention computes the new tokens of a prompt only."""

OPERATORS = (
    *("nms", "qnms", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d"),
    *("_roi_align_backward", "_roi_pool_backward", "_ps_roi_align_backward"),
    *("_ps_roi_pool_backward", "_deform_conv2d_backward"),
)
"""Operators that torchvision describes when it is imported; nothing here calls them."""


class Absent:
    """An attribute of a package that is not there: it has attributes, and calling it raises."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __call__(self, *_: object, **__: object) -> None:
        raise RuntimeError(f"{self._name} needs a CUDA build of SGLang")


class StubLoader(importlib.abc.Loader):
    """Loads a package that has any attribute."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        def attribute(name: str) -> Absent:
            return getattr(Absent(module.__name__), name)  # type: ignore[no-any-return]

        vars(module)["__getattr__"] = attribute


class PatchingLoader(importlib.abc.Loader):
    """Loads a module with its own loader; calls `before` and `after` it."""

    def __init__(
        self,
        loader: importlib.abc.Loader,
        before: Callable[[], None],
        after: Callable[[ModuleType], None],
    ) -> None:
        self._loader, self._before, self._after = loader, before, after

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._before()
        self._loader.exec_module(module)
        self._after(module)


class ReplacingFinder(importlib.abc.MetaPathFinder):
    """Finds the stubs, and the modules that are changed after they are loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] == KERNELS:
            return importlib.machinery.ModuleSpec(fullname, StubLoader(), is_package=True)
        before, after = BEFORE.get(fullname), AFTER.get(fullname)
        if before is None and after is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = PatchingLoader(
                spec.loader, before or (lambda: None), after or (lambda _: None)
            )
        return spec


def declare_operators() -> None:
    """Declare torchvision's operators, whose library loads with CUDA only."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in OPERATORS:
        library.define(f"{name}() -> ()")
    _kept.append(library)


def unpinned(module: ModuleType) -> None:
    """Leave host memory as it is: without CUDA there is nothing to pin it for."""
    for name in ("_cuda_host_register", "_cuda_host_unregister"):
        setattr(module, name, lambda *_, **__: None)


def copying(module: ModuleType) -> None:
    """Give a module of host pools the copies of the I/O backend `direct`, in torch."""
    for copy in (
        transfer_kv_direct,
        transfer_kv_per_layer_direct_pf_lf,
        transfer_kv_all_layer_direct_lf_pf,
    ):
        setattr(module, copy.__name__, copy)
    if hasattr(module, "_cuda_host_register"):
        unpinned(module)
    if hasattr(module, "HostKVCache"):
        module.HostKVCache.pin_memory = property(lambda _: False, lambda _, __: None)
    if hasattr(module, RESERVE):
        setattr(module, RESERVE, 0)  # by default SGLang wants 10 GiB to be free


def attending_new_tokens(module: ModuleType) -> None:
    """Compute attention for the new tokens of a prompt only.

    The backend `torch_native` computes it for all tokens, also for those whose keys and values come
    from a cache, and discards their results: behind 4,096 cached tokens 16 new ones take seconds.
    """
    if NEW_TOKENS_ONLY not in os.environ:  # what starts this server sets it
        return
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    of_all_tokens = module.TorchNativeAttnBackend._run_sdpa_forward_extend  # noqa: SLF001

    def of_new_tokens(
        self: Any, query: Any, output: Any, keys: Any, values: Any, *lists: Any, **options: Any
    ) -> Any:
        slots, numbers, lengths, prefixes, _, encoders = lists
        window = options["sliding_window_size"]
        if encoders is not None or window is not None or not options["causal"]:
            return of_all_tokens(self, query, output, keys, values, *lists, **options)
        first = 0
        for number, length, prefix in zip(
            numbers.tolist(), lengths.tolist(), prefixes.tolist(), strict=True
        ):
            end = first + length - prefix
            tokens = slots[number, :length]
            key, value = (part[tokens].transpose(0, 1).to(query.dtype) for part in (keys, values))
            mask = torch.ones(end - first, length, dtype=torch.bool).tril(prefix)
            output[first:end] = scaled_dot_product_attention(
                query[first:end].transpose(0, 1).unsqueeze(0),
                key.unsqueeze(0),
                value.unsqueeze(0),
                attn_mask=mask if prefix else None,
                enable_gqa=options["enable_gqa"],
                scale=options["scaling"],
                is_causal=not prefix,
            )[0].transpose(0, 1)
            first = end
        return output

    module.TorchNativeAttnBackend._run_sdpa_forward_extend = of_new_tokens  # noqa: SLF001


def attending_latents(module: ModuleType) -> None:
    """Compute latent attention (MLA) from the latents in the pool, also for a prompt's first chunk.

    For that chunk SGLang passes keys and values to attention, but the backend `torch_native` takes
    them from the pool, which has latents.
    """
    method = module.AttnForwardMethod.MLA
    module.AttentionBackendRegistry.register("torch_native", lambda *_: method)


def transfer_kv_direct(
    src_layers: Any,
    dst_layers: Any,
    src_indices: Any,
    dst_indices: Any,
    page_size: int,
) -> None:
    """Copy tokens of each layer: both sides have one tensor a layer."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Any,
    dst_ptrs: Any,
    src_indices: Any,
    dst_indices: Any,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy one layer of pages `[page][layer][token]` to a layer's tensor."""
    pages = src_indices[::page_size] // page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id].flatten(0, 1).view_as(target[dst_indices])


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Any,
    dst_ptrs: Any,
    src_indices: Any,
    dst_indices: Any,
    page_size: int,
) -> None:
    """Copy all layers to pages `[page][layer][token]`: keys of all layers, then values."""
    pages = dst_indices[::page_size] // page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for which, target in enumerate(dst_ptrs):
        for layer in range(layers):
            rows = src_ptrs[which * layers + layer][src_indices]
            target[pages, layer] = rows.view_as(target[pages, layer])


_POOLS = "sglang.srt.mem_cache.pool_host"
BEFORE = {"torchvision": declare_operators}
AFTER = {f"{_POOLS}.common": unpinned, f"{_POOLS}.base": copying} | {
    f"{_POOLS}.{name}": copying for name in ("mha", "mla", "mamba", "dsa")
}
AFTER["sglang.srt.layers.attention.torch_native_backend"] = attending_new_tokens
AFTER["sglang.srt.models.deepseek_common.attention_backend_handler"] = attending_latents
_kept: list[object] = []

sys.meta_path.insert(0, ReplacingFinder())
