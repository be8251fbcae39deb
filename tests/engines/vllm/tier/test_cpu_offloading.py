"""The bench's worker for vLLM's offloading moves pages to rows of host memory, and back."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import numpy as np
import torch

from holdfast_bench.peers.cpu_offloading import CpuOffloadingWorker

pytestmark = pytest.mark.vllm

PAGE_BYTES = 64
REFS = [SimpleNamespace(tensor_idx=0), SimpleNamespace(tensor_idx=1)]


class FakeRegion:
    """Host memory of four rows for each tensor of the model."""

    def create_next_worker_view(self, size):
        return torch.zeros((4, size), dtype=torch.int8)

    def cleanup(self):
        pass


def numbers(*block_ids):
    return SimpleNamespace(block_ids=np.array(block_ids), group_sizes=[len(block_ids)])


def test_pages_that_were_stored_come_back_to_other_pages():
    made = torch.arange(2 * 8 * PAGE_BYTES // 4, dtype=torch.int32).view(2, 8, -1)
    tensors = [SimpleNamespace(tensor=each, page_size_bytes=PAGE_BYTES) for each in made]
    caches = SimpleNamespace(tensors=tensors, group_data_refs=[REFS])
    worker = CpuOffloadingWorker(caches, FakeRegion())
    saved = made[:, [5, 2]].clone()
    assert worker.submit_store(1, numbers(5, 2), numbers(0, 3))
    made.zero_()
    assert worker.submit_load(2, numbers(0, 3), numbers(6, 1))
    assert (made[:, [6, 1]] == saved).all()
    assert not made[:, [0, 2, 5]].any()
    ended = worker.get_finished()
    assert [(each.job_id, each.success) for each in ended] == [(1, True), (2, True)]
    assert [each.transfer_size for each in ended] == 2 * [4 * PAGE_BYTES]
    assert not worker.get_finished()
