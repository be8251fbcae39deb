"""A spec that gives vLLM's `OffloadingConnector` a worker on the CPU, which vLLM itself has not."""

import time

import numpy as np
import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostCopies(OffloadingWorker):
    """Copies pages between the model's memory and the shared region, at once."""

    def __init__(self, caches, region):
        self._caches, self._region, self._done = caches, region, []
        sizes = [each.page_size_bytes for each in caches.tensors]
        tensors = [each.tensor.view(torch.int8) for each in caches.tensors]
        self._pages = [t.view(-1, size) for t, size in zip(tensors, sizes, strict=True)]
        self._rows = [region.create_next_worker_view(size) for size in sizes]

    def submit_store(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, src_spec, dst_spec, True)

    def submit_load(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, dst_spec, src_spec, False)

    def _copy(self, job_id, pages, rows, is_store):
        began_s, nbytes, at = time.perf_counter(), 0, 0
        for group, size in enumerate(pages.group_sizes):
            here = torch.from_numpy(pages.block_ids[at : at + size].astype(np.int64))
            there = torch.from_numpy(rows.block_ids[at : at + size].astype(np.int64))
            at += size
            for ref in self._caches.group_data_refs[group]:
                page, row = self._pages[ref.tensor_idx], self._rows[ref.tensor_idx]
                if is_store:
                    row[there] = page[here]
                else:
                    page[here] = row[there]
                nbytes += size * page.shape[1]
        took_s = time.perf_counter() - began_s
        self._done.append(TransferResult(job_id, True, nbytes, took_s))
        return True

    def get_finished(self):
        done, self._done = self._done, []
        return done

    def wait(self, job_ids):
        pass

    def shutdown(self):
        self._pages.clear()
        self._rows.clear()
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches):
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostCopies(kv_caches, region)
        return self._worker
