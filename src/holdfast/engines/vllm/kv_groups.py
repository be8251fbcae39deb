"""The KV groups of a vLLM model, and where their pages are, from vLLM's configuration and tensors.

vLLM divides a model into *KV cache groups*, each with a list of page numbers per request. How it
divides layers that are alike depends on all layers of the model: of five layers with a window and
one without it makes six groups. A KV group of ours has all layers that are alike, so it may have
pages from several of these lists.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from holdfast.blocks.fingerprint import Attention, KvGroup
from holdfast.devices.base import Pages
from holdfast.engines.cached_models import (
    Caching,
    LayerKind,
    Mechanism,
    ModelKind,
    kind_of,
)
from holdfast.engines.vllm.draft import Draft, draft_of
from holdfast.engines.vllm.unsupported import UnsupportedError

NULL_PAGE = 0
"""vLLM's page that no request owns: it stands for pages that a request does not need any more."""

_MECHANISMS: Mapping[str, Mechanism] = {
    "FullAttentionSpec": "full",
    "MLAAttentionSpec": "full",
    "SlidingWindowSpec": "window",
    "ChunkedLocalAttentionSpec": "chunk",
    "MambaSpec": "recurrent",
    "SlidingWindowMLASpec": "sparse",
}

_ATTENTION: Mapping[str, Attention] = {
    "FullAttentionSpec": "full",
    "MLAAttentionSpec": "full",
    "SlidingWindowSpec": "window",
    "ChunkedLocalAttentionSpec": "chunk",
    "MambaSpec": "recurrent",
}
"""KV cache specs whose pages are cached."""

_ALIGNED = "align"
"""vLLM's mode in which it keeps recurrent states at the end of blocks."""


class PagedGroup(NamedTuple):
    """A KV group: layers that are alike, with the same number of tokens in a page.

    `tables`: the numbers of vLLM's KV cache groups whose lists name the pages. `layers`: in the
    order of a payload; layer i is in table `i % len(tables)`, and the layers of one slot, one for
    each table, share their memory. `numbers`: of the layers in the model, as in `KvGroup`.
    `retained`: tokens before its window that a resume needs, too. `draft`: the draft model whose
    layers these are; None for layers of the model itself.
    """

    layers: tuple[str, ...]
    page_tokens: int
    spec: Any
    tables: tuple[int, ...] = (0,)
    numbers: tuple[int, ...] = ()
    attention: Attention = "full"
    window: int = 0
    retained: int = 0
    draft: Draft | None = None

    @property
    def lookahead(self) -> int:
        """Tokens after a block that its content depends on, too."""
        return self.draft.lookahead if self.draft is not None else 0

    @property
    def kv_group(self) -> KvGroup:
        """The group as its fingerprint names it."""
        numbers = self.numbers or tuple(range(len(self.layers)))
        return KvGroup(self.attention, self.window, tuple(sorted(numbers)))

    def numbered_after(self, layers: int) -> PagedGroup:
        """Return the group as that of a pipeline stage behind this many layers that keep KV."""
        return self._replace(numbers=tuple(layers + number for number in self.numbers))


class CacheGeometry(NamedTuple):
    """Addresses and sizes of the pages of every slot; `order`: element order inside a page.

    `tables`: page lists of the group. `device`: where the pages are, as PyTorch names it.
    """

    bases: tuple[int, ...]
    stride_bytes: int
    page_bytes: int
    pages: int
    order: str
    device: str = "cpu"
    tables: int = 1

    def pages_of(self, pages_per_block: int) -> Pages:
        """Return the pages as a device needs them; a block has `pages_per_block` of each table.

        A device knows no tables: the pages of a block are those of the first table, then those of
        the second one, and so on.
        """
        per_block = pages_per_block * self.tables
        return Pages.uniform(self.bases, self.stride_bytes, self.page_bytes, self.pages, per_block)


def paged_groups(
    vllm_config: Any, kv_cache_config: Any, tensors: Mapping[str, Any]
) -> list[PagedGroup]:
    """Return the model's KV groups, and those of its draft model, if it has one.

    Raises UnsupportedError for an unsupported model or setting.
    """
    groups = kv_cache_config.kv_cache_groups
    if model_kind(groups).caching is not Caching.YES:
        raise UnsupportedError(why_not_cached(groups))
    _check_settings(vllm_config)
    draft = draft_of(vllm_config)
    alike: list[_LikeLayers] = []
    for table, group in enumerate(groups):
        if getattr(group, "enable_kv_transfer", True):  # others are copies of such a group
            for name, spec in _layers_of(group):
                if type(spec).__name__ not in _ATTENTION:
                    raise UnsupportedError(why_not_cached(groups))
                if name not in tensors:
                    raise UnsupportedError(f"vLLM registered no KV cache for layer {name!r}")
                _check_spec(spec)
                owner = draft if draft is not None and draft.has(name) else None
                found = next((a for a in alike if (a.spec, a.draft) == (spec, owner)), None)
                if found is None:
                    alike.append(found := _LikeLayers(spec, owner, {}))
                found.tables.setdefault(table, []).append(name)
    if draft is not None and not any(found.draft for found in alike):
        raise UnsupportedError(
            f"no layer with KV is known as one of the draft model of the speculative method "
            f"{draft.method!r}"
        )
    names = [name for group in groups for name in group.layer_names]
    drafts = [name for name in names if draft is not None and draft.has(name)]
    numbers = _numbers([name for name in names if name not in drafts]) | _numbers(drafts)
    return [
        _paged_group(found, part, numbers)
        for found in alike
        for part in _sharing_memory(found.tables, tensors)
    ]


class _LikeLayers(NamedTuple):
    """Layers of one specification, of the model or of its draft, by vLLM's KV cache group."""

    spec: Any
    draft: Draft | None
    tables: dict[int, list[str]]


def _check_spec(spec: Any) -> None:
    """Raise UnsupportedError for a specification whose pages are not what their tokens say."""
    if getattr(spec, "non_causal", False):
        raise UnsupportedError(
            "the model attends to later tokens, so the KV of a prefix is not its own"
        )
    if getattr(spec, "mamba_cache_mode", _ALIGNED) != _ALIGNED:
        raise UnsupportedError(
            "the model has recurrent layers, and vLLM keeps their states at the end of blocks with "
            "prefix caching only; start it with --enable-prefix-caching"
        )


def _check_settings(vllm_config: Any) -> None:
    """Raise UnsupportedError for a setting under which pages are not what their tokens say."""
    parallel = vllm_config.parallel_config
    for name in (
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if getattr(parallel, name, 1) > 1:
            raise UnsupportedError(f"{name} {getattr(parallel, name)} is not supported, only 1")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise UnsupportedError("calculate_kv_scales computes scales that differ between runs")


def _sharing_memory(
    tables: Mapping[int, Sequence[str]], tensors: Mapping[str, Any]
) -> list[dict[int, list[str]]]:
    """Divide the tables of like layers into those whose layers share their memory, slot by slot."""
    parts: dict[frozenset[int], dict[int, list[str]]] = {}
    slots: dict[frozenset[int], list[int]] = {}
    for table, names in tables.items():
        by_base = {tensors[name].data_ptr(): name for name in names}
        bases = frozenset(by_base)
        if len(by_base) != len(names):
            raise UnsupportedError(f"layers of one KV cache group share their memory: {names}")
        order = slots.setdefault(bases, list(by_base))
        parts.setdefault(bases, {})[table] = [by_base[base] for base in order]
    return list(parts.values())


def _paged_group(
    alike: _LikeLayers, part: Mapping[int, Sequence[str]], numbers: Mapping[str, int]
) -> PagedGroup:
    """Return the group of those of like layers that share their memory."""
    spec = alike.spec
    layers = tuple(name for slot in zip(*part.values(), strict=True) for name in slot)
    attention = _ATTENTION[type(spec).__name__]
    size = {"window": "sliding_window", "chunk": "attention_chunk_size"}.get(attention)
    return PagedGroup(
        layers=layers,
        page_tokens=spec.block_size,
        spec=spec,
        tables=tuple(part),
        numbers=tuple(numbers[name] for name in layers),
        attention=attention,
        window=getattr(spec, size) if size else 0,
        retained=getattr(spec, "extra_retained_tokens", 0),
        draft=alike.draft,
    )


def _numbers(names: Sequence[str]) -> dict[str, int]:
    """Return the number of each layer, counted in the order of the numbers in their names."""

    def parts(name: str) -> list[tuple[int, str]]:
        return [
            (int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)
        ]

    def depth(name: str) -> tuple[int, list[tuple[int, str]]]:
        first = re.search(r"\d+", name)
        return int(first.group()) if first else -1, parts(name)

    return {name: number for number, name in enumerate(sorted(names, key=depth))}


def model_kind(groups: Sequence[Any]) -> ModelKind:
    """Return the kind of a model from vLLM's KV cache groups."""
    layers: list[LayerKind] = []
    latent_sizes: set[float] = set()
    for spec in _specs_of(groups):
        name = type(spec).__name__
        mechanism = _MECHANISMS.get(name, "other")
        size = 0.0
        if mechanism not in ("recurrent", "other"):
            size = spec.unpadded_page_size_bytes / spec.block_size
        if name == "MLAAttentionSpec":
            latent_sizes.add(size)
        layers.append(LayerKind(mechanism, size))
    if len(latent_sizes) > 1:  # the latent of each token, and the keys of an index
        layers.append(LayerKind("sparse", 0.0))
    return kind_of(layers)


def why_not_cached(groups: Sequence[Any]) -> str:
    """Return why the connector does not cache a model."""
    kind = model_kind(groups)
    names = Counter(type(spec).__name__ for spec in _specs_of(groups))
    listed = ", ".join(f"{count} of {name}" for name, count in names.items())
    text = f"the model has {kind.layers} ({len(groups)} KV cache groups; layers: {listed}), and "
    if kind.caching is Caching.YES:
        return f"{text}the connector does not know the pages of one of these kinds"
    return f"{text}such a model is not cached yet: {kind.why}"


def _specs_of(groups: Sequence[Any]) -> Iterator[Any]:
    """Yield the specification of each layer."""
    for group in groups:
        for _, spec in _layers_of(group):
            yield spec


def _layers_of(group: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the specification of each layer of one of vLLM's groups."""
    spec = group.kv_cache_spec
    each = getattr(spec, "kv_cache_specs", None)
    for name in group.layer_names:
        yield name, each[name] if each else spec


def geometry_of(group: PagedGroup, tensors: Mapping[str, Any], pages: int) -> CacheGeometry:
    """Measure the tensors that vLLM registered; raise UnsupportedError if a page has gaps."""
    missing = [name for name in group.layers if name not in tensors]
    if missing:
        raise UnsupportedError(f"vLLM registered no KV cache for layer {missing[0]!r}")
    layers = [tensors[name] for name in group.layers]
    shapes = {(tuple(t.shape), tuple(t.stride()), t.element_size(), str(t.device)) for t in layers}
    if len(shapes) != 1:
        raise UnsupportedError(f"layers differ in shape, stride, dtype or device: {sorted(shapes)}")
    (shape, strides, itemsize, device), *_ = shapes
    if shape[0] % pages:
        raise UnsupportedError(
            f"the KV cache has {shape[0]} rows, which is not a multiple of {pages} pages"
        )
    kernel_rows = shape[0] // pages
    inner = sorted(zip(strides[1:], shape[1:], range(1, len(shape)), strict=True), reverse=True)
    dense = 1
    for stride, length, _ in reversed(inner):
        if stride != dense and length > 1:
            raise UnsupportedError(f"a page is not contiguous: shape {shape}, strides {strides}")
        dense *= length
    if kernel_rows > 1 and strides[0] != dense:
        raise UnsupportedError(f"a page is {kernel_rows} rows with gaps: strides {strides}")
    page_bytes = kernel_rows * dense * itemsize
    spec_bytes = group.spec.page_size_bytes
    if page_bytes not in (spec_bytes, getattr(group.spec, "real_page_size_bytes", spec_bytes)):
        raise UnsupportedError(
            f"a page has {page_bytes} bytes, vLLM's configuration says {spec_bytes}"
        )
    lengths = ".".join(str(length) for length in shape[1:])
    order = f"{kernel_rows}x{lengths}:{''.join(str(axis) for *_, axis in inner)}"
    tables = len(group.tables)
    bases = tuple(layer.data_ptr() for layer in layers[::tables])
    stride_bytes = kernel_rows * strides[0] * itemsize
    return CacheGeometry(bases, stride_bytes, page_bytes, pages, order, device, tables)
