"""`HoldfastConnector`: vLLM's connector interface, mapped onto a scheduler and a worker side.

Loads are always asynchronous, the per-layer hooks do nothing, and on any failure the tokens are
computed. For an unsupported model or setting the connector logs one warning and becomes passive:
vLLM runs as if it were not there.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from holdfast.blocks.fingerprint import Fingerprint
from holdfast.client.engine_opening import SEVERAL_GROUPS
from holdfast.client.private_node import PrivateNode
from holdfast.client.prompt_ledger import ledger_of
from holdfast.client.rank_transfers import RankTransfers, TransferOptions
from holdfast.client.timeouts import EngineClocks, RunningClock
from holdfast.client.timing_reporter import TimingReporter
from holdfast.devices.base import DirectDevice, LockingDevice, StagingDevice
from holdfast.devices.registry import DeviceOptions, open_device
from holdfast.engines.vllm.block_forms import BlockForm, WorkerCache, block_forms
from holdfast.engines.vllm.counters import ConnectorCounts, ConnectorMetrics
from holdfast.engines.vllm.describe import step_blocks_of
from holdfast.engines.vllm.log import log_to_vllm
from holdfast.engines.vllm.options import (
    SAFE_HASHES,
    ConnectorSettings,
    failure_policy_advice,
    hash_advice,
    read_options,
    refit_advice,
)
from holdfast.engines.vllm.request_identity import adapter_settings
from holdfast.engines.vllm.scheduler import SchedulerSide
from holdfast.engines.vllm.unsupported import UnsupportedError
from holdfast.engines.vllm.weight_updates import WorkerUpdates, watch
from holdfast.engines.vllm.work import GroupHandshake, Handshake, StepWork, WorkerReport
from holdfast.engines.vllm.worker_rank import rank_of, replicas_id
from holdfast.errors import ConfigError, HoldfastError
from holdfast.wire.local.messages import PROTOCOL, GroupHello, Hello
from holdfast.wire.local.reconnecting_client import NodeAddress, ReconnectingClient

ANSWER_S = 2.0
"""Timeout of a node's answers; a node that takes longer counts as gone."""

START_S = 10.0
"""Maximum wait for the node at an engine's start; later it connects in the background."""

_SOURCES = {"host": CacheHitSource.HOST, "disk": CacheHitSource.DISK, "pool": CacheHitSource.P2P}

_log = logging.getLogger("vllm.holdfast")


def _handshake_of(form: BlockForm) -> GroupHandshake:
    group, layout = form.group, form.fingerprint.representation
    return GroupHandshake(
        fingerprint=form.fingerprint.digest(),
        raw_bytes=layout.raw_bytes,
        block_tokens=layout.block_tokens,
        page_tokens=group.page_tokens,
        element_bytes=layout.element_bytes,
        attention=group.attention,
        window=group.window + group.retained if group.window else 0,
        tables=group.tables,
        lookahead=group.lookahead,
    )


class HoldfastConnector(KVConnectorBase_V1, SupportsHMA):
    """One role of the connector: the scheduler's, or a worker's."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_to_vllm()
        transfer = vllm_config.kv_transfer_config
        self._setting: ConnectorSettings = read_options(
            transfer.kv_connector_extra_config, transfer.kv_role
        )
        lora = adapter_settings(getattr(vllm_config, "lora_config", None))
        cache = getattr(vllm_config, "cache_config", None)
        caches = bool(getattr(cache, "enable_prefix_caching", False))
        pages_hash = getattr(cache, "prefix_caching_hash_algo", SAFE_HASHES[0])
        hashing = hash_advice(pages_hash) if caches else None
        scheduler = getattr(vllm_config, "scheduler_config", None)
        self._setting = self._setting._replace(
            adapter_settings=lora,
            shares_loads=caches,
            step_tokens_max=getattr(scheduler, "max_num_batched_tokens", 0),
            trusts_pages=hashing is None,
        )
        self._private: PrivateNode | None = None
        self._scheduler: SchedulerSide | None = None
        self._worker: RankTransfers | None = None
        self._handshake: Handshake | None = None
        self._pool: Any = None
        self._handled: BaseException | None = None
        """The exception that the engine's caller was handling when the step began."""
        self._updates: WorkerUpdates | None = None
        self._updates_before = 0
        self._is_outdated = False
        """Whether the scheduler side did not know of an update of the weights at this step."""
        refits = getattr(vllm_config, "weight_transfer_config", None)
        for advice in (
            failure_policy_advice(transfer.kv_load_failure_policy),
            refit_advice(self._setting, refits),
            hashing,
        ):
            if advice and role is KVConnectorRole.SCHEDULER:
                _log.warning(advice)

    # Both roles

    @property
    def requires_kv_delivery(self) -> bool:
        """False: lost KV can be recomputed."""
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """True: no copy goes on while vLLM sleeps, and its pages keep their addresses."""
        del kv_transfer_config
        return True

    def shutdown(self) -> None:
        for side in (self._worker, self._scheduler, self._private):
            if side is not None:
                side.close()
        self._worker = self._scheduler = self._private = None

    def get_kv_connector_stats(self) -> ConnectorCounts | None:
        side = self._worker or self._scheduler
        taken = side.counts.take() if side is not None else None
        return ConnectorCounts(taken.data) if taken is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorCounts:
        return ConnectorCounts(dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ConnectorMetrics:
        return ConnectorMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Worker

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        with self._passive_on_error():
            rank = rank_of(self._vllm_config)
            cache = WorkerCache(self._vllm_config, self._kv_cache_config, kv_caches, rank)
            forms = block_forms(cache, self._setting)
            devices = self._open_devices(forms, kv_caches)
            try:
                node, handshake = self._connect_worker(forms)
            except BaseException:
                for device in devices:
                    device.close()
                raise
            saves = tuple(self._setting.saves and each.writes for each in forms)
            transfers = TransferOptions(self._setting.fetch_deadline_s, saves, rank.number)
            self._worker = RankTransfers(node, devices, transfers, running=RunningClock())
            if isinstance(devices[0], LockingDevice):
                self._worker.lock_arena(devices[0])
            if self._updates is None and not self._setting.fixed_weights:
                self._updates = watch()
                self._updates_before = self._updates.begun
            self._handshake = handshake
            for form, named in zip(forms, handshake.groups, strict=True):
                layout = form.fingerprint.representation
                _log.info(
                    "Holdfast at %s: %s blocks of %d tokens, %.2f MiB, of %d layers with %s "
                    "attention or state; namespace %s",
                    node.address,
                    "exact" if form.portable is None else "portable",
                    layout.block_tokens,
                    layout.raw_bytes / 2**20,
                    len(form.group.layers),
                    form.group.attention,
                    named.fingerprint.hex(),
                )

    def unregister_kv_caches(self) -> None:
        """Let no copy touch a page while vLLM sleeps: it takes the memory of the pages away.

        vLLM gives them the same addresses when it wakes up, so nothing is to be restored.
        """
        if self._worker is not None and not self._worker.finish_copies():
            _log.warning("blocks are still being copied while vLLM falls asleep")

    def get_handshake_metadata(self) -> Handshake | None:
        return self._handshake

    def bind_connector_metadata(self, connector_metadata: StepWork) -> None:
        self._handled = sys.exception()
        self._is_outdated = connector_metadata.updates != self._weight_updates()
        if self._is_outdated:
            connector_metadata = replace(connector_metadata, saves=[])
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        del forward_context, kwargs
        if self._worker is not None and self._is_outdated:
            self._worker.refuse_loads(self._connector_metadata)
        elif self._worker is not None:
            self._worker.start_loads(self._connector_metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request runs only after all its layers are loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kw: Any) -> None:
        """Do nothing: whole blocks are saved after the forward."""

    def wait_for_save(self) -> None:
        if self._worker is None:
            return
        # vLLM also calls it while the exception of a failed forward is on its way up.
        if (failure := sys.exception()) not in (None, self._handled):
            self._worker.abandon_saves()
            _log.warning("the blocks of this step are not saved, because it failed: %r", failure)
        else:
            self._worker.save(self._connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        del finished_req_ids
        if self._worker is None:
            return KVConnectorTransferResults()
        ended, failed = self._worker.ended(), self._worker.failed_requests()
        # vLLM takes single pages of a model with one list of pages only, and of windows and
        # recurrent state they would be of no use: the tokens before them are not there.
        whole = set[str]() if self._is_plain else failed
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=whole)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed = self._worker.failed_pages() if self._worker is not None else set()
        return failed if self._is_plain else set()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        if self._worker is None:
            return None
        report = self._worker.report(self._connector_metadata)
        if self._is_outdated:
            return WorkerReport(*(report or ()), updates=self._weight_updates())
        return WorkerReport(*report) if report is not None else None

    # Scheduler

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        handshakes = [metadata[rank] for rank in sorted(metadata)]
        if not all(isinstance(each, Handshake) for each in handshakes):
            _log.warning(
                "Holdfast is off: it received another connector's handshake; name "
                "HoldfastConnector first in MultiConnector"
            )
            return
        if any(each.refusal for each in handshakes):
            return  # the worker has logged the reason
        if self._scheduler is not None or self._handshake is not None:
            # vLLM 0.33 gives them again when it wakes up. The sessions stay, and so do the names
            # of blocks: a reset has changed them if weights may have. A connector that is off
            # missed that reset, so it stays off.
            return
        with self._passive_on_error():
            if len({tuple(group.shape for group in each.groups) for each in handshakes}) > 1:
                raise UnsupportedError("the model's pipeline stages have different KV groups")
            connections = [self._connect(each) for each in handshakes]
            self._scheduler = SchedulerSide(
                connections,
                handshakes,
                self._setting,
                TimingReporter(connections),
                EngineClocks(running=RunningClock()),
                ledger_of(self._vllm_config.kv_transfer_config.engine_id),
            )
            self._watch_pages()

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._pool = gpu_block_pool
        self._watch_pages()

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        # In the order of `WorkerRank.number`; vLLM's default implementation takes one stage only.
        self.set_xfer_handshake_metadata(
            {number: metadata[rank] for number, rank in enumerate(sorted(metadata))}
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
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

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

    def build_connector_meta(self, scheduler_output: Any) -> StepWork:
        if self._scheduler is None:
            return StepWork()
        return self._scheduler.build_work(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.on_worker_output(connector_output)

    def has_pending_push_work(self) -> bool:
        """Whether an idle engine must run more steps to publish the blocks it saved last."""
        return self._scheduler is not None and self._scheduler.moving()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        del block_ids  # blocks are saved in the step that fills them
        params = self._scheduler.on_finished(request) if self._scheduler is not None else None
        return False, params

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def reset_cache(self) -> bool:
        """Stop using all blocks stored so far; vLLM calls it when weights change in place.

        It calls it when it falls asleep, too. With `fixed_weights` nothing changes then. The
        fingerprint names the weights that were loaded, so from now on this engine writes under
        keys that no other engine and no later start shares. The store is not emptied, because other
        engines may use it. Requests under way are not looked up or saved any more.
        """
        # A load that has begun goes on, though its blocks are of the earlier weights. It holds
        # pages of vLLM's cache, and while any page is held vLLM's own reset fails: it returns
        # False, or with `reset_running_requests` raises before it calls this method. The caller
        # must reset again then, which changes the keys once more.
        if self._scheduler is not None and not self._setting.fixed_weights:
            self._scheduler.reset()
            _log.info("cache reset: earlier blocks are not used again by this engine")
        return True

    # Private methods

    def _weight_updates(self) -> int:
        """Return how often the worker's weights were updated since its pages were registered."""
        return self._updates.begun - self._updates_before if self._updates is not None else 0

    def _watch_pages(self) -> None:
        """Let saves be deferred unless the user rules it out, once vLLM's pages are known.

        A deferred save needs a hash that says whether its pages are still what they were.
        """
        defers = self._setting.save != "when_full" and self._setting.trusts_pages
        if self._scheduler is not None and self._pool is not None and defers:
            context_tokens = self._vllm_config.model_config.max_model_len
            self._scheduler.watch_pages(self._pool, context_tokens)

    @property
    def _is_plain(self) -> bool:
        """Whether any leading pages of a context are a prefix of it that can be used."""
        groups = self._handshake.groups if self._handshake is not None else ()
        return len(groups) == 1 and groups[0].attention == "full" and groups[0].tables == (0,)

    def _open_devices(
        self, forms: Sequence[BlockForm], kv_caches: Mapping[str, Any]
    ) -> list[DirectDevice | StagingDevice]:
        """Return the device of each group; none is left open on an error."""
        devices: list[DirectDevice | StagingDevice] = []
        try:
            for form in forms:
                block_tokens = form.fingerprint.representation.block_tokens
                tensors = [kv_caches[name] for name in form.held]
                step_blocks = step_blocks_of(self._vllm_config, block_tokens)
                options = DeviceOptions(step_blocks, form.portable)
                devices.append(open_device(tensors[0].device.type, form.pages, tensors, options))
        except BaseException:
            for device in devices:
                device.close()
            raise
        return devices

    def _connect_worker(self, forms: Sequence[BlockForm]) -> tuple[ReconnectingClient, Handshake]:
        """Open the session of a worker: for quantised blocks, if the node offers them."""
        handshake = Handshake(tuple(map(_handshake_of, forms)))
        first, parts = forms[0].fingerprint, [each.part for each in forms]
        node = self._connect(handshake, first, parts)
        client = node.client()
        if client is None:
            return node, handshake
        welcome = client.welcome
        if welcome.exact_because:
            _log.warning("Holdfast at %s: %s", node.address, welcome.exact_because)
        if welcome.codec and len(forms) > 1:
            _log.warning("Holdfast at %s: %s", node.address, SEVERAL_GROUPS)
        if not welcome.codec or len(forms) > 1:
            return node, handshake
        node.close()
        quantised = first.quantised(welcome.codec, welcome.codec_version)
        handshake = Handshake((_handshake_of(forms[0]._replace(fingerprint=quantised)),))
        return self._connect(handshake, quantised, parts), handshake

    def _connect(
        self,
        handshake: Handshake,
        fingerprint: Fingerprint | None = None,
        parts: Sequence[bytes] = (),
    ) -> ReconnectingClient:
        """Open a session for the KV groups of a rank, and wait up to `START_S` for the node."""
        groups = [
            GroupHello(
                fingerprint=group.fingerprint,
                raw_bytes=group.raw_bytes,
                block_tokens=group.block_tokens,
                attention=group.attention,
                window=group.window,
                part=part,
                element_bytes=group.element_bytes,
            )
            for group, part in zip(
                handshake.groups, parts or [b""] * len(handshake.groups), strict=True
            )
        ]
        first, *more = groups
        hello = Hello(
            protocol=PROTOCOL,
            peer=f"vllm {self._role.name.lower()}",
            fingerprint=first.fingerprint,
            raw_bytes=first.raw_bytes,
            block_tokens=first.block_tokens,
            domain=self._setting.domain,
            description=msgspec.json.encode(fingerprint).decode() if fingerprint else "",
            part=first.part,
            publish=self._setting.publish,
            element_bytes=first.element_bytes,
            attention=first.attention,
            window=first.window,
            more_groups=more,
        )
        address: NodeAddress = self._setting.address
        if not address:
            if self._private is None:
                own_id = self._vllm_config.kv_transfer_config.engine_id
                self._private = PrivateNode(replicas_id(own_id, self._vllm_config))
            address = self._private.present_address
        connection = ReconnectingClient(address, hello, ANSWER_S)
        if connection.wait(START_S) is None:
            _log.warning(
                "no node yet (%s): requests are computed until it answers", connection.failure
            )
        return connection

    @contextmanager
    def _passive_on_error(self) -> Iterator[None]:
        """Log a warning and become passive on an unsupported setting or another error.

        An invalid option of the user is raised, so that vLLM does not start.
        """
        try:
            yield
        except ConfigError:
            raise
        except (HoldfastError, OSError) as error:
            _log.warning("Holdfast is off for this engine: %s", error)
            self._handshake = Handshake(refusal=str(error))
