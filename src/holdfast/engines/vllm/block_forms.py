"""What the blocks of each KV group of an engine are: exact pages, or portable blocks.

Portable blocks of all groups, or exact ones of all: a context is held if every group holds it, so
other engines could not use some of the groups.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from holdfast.blocks.fingerprint import Fingerprint
from holdfast.blocks.payload_part import SliceCopy
from holdfast.devices.arrange import PortablePages
from holdfast.devices.base import LayerPages, Pages
from holdfast.engines.vllm.describe import block_tokens_of, fingerprint_of, portable_fingerprint_of
from holdfast.engines.vllm.kv_groups import (
    CacheGeometry,
    PagedGroup,
    geometry_of,
    paged_groups,
)
from holdfast.engines.vllm.options import ConnectorSettings
from holdfast.engines.vllm.portable import (
    PortableGroup,
    StageGroups,
    portable_groups,
    portable_pages,
)
from holdfast.engines.vllm.unsupported import UnsupportedError
from holdfast.engines.vllm.worker_rank import WorkerRank, gather_stages

_log = logging.getLogger("vllm.holdfast")


class BlockForm(NamedTuple):
    """What the blocks of a KV group are: where their pages are, and how they are converted.

    `group`: its layers, those of the whole model if blocks are portable. `held`: the layers of this
    rank whose tensors hold the pages. `portable` None: blocks are whole pages. `is_first`: no rank
    before this one has equal pages.
    """

    group: PagedGroup
    pages: Pages
    held: tuple[str, ...]
    fingerprint: Fingerprint
    portable: PortablePages | None = None
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


class WorkerCache(NamedTuple):
    """The KV cache of one worker: vLLM's configurations, the tensors that it registered by layer.

    `rank`: the worker's place in its engine.
    """

    vllm_config: Any
    kv_cache_config: Any
    tensors: Mapping[str, Any]
    rank: WorkerRank = WorkerRank()

    @property
    def pages(self) -> int:
        """The number of pages of each layer."""
        return int(self.kv_cache_config.num_blocks)

    def geometry(self, group: PagedGroup) -> CacheGeometry:
        """Return where the pages of a group are; raise UnsupportedError if a page has gaps."""
        return geometry_of(group, self.tensors, self.pages)


def block_forms(cache: WorkerCache, setting: ConnectorSettings) -> list[BlockForm]:
    """Return what the blocks of each KV group of a worker are, by the option `layout`.

    If portable blocks were chosen and cannot be made, blocks are exact, and a warning says why.
    Raises UnsupportedError for an unsupported model or setting. All pipeline stages must call it,
    because a stage learns from the others which layers they have.
    """
    names = {name for group in cache.kv_cache_config.kv_cache_groups for name in group.layer_names}
    try:
        groups = paged_groups(cache.vllm_config, cache.kv_cache_config, cache.tensors)
    except Exception as error:  # of any kind: the other stages wait for an answer
        gather_stages(cache.rank, StageGroups((), len(names), str(error) or repr(error)))
        raise
    stages = gather_stages(cache.rank, StageGroups.of(groups, len(names)))
    if setting.layout == "portable":
        try:
            of_model = portable_groups(stages, cache.rank.pp_rank)
            return [_portable_form(cache, group, setting) for group in of_model]
        except UnsupportedError as error:
            _log.warning(
                "blocks are exact, not portable, so contexts of other engines are not found: %s",
                error,
            )
    # Another division of the model may give a stage as many layers, and other ones.
    before = sum(stage.layers for stage in stages[: cache.rank.pp_rank])
    return [_exact_form(cache, group.numbered_after(before), setting) for group in groups]


def _exact_form(cache: WorkerCache, group: PagedGroup, setting: ConnectorSettings) -> BlockForm:
    """Return exact blocks: whole pages of this rank."""
    geometry = cache.geometry(group)
    fingerprint = fingerprint_of(cache.vllm_config, group, geometry, setting, cache.rank)
    block_tokens = fingerprint.representation.block_tokens
    return BlockForm(
        group,
        geometry.pages_of(block_tokens // group.page_tokens),
        group.layers[:: len(group.tables)],
        fingerprint,
        is_first=cache.rank.saves(group.spec),
    )


def _portable_form(
    cache: WorkerCache, portable: PortableGroup, setting: ConnectorSettings
) -> BlockForm:
    """Return portable blocks; raise UnsupportedError if the pages are not converted."""
    group, held = portable.group, [names for names in portable.lists if names]
    block_tokens = block_tokens_of(setting, group)
    by_list = [cache.geometry(_of_list(group, names)) for names in held]
    orders = {(each.order, each.page_bytes) for each in by_list}
    if len(orders) > 1:
        raise UnsupportedError(f"pages of layers that are alike differ: {sorted(orders)}")
    converted = portable_pages(cache.vllm_config, portable, by_list[0], block_tokens, cache.rank)
    geometries = iter(by_list)
    empty = by_list[0]._replace(bases=())
    pages = _pages_of(
        [next(geometries) if names else empty for names in portable.lists],
        block_tokens // group.page_tokens,
    )
    layout = converted.part.layout
    fingerprint = portable_fingerprint_of(cache.vllm_config, group, layout, setting)
    layers = tuple(name for names in held for name in names)
    return BlockForm(group, pages, layers, fingerprint, converted)


def _of_list(group: PagedGroup, names: tuple[str, ...]) -> PagedGroup:
    """Return the layers of a group whose pages one list names."""
    return group._replace(layers=names, tables=group.tables[:1])


def _pages_of(by_list: Sequence[CacheGeometry], per_list: int) -> Pages:
    """Return pages as a device needs them; a block has `per_list` pages of each list."""
    groups = tuple(LayerPages(each.bases, each.stride_bytes, each.page_bytes) for each in by_list)
    count = len(by_list)
    return Pages(groups, by_list[0].pages, per_list * count, lists=count)
