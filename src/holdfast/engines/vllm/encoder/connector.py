"""`HoldfastEncoderConnector`: vLLM's encoder-cache interface, mapped onto named blocks of a node.

The scheduler side fetches an item while its request waits, and says that it exists only when its
bytes are here; they go to the workers with the step. The worker side saves what encoders compute.
Without a node, or on any failure, vLLM computes the item.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)

from holdfast.client.named_blocks import open_named_session
from holdfast.client.private_node import PrivateNode
from holdfast.client.weights_digest import NoDigestError
from holdfast.engines.vllm.describe import ENGINE
from holdfast.engines.vllm.encoder.fetches import ItemFetches
from holdfast.engines.vllm.encoder.identity import ItemNames, encoder_fingerprint
from holdfast.engines.vllm.encoder.items import DTYPES, ITEM_BYTES_MAX, EncoderItem
from holdfast.engines.vllm.encoder.options import read_encoder_options
from holdfast.engines.vllm.encoder.saves import ItemSaves
from holdfast.engines.vllm.unsupported import UnsupportedError
from holdfast.named_blocks import NamedSession
from holdfast.wire.local.reconnecting_client import NodeAddress

WAIT_S = 0.25
"""Longest time for which a request waits for an item instead of computing it."""

_log = logging.getLogger("vllm.holdfast")


@dataclass
class EncoderWork(ECConnectorMetadata):
    """One step, by identifier: items to put into the encoder cache, and names of its new items."""

    loads: dict[str, EncoderItem] = field(default_factory=dict)
    names: dict[str, bytes] = field(default_factory=dict)


class HoldfastEncoderConnector(ECConnectorBase):
    """See vLLM's `ECConnectorBase`. Options: `holdfast`, `domain`, `model_digest`."""

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        self._private: PrivateNode | None = None
        self._fetches: ItemFetches | None = None
        self._saves: ItemSaves | None = None
        self._session = self._open(vllm_config)
        if self._session is None:
            return
        if role is ECConnectorRole.SCHEDULER:
            self._fetches = ItemFetches(self._session, WAIT_S) if self.is_consumer else None
        elif self.is_producer and not vllm_config.parallel_config.rank:
            self._saves = ItemSaves(self._session)  # every rank has the same output
        self._in_engine: set[str] = set()
        """Items that vLLM's own encoder cache holds."""
        self._names = ItemNames()
        self._asked: dict[str, bytes] = {}
        """By identifier: the name of the item of the request that was asked about last."""
        self._promised: dict[bytes, EncoderItem] = {}
        """Items by name of which this step's schedule was told that they exist."""
        self._work = EncoderWork()

    # The scheduler side

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        if self._fetches is None:
            return True
        known = True
        for index, feature in enumerate(request.mm_features):
            place, identifier = feature.mm_position, feature.identifier
            if place.offset + place.length <= num_computed_tokens:
                continue
            name = self._names.name(request, index)
            if name is None:
                # Another request may have had another content of this identifier.
                self._asked.pop(identifier, None)
                continue
            self._asked[identifier] = name
            if identifier not in self._in_engine:
                # Every item is asked for, so that all are fetched at once.
                known &= self._fetches.ask(name, request.get_num_encoder_embeds(index))
        return known

    def has_cache_item(self, identifier: str) -> bool:
        if self._fetches is None:
            return False
        # vLLM asks about a request's items right after `ensure_cache_available` of this request.
        name = self._asked.get(identifier)
        if name is None:
            return False
        if name not in self._promised:
            item = self._fetches.take(name)
            if item is not None:
                self._promised[name] = item
        return name in self._promised

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        if self._session is None:
            return
        identifier = request.mm_features[index].identifier
        self._in_engine.add(identifier)
        name = self._names.name(request, index)
        if name is None:
            return
        self._work.names[identifier] = name
        if name in self._promised:
            self._work.loads[identifier] = self._promised.pop(name)

    def build_connector_meta(self, scheduler_output: Any) -> EncoderWork:
        if self._session is None:
            return EncoderWork()
        self._in_engine.difference_update(scheduler_output.free_encoder_mm_hashes)
        self._asked.clear()
        if self._fetches is not None:
            # What was promised and not used, because its request got no pages, is kept for later.
            self._fetches.keep(self._promised)
        self._promised.clear()
        work, self._work = self._work, EncoderWork()
        return work

    # The worker side

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        del kwargs
        work = self._step_work()
        for identifier, item in work.loads.items():
            if identifier not in encoder_cache:
                encoder_cache[identifier] = _tensor(item)
            if self._saves is not None:
                self._saves.note_saved(work.names[identifier])

    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any
    ) -> None:
        del kwargs
        if self._saves is None:
            return
        name = self._step_work().names.get(mm_hash)
        if name is None or self._saves.is_saved(name):
            return
        item = _item(encoder_cache[mm_hash])
        if item is not None:
            self._saves.put(name, item)

    def _step_work(self) -> EncoderWork:
        work = self._get_connector_metadata()
        return work if isinstance(work, EncoderWork) else EncoderWork()

    # Both sides

    def shutdown(self) -> None:
        for part in (self._fetches, self._saves, self._session, self._private):
            if part is not None:
                part.close()

    def _open(self, vllm_config: Any) -> NamedSession | None:
        """Open the blocks of the model's encoder outputs; None, with a warning, if it has none."""
        transfer = vllm_config.ec_transfer_config
        setting = read_encoder_options(transfer.ec_connector_extra_config)
        try:
            fingerprint = encoder_fingerprint(vllm_config, setting)
            address: NodeAddress = setting.address
            if not address:
                self._private = PrivateNode(transfer.engine_id)
                address = self._private.present_address
        except (UnsupportedError, NoDigestError) as error:
            _log.warning("Holdfast keeps no encoder outputs of this engine: %s", error)
            return None
        return open_named_session(address, fingerprint, setting.domain, f"{ENGINE} encoder")


def _item(output: torch.Tensor) -> EncoderItem | None:
    """Return an encoder output as an item; None if it has another shape, type or size."""
    dtype = str(output.dtype).removeprefix("torch.")
    nbytes = output.numel() * output.element_size()
    if output.dim() != 2 or dtype not in DTYPES or not 0 < nbytes <= ITEM_BYTES_MAX:  # noqa: PLR2004
        return None
    rows = output.detach().to("cpu", copy=True).contiguous()
    data = rows.view(torch.uint8).numpy().tobytes()
    return EncoderItem(output.shape[0], output.shape[1], dtype, data)


def _tensor(item: EncoderItem) -> torch.Tensor:
    """Return an item on the device of this worker."""
    from vllm.platforms import current_platform

    dtype: torch.dtype = getattr(torch, item.dtype)
    rows = torch.frombuffer(bytearray(item.data), dtype=dtype).reshape(item.rows, item.width)
    device = current_platform.device_type
    if current_platform.is_cuda_alike():
        device = f"{device}:{current_platform.current_device()}"
    return rows.to(device)
