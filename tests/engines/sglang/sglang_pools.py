"""Run by the Python of SGLang's environment: its own factory and host pools over a node.

Prints as JSON: what differs from the recorded interface, what SGLang chose of the arguments that
the command line does not name, and for each layout and interface whether pages come back as they
were saved.
"""

import contextlib
import hashlib
import json
import sys

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.runtime_context import publish
from sglang.srt.server_args import ServerArgs

from holdfast.engines.interface import differences_of
from holdfast.engines.sglang.interface import INTERFACE
from holdfast.engines.sglang.served_rank import ArgumentsInEffect

PAGE = 16
PAGES = 8
MLA = ("layer_first", "page_first", "page_first_direct")
MHA = (*MLA, "page_head")


def host_pool(kind, layout):
    """Return one of SGLang's host pools with random content."""
    common = {"dtype": torch.bfloat16, "layer_num": 3, "device": "cpu"}
    common |= {"enable_memory_saver": False, "size": PAGE * PAGES, "page_size": PAGE}
    if kind == "mha":
        device = MHATokenToKVPool(head_num=2, head_dim=32, **common)
        make, info, more = MHATokenToKVPoolHost, device._mha_buffer_info(), {}
    else:
        device = MLATokenToKVPool(kv_lora_rank=64, qk_rope_head_dim=16, **common)
        make, info, more = MLATokenToKVPoolHost, device._mla_buffer_info(), {"target_layer_num": 3}
    pool = make(
        *(info, 1.0, 0, PAGE, layout),
        pin_memory=False,
        device_capacity_tokens=PAGE * PAGES,
        start_layer=0,
        end_layer=2,
        **more,
    )
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape))
    return pool


def storage(pool, node, *, mla, v1):
    config = HiCacheStorageConfig(
        *(0, 1, 0, 1, 0, 1, mla, False, False, "model"),
        extra_config={
            "backend_name": "holdfast",
            "module_path": "holdfast.engines.sglang",
            "class_name": "HoldfastStorage",
            "interface_v1": int(v1),
            "holdfast": node,
            "model_digest": "random",
        },
    )
    one = StorageBackendFactory.create_backend("dynamic", config, pool)
    one.register_mem_pool_host(pool)
    one.on_host_pools_registered()
    return one


def pages(pool, first, count):
    """Return the host indices of some pages."""
    return torch.arange(first * PAGE, (first + count) * PAGE)


def content(pool, first, count):
    return [pool.get_data_page((first + i) * PAGE, flat=True).clone() for i in range(count)]


def round_trip(pool, one, keys, *, v1):
    """Save pages 0 to 2, read them as pages 3 to 5; return whether they are equal."""
    saved = content(pool, 0, 3)
    if v1:
        if not all(one.batch_set_v1(keys[:3], pages(pool, 0, 3))):
            return "not saved"
        if one.batch_exists(keys) != 3:
            return "not found"
        if one.batch_get_v1(keys, pages(pool, 3, 4)) != [True, True, True, False]:
            return "not read"
    else:
        if not one.batch_set(keys[:3], saved):
            return "not saved"
        found = one.batch_get(keys[:3], [pool.get_dummy_flat_data_page() for _ in range(3)])
        for i, page in enumerate(found):
            pool.set_from_flat_data_page((3 + i) * PAGE, page)
    same = [a.equal(b) for a, b in zip(saved, content(pool, 3, 3), strict=True)]
    return "equal" if all(same) else "different"


def main(model, node):
    arguments = ServerArgs(model_path=model, dtype="bfloat16")
    arguments.resolve_once()
    publish(arguments, role="scheduler")
    chosen = ArgumentsInEffect()
    found = {"differences": differences_of(INTERFACE)}
    found["chosen"] = [chosen.device, chosen.attention_backend]
    for kind, layouts in (("mha", MHA), ("mla", MLA)):
        for layout in layouts:
            for v1 in (True, False):
                pool = host_pool(kind, layout)
                one = storage(pool, node, mla=kind == "mla", v1=v1)
                seed = f"{kind} {layout} {v1}"
                keys = [hashlib.sha256(f"{seed} {i}".encode()).hexdigest() for i in range(4)]
                found[seed] = round_trip(pool, one, keys, v1=v1)
                one.close()
    return found


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        answer = main(*sys.argv[1:])
    sys.stdout.write(json.dumps(answer))
