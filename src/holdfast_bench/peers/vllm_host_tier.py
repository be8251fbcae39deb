"""vLLM's own offloading to host memory, for engines on a CPU.

vLLM's `OffloadingConnector` serves GPUs and refuses CPUs, because it has no worker that copies
between the memory of a CPU engine and its host tier. `cpu_offloading` is such a worker; the rest
is vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from uuid import uuid4

import holdfast_bench

ABOUT = "vLLM's host tier; its CPU worker is the bench's, because vLLM has none"
"""What a row says of the tier."""

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (vLLM chose it)
"""Folder in which vLLM's host tier keeps its memory, as a file."""


def kv_transfer(
    host_bytes: int, secondary_tiers: Sequence[Mapping[str, object]] = ()
) -> dict[str, object]:
    """Return the `--kv-transfer-config` of an engine, which needs `variables`, too.

    After the engine's end, call `remove_left_memory` with it.
    """
    return {
        "engine_id": str(uuid4()),
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "holdfast_bench.peers.cpu_offloading",
            "cpu_bytes_to_use": host_bytes,
            "secondary_tiers": [dict(tier) for tier in secondary_tiers],
        },
    }


def remove_left_memory(kv_transfer: Mapping[str, object]) -> None:
    """Remove the shared memory of an engine that has ended; vLLM leaves it when it is stopped."""
    for left in SHARED_MEMORY.glob(f"vllm_offload_{kv_transfer['engine_id']}*.mmap"):
        left.unlink()


def variables() -> dict[str, str]:
    """Return variables of an engine's process, which imports the worker of this package."""
    return {"PYTHONPATH": str(Path(str(holdfast_bench.__file__)).parent.parent)}
