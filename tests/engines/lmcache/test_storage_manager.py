"""LMCache's storage manager, with its own memory and controllers, over the adapter; no engine."""

import argparse
import json

import numpy as np
import pytest

pytest.importorskip("lmcache")

import torch
from lmcache.v1.distributed.api import (
    FULL_ATTENTION_WINDOW_CHUNKS,
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import add_storage_manager_args, parse_args_to_config
from lmcache.v1.distributed.storage_manager import StorageManager

from holdfast.limits import MIB
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.harness.process import wait_until

SHAPE = torch.Size([2, 4, 256, 16])
LAYOUT = MemoryLayoutDesc([SHAPE], [torch.float16])
KEYS = [ObjectKey(bytes([i]) * 32, "org/model", 0x01000100) for i in range(4)]
CONTENT = np.random.default_rng(1).integers(0, 256, (4, 2 * SHAPE.numel()), np.uint8)


def manager_of(address):
    adapter = {
        "type": "plugin",
        "module_path": "holdfast.engines.lmcache",
        "class_name": "HoldfastL2Adapter",
        "adapter_params": {"holdfast": address, "identity": "e"},
    }
    parser = argparse.ArgumentParser()
    add_storage_manager_args(parser)
    argv = ["--l1-size-gb", "0.25", "--eviction-policy", "LRU", "--no-l1-use-lazy"]
    return StorageManager(
        parse_args_to_config(parser.parse_args([*argv, "--l2-adapter", json.dumps(adapter)]))
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # LMCache imports more when it begins
def test_a_new_storage_manager_prefetches_what_another_one_has_stored(tmp_path):
    with NodeUnderTest(tmp_path / "n", 64 * MIB, 64 * MIB) as node:
        first = manager_of(node.address)
        for key, memory in first.reserve_write(KEYS, LAYOUT).items():
            np.frombuffer(memory.byte_array, np.uint8)[:] = CONTENT[KEYS.index(key)]
        first.finish_write(KEYS)
        wait_until(node.process, lambda: node.blocks_on_disk() == len(KEYS), 60)
        first.close()
        second = manager_of(node.address)
        other = ObjectKey(b"x" * 32, "org/model", 0x01000100)
        group = GroupedObjectKeys([*KEYS, other], 0, LAYOUT, FULL_ATTENTION_WINDOW_CHUNKS)
        handle = second.submit_prefetch_task(PrefetchTaskSpec([group]))
        assert second.wait_prefetch_status(handle, 30)
        found = second.query_prefetch_status(handle)
        assert [found.l2_hit_cells[0].test(i) for i in range(5)] == [True] * 4 + [False]
        with second.read_prefetched_results(KEYS) as objects:
            for memory, right in zip(objects, CONTENT, strict=True):
                assert (np.frombuffer(memory.byte_array, np.uint8) == right).all()
        second.finish_read_prefetched(KEYS)
        second.close()
