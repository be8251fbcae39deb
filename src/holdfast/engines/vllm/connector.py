"""`HoldfastConnector`: vLLM's connector interface, mapped onto our two sides.

Loads are asynchronous only, layer hooks do nothing, and whatever goes wrong ends in computing. A
model or setting that is not handled turns the connector passive: one warning, and vLLM runs as if
it were not there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from holdfast.blocks.fingerprint import Fingerprint
from holdfast.devices.base import Device
from holdfast.devices.host import HostDevice
from holdfast.engines.vllm.counters import Counts
from holdfast.engines.vllm.describe import (
    Geometry,
    Group,
    UnsupportedError,
    fingerprint_of,
    geometry_of,
    only_group,
)
from holdfast.engines.vllm.options import Setting, failure_policy_advice, read_options
from holdfast.engines.vllm.private import PrivateNode
from holdfast.engines.vllm.scheduler import SchedulerSide
from holdfast.engines.vllm.teller import Teller
from holdfast.engines.vllm.work import Described, Said, Work
from holdfast.engines.vllm.worker import WorkerSide
from holdfast.errors import HoldfastError
from holdfast.wire.link import Link
from holdfast.wire.messages import PROTOCOL, Hello

ANSWER_S = 2.0
"""A node that takes longer for a greeting, or leaves requests lying, counts as gone."""

START_S = 10.0
"""How long an engine's start waits for the node; without it, it goes on and keeps trying."""

_SOURCES = {"host": CacheHitSource.HOST, "disk": CacheHitSource.DISK, "pool": CacheHitSource.P2P}

_log = logging.getLogger("vllm.holdfast")


class HoldfastConnector(KVConnectorBase_V1, SupportsHMA):
    """One role of the connector: the scheduler's, or a worker's."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._setting: Setting = read_options(transfer.kv_connector_extra_config)
        self._private: PrivateNode | None = None
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._described: Described | None = None
        advice = failure_policy_advice(transfer.kv_load_failure_policy)
        if advice and role is KVConnectorRole.SCHEDULER:
            _log.warning(advice)

    # Both roles

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache loses nothing that matters."""
        return False

    def shutdown(self) -> None:
        for side in (self._worker, self._scheduler, self._private):
            if side is not None:
                side.close()
        self._worker = self._scheduler = self._private = None

    def get_kv_connector_stats(self) -> Counts | None:
        side = self._worker or self._scheduler
        return side.counts.take() if side is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Counts:
        return Counts(dict(data or {}))

    # Worker

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        with self._stepping_aside():
            group = only_group(self._vllm_config, self._kv_cache_config)
            geometry = geometry_of(group, kv_caches, self._kv_cache_config.num_blocks)
            self._open_worker(group, geometry, [kv_caches[name] for name in group.layers])

    def get_handshake_metadata(self) -> Described | None:
        return self._described

    def bind_connector_metadata(self, connector_metadata: Work) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        del forward_context, kwargs
        if self._worker is not None:
            self._worker.start_loads(self._connector_metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request runs only after all its layers have landed."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kw: Any) -> None:
        """Do nothing: whole blocks are saved after the forward."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.save(self._connector_metadata)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        del finished_req_ids
        return None, self._worker.ended() if self._worker is not None else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.failed_pages() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> Said | None:
        return self._worker.said(self._connector_metadata) if self._worker is not None else None

    # Scheduler

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        worlds = [metadata[rank] for rank in sorted(metadata)]
        if not all(isinstance(world, Described) for world in worlds):
            _log.warning("Holdfast is off: another connector's handshake came through; "
                         "name HoldfastConnector first in MultiConnector")  # fmt: skip
            return
        if any(world.refusal for world in worlds):
            return  # the worker has said why
        with self._stepping_aside():
            links = [self._link(world) for world in worlds]
            self._scheduler = SchedulerSide(links, worlds, self._setting, Teller(links))

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        # With several pipeline stages the workers have refused; vLLM's own default would raise.
        self.set_xfer_handshake_metadata(
            {tp_rank: world for (pp_rank, tp_rank), world in metadata.items() if not pp_rank}
        )

    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None and num_external_tokens:
            pages = blocks.get_block_ids()[0]
            self._scheduler.allocated(request, pages, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        if self._scheduler is None or not num_external_tokens:
            return {}
        found: dict[CacheHitSource, int] = {}
        for name, tokens in self._scheduler.sources(request, num_external_tokens).items():
            source = _SOURCES.get(name, CacheHitSource.EXTERNAL_UNSPECIFIED)
            found[source] = found.get(source, 0) + tokens
        return found

    def build_connector_meta(self, scheduler_output: Any) -> Work:
        if self._scheduler is None:
            return Work()
        return self._scheduler.build_work(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.workers_said(connector_output)

    def has_pending_push_work(self) -> bool:
        """Whether an idle engine has to step on: what its last steps saved is not published yet."""
        return self._scheduler is not None and self._scheduler.moving()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        del block_ids  # saved already, or not at all
        if self._scheduler is not None:
            self._scheduler.on_finished(request)
        return False, None

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def reset_cache(self) -> bool:
        """Use nothing again that was stored so far; called after weights have changed in place.

        The fingerprint names the weights that were loaded, so from here on this engine writes
        under names of its own, which no other engine and no later start shares. The store is not
        emptied: others may be using it. Requests under way are neither loaded nor saved any more.
        """
        if self._scheduler is not None:
            self._scheduler.reset()
            _log.info("cache reset: earlier blocks are not used again by this engine")
        return True

    # Below the interface

    def _open_worker(self, group: Group, geometry: Geometry, tensors: list[Any]) -> None:
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        rank = get_tensor_model_parallel_rank()
        fingerprint = fingerprint_of(self._vllm_config, group, geometry, self._setting, rank)
        layout = fingerprint.layout
        device = _device(tensors, geometry, layout.pages_per_block)
        described = Described(
            fingerprint=fingerprint.digest(),
            payload_bytes=layout.payload_bytes,
            block_tokens=layout.block_tokens,
            page_tokens=layout.page_tokens,
        )
        link = self._link(described, fingerprint)
        self._worker = WorkerSide(link, device, rank, self._setting)
        self._described = described
        _log.info("Holdfast at %s: blocks of %d tokens, %.2f MiB; world %s", link.address,
                  layout.block_tokens, layout.payload_bytes / 2**20,
                  described.fingerprint.hex())  # fmt: skip

    def _link(self, world: Described, fingerprint: Fingerprint | None = None) -> Link:
        """Open a session for one world, and wait a little for the node."""
        hello = Hello(
            protocol=PROTOCOL,
            peer=f"vllm {self._role.name.lower()}",
            fingerprint=world.fingerprint,
            payload_bytes=world.payload_bytes,
            block_tokens=world.block_tokens,
            domain=self._setting.domain,
            description=msgspec.json.encode(fingerprint).decode() if fingerprint else "",
            publish=self._setting.publish,
        )
        link = Link(self._address(), hello, ANSWER_S)
        if link.wait(START_S) is None:
            _log.warning("no node yet (%s): requests are computed until it is there", link.failure)
        return link

    def _address(self) -> str:
        if self._setting.address:
            return self._setting.address
        if self._private is None:
            self._private = PrivateNode(self._vllm_config.kv_transfer_config.engine_id)
        return self._private.address

    @contextmanager
    def _stepping_aside(self) -> Iterator[None]:
        """Turn passive, with one warning, for what is not handled."""
        try:
            yield
        except (HoldfastError, OSError) as error:
            _log.warning("Holdfast is off for this engine: %s", error)
            self._described = Described(refusal=str(error))


def _device(tensors: list[Any], geometry: Geometry, pages_per_block: int) -> Device:
    """Return the device these pages are on; raise UnsupportedError for an unknown kind."""
    kind = tensors[0].device.type
    pages = geometry.pages_of(pages_per_block)
    if kind == "cpu":
        return HostDevice(pages, keep=tensors)
    if kind == "cuda":
        from holdfast.devices.cuda import CudaDevice

        return CudaDevice.of(tensors, pages)
    raise UnsupportedError(f"pages on {kind!r} are not handled yet, only on cpu and cuda")
