"""A worker on the CPU for vLLM's own offloading: vLLM's connector refuses CPUs without one.

Only vLLM imports this module, by the options of `vllm_host_tier`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

CopyOfPages: TypeAlias = Callable[[Any, Any, Any, Any], None]
"""Copies between the pages of one tensor and the rows of the region, of these numbers."""


class CpuOffloadingWorker(OffloadingWorker):
    """Copies pages between the model's memory and the shared region, at once.

    `caches`: vLLM's CanonicalKVCaches.
    """

    def __init__(self, caches: Any, region: SharedOffloadRegion) -> None:
        self._caches, self._region = caches, region
        self._done: list[TransferResult] = []
        sizes = [each.page_size_bytes for each in caches.tensors]
        tensors = [each.tensor.view(torch.int8) for each in caches.tensors]
        self._pages = [t.view(-1, size) for t, size in zip(tensors, sizes, strict=True)]
        self._rows = [region.create_next_worker_view(size) for size in sizes]

    def submit_store(self, job_id: Any, src_spec: Any, dst_spec: Any) -> bool:
        """Copy pages to rows of the region."""
        return self._copy(job_id, src_spec, dst_spec, _to_rows)

    def submit_load(self, job_id: Any, src_spec: Any, dst_spec: Any) -> bool:
        """Copy rows of the region to pages."""
        return self._copy(job_id, dst_spec, src_spec, _to_pages)

    def _copy(self, job_id: Any, pages: Any, rows: Any, copy: CopyOfPages) -> bool:
        began_s, nbytes, at = time.perf_counter(), 0, 0
        for group, size in enumerate(pages.group_sizes):
            here = torch.from_numpy(pages.block_ids[at : at + size].astype(np.int64))
            there = torch.from_numpy(rows.block_ids[at : at + size].astype(np.int64))
            at += size
            for ref in self._caches.group_data_refs[group]:
                page, row = self._pages[ref.tensor_idx], self._rows[ref.tensor_idx]
                copy(page, here, row, there)
                nbytes += size * page.shape[1]
        took_s = time.perf_counter() - began_s
        self._done.append(TransferResult(job_id, True, nbytes, took_s))
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return the transfers since the last call; each has ended when it was submitted."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: Any) -> None:
        """Do nothing: no transfer is under way."""

    def shutdown(self) -> None:
        """Free the memory."""
        self._pages.clear()
        self._rows.clear()
        self._region.cleanup()


def _to_rows(page: Any, here: Any, row: Any, there: Any) -> None:
    row[there] = page[here]


def _to_pages(page: Any, here: Any, row: Any, there: Any) -> None:
    page[here] = row[there]


class CpuTieringSpec(TieringOffloadingSpec):
    """vLLM's tiers of offloading, with a worker on the CPU."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._cpu_worker: CpuOffloadingWorker | None = None

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """Return the worker; make it in the first call."""
        if self._cpu_worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._cpu_worker = CpuOffloadingWorker(kv_caches, region)
        return self._cpu_worker
