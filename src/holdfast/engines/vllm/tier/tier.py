"""`HoldfastTier`: a secondary tier of vLLM's own offloading, whose blocks a node keeps.

vLLM copies pages between the GPU and its host memory; the tier copies rows of that memory to and
from the node, which verifies, tiers, seals and shares them. It knows nothing of model kinds: vLLM
decides which rows of which KV group a request needs. Every call is made in the scheduler's process
and returns at once. On any failure blocks are a miss, and vLLM computes them.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    RequestOffloadingContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from holdfast.client.named_blocks import open_named_session
from holdfast.client.private_node import PrivateNode
from holdfast.client.weights_digest import NoDigestError
from holdfast.engines.vllm.describe import ENGINE
from holdfast.engines.vllm.tier.identity import (
    check_settings,
    fingerprint_of_rows,
    running_config,
)
from holdfast.engines.vllm.tier.jobs import PrefixRun, TransferJobs
from holdfast.engines.vllm.tier.lookups import BlockLookups
from holdfast.engines.vllm.tier.options import read_tier_options
from holdfast.engines.vllm.unsupported import UnsupportedError
from holdfast.engines.vllm.worker_rank import replicas_id
from holdfast.named_blocks import BlockMemory, NamedSession, PrefixPosition
from holdfast.wire.local.reconnecting_client import NodeAddress

SUFFIX_BYTES = 16

_log = logging.getLogger("vllm.holdfast")


class _SavedRow(NamedTuple):
    """A row to save: where it ends in its prompt, in tokens, its name, and its memory."""

    end: int
    name: bytes
    memory: BlockMemory


class _PrefixEnds(dict[int, _SavedRow]):
    """The last row of each KV group that a request has saved."""


class HoldfastTier(SecondaryTierManager):
    """See vLLM's `SecondaryTierManager`. `options` are those of `holdfast.engines.vllm.tier`."""

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        setting = read_tier_options(options)
        # Only the address is kept: vLLM cannot free its memory while an array refers to it.
        self._rows = int(np.asarray(primary_kv_view).ctypes.data)
        self._config = offloading_spec.config
        self._saves, self._loads = setting.node.saves, setting.node.loads
        chunk = self._config.cache.blocks_per_chunk
        self._tokens = {
            each.group_id: each.tokens_per_block * chunk for each in self._config.groups
        }
        self._private: PrivateNode | None = None
        self._session: NamedSession | None = None
        self._suffix = b""
        """What distinguishes the names of this engine from those of others since a reset."""
        self._key_bytes = 0
        self._skipped: list[JobResult] = []
        """Jobs that were ended without a transfer."""
        try:
            vllm_config = running_config()
            if vllm_config is None:
                raise UnsupportedError("this version of vLLM does not say which model it runs")
            check_settings(vllm_config, setting)
            fingerprint = fingerprint_of_rows(
                self._config, vllm_config, self.block_size_bytes, setting.node
            )
            address: NodeAddress = setting.node.address
            if not address:
                self._private = PrivateNode(replicas_id(self._config.engine_id, vllm_config))
                address = self._private.present_address
        except (UnsupportedError, NoDigestError) as error:
            _log.warning("Holdfast keeps no blocks of this engine: %s", error)
            return
        self._session = open_named_session(address, fingerprint, setting.node.domain, ENGINE)
        self._lookups = BlockLookups(self._session.exists)
        self._jobs = TransferJobs(self._session, setting.node.fetch_deadline_s)

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        if self._session is None or not self._loads:
            return LookupResult.MISS
        held = self._lookups.look_up(self._name(key), req_context.req_id)
        if held is None:
            return LookupResult.RETRY
        return LookupResult.HIT if held else LookupResult.MISS

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        del req_context  # every block is worth keeping, whichever request computed it
        return RequestOffloadingContext()

    def on_schedule_end(self, context: Any) -> None:
        del context
        if self._session is not None:
            self._lookups.send()

    def on_request_finished(self, req_context: Any) -> None:
        if self._session is not None:
            self._lookups.forget(req_context.req_id)

    def submit_store(self, job_metadata: Any) -> None:
        if self._session is None or not self._saves:
            self._skipped.append(JobResult(job_metadata.job_id, success=True))
        else:
            self._jobs.save(job_metadata.job_id, self._runs(job_metadata))

    def submit_load(self, job_metadata: Any) -> None:
        names = [self._name(key) for key in job_metadata.keys]
        memory = [self._row(chunk) for chunk in job_metadata.chunk_ids]
        self._jobs.load(job_metadata.job_id, PrefixRun(names, memory))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        found, self._skipped = self._skipped, []
        for job in self._jobs.ended() if self._session is not None else ():
            self._lookups.note_missing(job.failed)
            moved = len(job.transferred) * self.block_size_bytes
            found.append(
                JobResult(
                    job.number,
                    success=not job.failed,
                    successful_keys=self._keys(job.transferred) if job.failed else None,
                    transfer_time=job.seconds,
                    transfer_bytes=moved or None,
                )
            )
        return found

    def drain_jobs(self) -> None:
        """Wait until all transfers have ended; stop using all blocks stored so far.

        vLLM calls it before it resets its caches, also because weights changed in place. The
        fingerprint names the weights that were loaded, so from now on this engine writes under
        names that no other engine and no later start shares.
        """
        if self._session is not None:
            self._jobs.drain()
            self._suffix = secrets.token_bytes(SUFFIX_BYTES)
            _log.info("cache reset: earlier blocks are not used again by this engine")

    def shutdown(self) -> None:
        if self._session is not None:
            self._lookups.close()
            self._jobs.close()
            self._session.close()
            self._session = None
        if self._private is not None:
            self._private.close()
            self._private = None

    def _name(self, key: Any) -> bytes:
        """Return the name of a block in the node."""
        self._key_bytes = len(key)
        return bytes(key) + self._suffix

    def _keys(self, names: Sequence[bytes]) -> tuple[bytes, ...]:
        """Return vLLM's keys of blocks; a reset may have changed the suffix since."""
        return tuple(name[: self._key_bytes] for name in names)

    def _row(self, chunk: Any) -> list[tuple[int, int]]:
        """Return the memory of a row of vLLM's host memory."""
        nbytes = self.block_size_bytes
        return [(self._rows + int(chunk) * nbytes, nbytes)]

    def _runs(self, job: Any) -> list[PrefixRun]:
        """Divide the rows of a job into runs of one KV group each, in the order of the prefix."""
        context, by_group = job.req_context, dict[int, list[_SavedRow]]()
        for key, chunk in zip(job.keys, job.chunk_ids, strict=True):
            end = context.get_offload_key_position(key) or 0
            row = _SavedRow(end, self._name(key), self._row(chunk))
            by_group.setdefault(get_offload_group_idx(key), []).append(row)
        ends = context.get_state(_PrefixEnds)
        if ends is None:
            context.set_state(ends := _PrefixEnds())
        runs = []
        for group, rows in by_group.items():
            rows.sort()
            first, tokens = rows[0].end, self._tokens.get(group, 1)
            before = ends.get(group)
            parent = before.name if before is not None and before.end < first else b""
            after = PrefixPosition(parent, max(0, first // tokens - 1))
            runs.append(PrefixRun([row.name for row in rows], [row.memory for row in rows], after))
            ends[group] = rows[-1]
        return runs
