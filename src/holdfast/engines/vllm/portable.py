"""Portable blocks of a vLLM engine: which of its pages can be converted, and how.

Portable are attention of every kind and MLA on a CPU, and attention of FlashAttention and of vLLM's
Triton kernels on a GPU, with KV of the model's own data type. The format of the pages is checked
against vLLM's own code before the first block, so that a version of vLLM with another order of
elements has no portable blocks, and never wrong ones.

A block has the layers of a kind in the whole model, whatever lists vLLM keeps their pages in and
whichever pipeline stages they are on: a stage fills its layers, a rank its heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from holdfast.blocks.layout import DTYPE_BYTES, Layout, LayoutSlice, PortableLayout
from holdfast.devices.arrange import PortablePages
from holdfast.devices.page_format import PageFormat, cpu_format, latent_format
from holdfast.engines.vllm.cpu_pages import check_kernel
from holdfast.engines.vllm.describe import backends_of, quantisation_mode
from holdfast.engines.vllm.kv_groups import CacheGeometry, PagedGroup
from holdfast.engines.vllm.unsupported import UnsupportedError
from holdfast.engines.vllm.worker_rank import WorkerRank
from holdfast.errors import BlockError

_LATENT_BACKEND = "CPU_MLA"


class StageGroups(NamedTuple):
    """The KV groups of one pipeline stage's layers, and how many layers it has that keep KV.

    `refusal`: why its blocks are not portable; empty if they may be.
    """

    groups: tuple[PagedGroup, ...]
    layers: int
    refusal: str = ""

    @classmethod
    def of(cls, groups: Sequence[PagedGroup], layers: int) -> StageGroups:
        """Return what a stage tells the others of its groups."""
        if any(group.draft is not None for group in groups):
            return cls((), layers, "the layers of a draft model are not converted")
        return cls(tuple(groups), layers)


class PortableGroup(NamedTuple):
    """The layers of a kind in the whole model, in the model's order: portable blocks have all.

    `group`: those layers; the order says nothing of their memory, as it does of exact blocks.
    `lists`: for each of the group's page lists, the layers of this stage whose pages it names. How
    vLLM divides layers into lists depends on the whole model, and is no part of a portable block.
    """

    group: PagedGroup
    lists: tuple[tuple[str, ...], ...]


def portable_groups(stages: Sequence[StageGroups], stage: int) -> list[PortableGroup]:
    """Return the groups of the whole model, from those of its stages, as one stage has them.

    Raises UnsupportedError, on every stage, if a stage has no layer of a kind.
    """
    merged: dict[PagedGroup, dict[int, _Layer]] = {}
    before = 0
    for place, each in enumerate(stages):
        if each.refusal:
            where = f"on pipeline stage {place}, " if len(stages) > 1 else ""
            raise UnsupportedError(f"{where}{each.refusal}")
        for group in each.groups:
            found = merged.setdefault(group._replace(layers=(), tables=(), numbers=()), {})
            for at, (name, number) in enumerate(zip(group.layers, group.numbers, strict=True)):
                table = group.tables[at % len(group.tables)]
                found[before + number] = _Layer(name, table, place)
        before += each.layers
    return [_portable_group(kind, layers, len(stages), stage) for kind, layers in merged.items()]


class _Layer(NamedTuple):
    """A layer of the model: its name, the list with its pages, and its pipeline stage."""

    name: str
    table: int
    stage: int


def _portable_group(
    kind: PagedGroup, layers: Mapping[int, _Layer], stages: int, stage: int
) -> PortableGroup:
    numbers = sorted(layers)
    ordered = [layers[number] for number in numbers]
    lacking = set(range(stages)) - {layer.stage for layer in ordered}
    if lacking:
        raise UnsupportedError(
            f"pipeline stage {min(lacking)} has none of the {len(ordered)} layers with "
            f"{kind.attention} attention or state"
        )
    tables = sorted({layer.table for layer in ordered})
    group = kind._replace(
        layers=tuple(layer.name for layer in ordered),
        tables=tuple(tables),
        numbers=tuple(numbers),
    )
    own = [layer for layer in ordered if layer.stage == stage]
    lists = (tuple(each.name for each in own if each.table == table) for table in tables)
    return PortableGroup(group, tuple(lists))


def portable_pages(
    vllm_config: Any,
    portable: PortableGroup,
    geometry: CacheGeometry,
    block_tokens: int,
    rank: WorkerRank,
) -> PortablePages:
    """Return how the pages of a rank and portable blocks are converted.

    Raises UnsupportedError for a model, device, setting or version whose pages are not converted.
    """
    group, spec, device = portable.group, portable.group.spec, vllm_config.device_config.device_type
    if group.attention == "recurrent":
        raise UnsupportedError(
            "the model has recurrent layers, whose states each engine keeps in a form of its own"
        )
    if device not in ("cpu", "cuda"):
        raise UnsupportedError(f"pages on {device} are not converted, only on CPUs and GPUs")
    if device == "cuda" and len(portable.lists) > 1:
        raise UnsupportedError(
            f"vLLM has {len(portable.lists)} lists of pages for layers with {group.attention} "
            "attention, and pages on GPUs are converted from one only"
        )
    cache = vllm_config.cache_config.cache_dtype
    mode = quantisation_mode(spec)
    if cache != "auto" or mode != "NONE":
        raise UnsupportedError(
            f"the KV cache is quantised ({cache}, {mode}): other engines round in another way"
        )
    for field in ("sliding_window", "attention_chunk_size"):
        if group.attention == "full" and getattr(spec, field, None):
            raise UnsupportedError(
                f"vLLM keeps layers with {field} {getattr(spec, field)} as full attention "
                "(--disable-hybrid-kv-cache-manager)"
            )
    held = [name for names in portable.lists for name in names]
    try:
        form = _format_of(vllm_config, group._replace(layers=tuple(held)), geometry)
        layout = _layout_of(vllm_config, group, rank.tp_size, form, block_tokens)
        number = {name: at for at, name in enumerate(group.layers)}
        stage = range(min(map(number.__getitem__, held)), max(map(number.__getitem__, held)) + 1)
        part = layout.rank(rank.tp_rank, rank.tp_size, stage)
        _check_heads(form, part)
        lists = tuple(tuple(number[name] for name in names) for names in portable.lists)
        return PortablePages(form, part, lists)
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
    vllm_config: Any, group: PagedGroup, tp_size: int, form: PageFormat, block_tokens: int
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
        kv_heads=_kv_heads(vllm_config, group, tp_size),
        head_size=spec.head_size,
        dtype=dtype,
        block_tokens=block_tokens,
    )


def _check_heads(form: PageFormat, part: LayoutSlice) -> None:
    """Raise UnsupportedError unless the pages hold as many heads as the layout has for a rank."""
    held = form.states[0].heads.length
    expected = {len(heads) for heads in part.heads if heads}
    if expected != {held}:
        raise UnsupportedError(
            f"a page holds {held} KV heads, and the model's settings say {sorted(expected)}"
        )


def _kv_heads(vllm_config: Any, group: PagedGroup, tp_size: int) -> int:
    """Return the KV heads of a group's layers, of all tensor-parallel ranks.

    Layers of other groups may have another number.
    """
    from vllm.model_executor.models.utils import extract_layer_index

    if tp_size == 1:
        return int(group.spec.num_kv_heads)
    by_layer = vllm_config.model_config.model_arch_config
    counts = {by_layer[extract_layer_index(name)].total_num_kv_heads for name in group.layers}
    if len(counts) > 1:
        raise UnsupportedError(f"layers of one kind have {sorted(counts)} KV heads")
    return int(counts.pop())
