"""Portable blocks of a vLLM engine: which of its pages can be converted, and how.

Portable are full attention and MLA on a CPU, and full attention of FlashAttention and of vLLM's
Triton kernels on a GPU, with KV of the model's own data type. The format of the pages is checked
against vLLM's own code before the first block, so that a version of vLLM with another order of
elements has no portable blocks, and never wrong ones.
"""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any, NamedTuple

from holdfast.blocks.fingerprint import Fingerprint
from holdfast.blocks.layout import DTYPE_BYTES, Layout, PortableLayout
from holdfast.blocks.payload_part import SliceCopy
from holdfast.devices.arrange import PortablePages
from holdfast.devices.page_format import PageFormat, cpu_format, latent_format
from holdfast.engines.vllm.cpu_pages import check_kernel
from holdfast.engines.vllm.describe import (
    backends_of,
    block_tokens_of,
    fingerprint_of,
    portable_fingerprint_of,
    quantisation_mode,
)
from holdfast.engines.vllm.kv_groups import CacheGeometry, PagedGroup
from holdfast.engines.vllm.options import ConnectorSettings
from holdfast.engines.vllm.unsupported import UnsupportedError
from holdfast.engines.vllm.worker_rank import WorkerRank
from holdfast.errors import BlockError

_LATENT_BACKEND = "CPU_MLA"

_log = logging.getLogger("vllm.holdfast")


class BlockForm(NamedTuple):
    """What an engine's blocks are: their fingerprint, and how portable ones are converted.

    `portable` None: blocks are whole pages. `is_first`: no rank before this one has equal pages.
    """

    fingerprint: Fingerprint
    portable: PortablePages | None
    is_first: bool = True

    @property
    def part(self) -> bytes:
        """The ranges of each payload that this rank writes, if other ranks write the rest."""
        return self._copy().part

    @property
    def writes(self) -> bool:
        """Whether this rank writes any part of a block; of ranks with equal pages, one does."""
        return self.is_first and self._copy().writes

    def _copy(self) -> SliceCopy:
        part = self.portable.part if self.portable is not None else None
        return SliceCopy(self.fingerprint.representation.raw_bytes, part)


def block_form(
    vllm_config: Any,
    group: PagedGroup,
    geometry: CacheGeometry,
    setting: ConnectorSettings,
    rank: WorkerRank,
) -> BlockForm:
    """Return what the blocks of a rank are, by the option `layout`.

    If portable blocks were chosen and cannot be made, blocks are exact, and a warning says why.
    """
    if setting.layout == "portable":
        try:
            block_tokens = block_tokens_of(setting, group)
            pages = portable_pages(vllm_config, group, geometry, block_tokens, rank)
            layout = pages.part.layout
            return BlockForm(portable_fingerprint_of(vllm_config, group, layout, setting), pages)
        except UnsupportedError as error:
            _log.warning(
                "blocks are exact, not portable, so contexts of other engines are not found: %s",
                error,
            )
    fingerprint = fingerprint_of(vllm_config, group, geometry, setting, rank)
    return BlockForm(fingerprint, None, rank.saves(group.spec))


def portable_pages(
    vllm_config: Any,
    group: PagedGroup,
    geometry: CacheGeometry,
    block_tokens: int,
    rank: WorkerRank,
) -> PortablePages:
    """Return how the pages of a rank and portable blocks are converted.

    Raises UnsupportedError for a model, device, setting or version whose pages are not converted.
    """
    spec, device = group.spec, vllm_config.device_config.device_type
    if group.attention != "full" or len(group.tables) != 1:
        raise UnsupportedError(
            f"the pages of {group.attention} attention in {len(group.tables)} of vLLM's KV cache "
            "groups are not converted, only full attention in one"
        )
    if rank.pp_size > 1:
        raise UnsupportedError(
            f"pipeline_parallel_size is {rank.pp_size}, and the layers of one stage are not "
            "converted, only those of a whole model"
        )
    if device not in ("cpu", "cuda"):
        raise UnsupportedError(f"pages on {device} are not converted, only on CPUs and GPUs")
    cache = vllm_config.cache_config.cache_dtype
    mode = quantisation_mode(spec)
    if cache != "auto" or mode != "NONE":
        raise UnsupportedError(
            f"the KV cache is quantised ({cache}, {mode}): other engines round in another way"
        )
    for field in ("sliding_window", "attention_chunk_size"):
        if getattr(spec, field, None):
            raise UnsupportedError(f"layers with {field} {getattr(spec, field)} are not converted")
    _check_layer_order(group)
    try:
        form = _format_of(vllm_config, group, geometry)
        layout = _layout_of(vllm_config, group, form, block_tokens)
        return PortablePages(form, layout.rank(rank.tp_rank, rank.tp_size))
    except BlockError as error:
        raise UnsupportedError(str(error)) from error


def _format_of(vllm_config: Any, group: PagedGroup, geometry: CacheGeometry) -> PageFormat:
    """Return the format of the pages; raise UnsupportedError if vLLM's tensors do not have it."""
    spec, tokens, size = group.spec, group.page_tokens, group.spec.head_size
    if type(spec).__name__ == "MLAAttentionSpec":
        named = backends_of(vllm_config, group)
        if named != {_LATENT_BACKEND}:
            raise UnsupportedError(
                f"pages of {'+'.join(sorted(named))} are not converted, only of {_LATENT_BACKEND}"
            )
        shape = [tokens, size]
        form = latent_format(tokens, size, spec.dtype.itemsize)
    else:
        if spec.head_size_v != size:
            raise UnsupportedError(
                f"keys of {size} and values of {spec.head_size_v} elements are not converted"
            )
        if vllm_config.device_config.device_type != "cpu":
            return _gpu_format_of(vllm_config, group, geometry)
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        isa = _get_attn_isa(spec.dtype, tokens, size, vllm_config.cache_config.cache_dtype)
        shape = [spec.num_kv_heads, tokens, 2 * size]
        form = cpu_format(isa, spec.num_kv_heads, tokens, size, spec.dtype.itemsize)
        check_kernel(form, isa, spec.dtype)
    if not _is_plain(geometry.order, shape):
        raise UnsupportedError(
            f"vLLM's pages have the order {geometry.order}; known is {shape} in this order"
        )
    return form


def _gpu_format_of(vllm_config: Any, group: PagedGroup, geometry: CacheGeometry) -> PageFormat:
    """Return the format of pages on a GPU; raise UnsupportedError if it is not known."""
    from holdfast.engines.vllm.gpu_pages import BACKENDS, check_layer, gpu_format, is_amd

    spec, named = group.spec, backends_of(vllm_config, group)
    if is_amd():
        raise UnsupportedError("pages on GPUs of AMD are not converted")
    if len(named) != 1 or not named <= {*BACKENDS}:
        raise UnsupportedError(
            f"pages of {'+'.join(sorted(named)) or 'an unknown backend'} are not converted on a "
            f"GPU, only of {' and '.join(BACKENDS)}"
        )
    sizes = (spec.num_kv_heads, group.page_tokens, spec.head_size, spec.dtype.itemsize)
    form = gpu_format(geometry.order, *sizes)
    layer = vllm_config.compilation_config.static_forward_context[group.layers[0]]
    check_layer(form, layer, spec.dtype, geometry.device)
    return form


def _is_plain(order: str, shape: list[int]) -> bool:
    """Whether a page is one row of the kernel, and has this shape in the order of its axes.

    `order` is that of `CacheGeometry`. Axes of length 1 have no place in the order.
    """
    rows, _, rest = order.partition("x")
    lengths, _, axes = rest.partition(":")
    found = {str(axis): int(length) for axis, length in enumerate(lengths.split("."), 1)}
    in_memory = [axis for axis in axes if found[axis] > 1]
    is_ordered = in_memory == sorted(in_memory)
    return (
        rows == "1" and is_ordered and [found[a] for a in in_memory] == [n for n in shape if n > 1]
    )


def _layout_of(
    vllm_config: Any, group: PagedGroup, form: PageFormat, block_tokens: int
) -> PortableLayout:
    """Return the portable layout of the whole model."""
    spec, layers = group.spec, len(group.layers)
    dtype = str(spec.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise UnsupportedError(f"KV of {dtype} is not converted; known: {', '.join(DTYPE_BYTES)}")
    if len(form.states) == 1:
        return Layout.portable_latent(
            layers=layers, latent_size=spec.head_size, dtype=dtype, block_tokens=block_tokens
        )
    return Layout.portable(
        layers=layers,
        kv_heads=vllm_config.model_config.get_total_num_kv_heads(),
        head_size=spec.head_size,
        dtype=dtype,
        block_tokens=block_tokens,
    )


def _check_layer_order(group: PagedGroup) -> None:
    """Raise UnsupportedError unless the layers are in the order of the model."""
    from vllm.model_executor.models.utils import extract_layer_index

    numbers = [extract_layer_index(name) for name in group.layers]
    if any(after <= before for before, after in pairwise(numbers)):
        raise UnsupportedError(f"vLLM lists the model's layers in the order {numbers}")
