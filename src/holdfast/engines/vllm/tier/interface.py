"""The interface of vLLM's secondary tiers that `HoldfastTier` was written for."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from holdfast.engines.interface import ExpectedClass, check_version, differences_of
from holdfast.engines.vllm.interface import TESTED

TIER = ExpectedClass(
    methods={
        "__init__": (
            "offloading_spec",
            "primary_kv_view",
            "tier_type",
            "backpressure_detector",
        ),
        "lookup": ("key", "req_context"),
        "submit_store": ("job_metadata",),
        "submit_load": ("job_metadata",),
        "get_finished_jobs": (),
        "on_new_request": ("req_context",),
        "on_request_finished": ("req_context",),
        "on_schedule_end": ("context",),
        "drain_jobs": (),
        "shutdown": (),
    },
    abstract=True,
)
JOB = ExpectedClass(fields=("job_id", "keys", "chunk_ids", "req_context"))
RESULT = ExpectedClass(
    fields=("job_id", "success", "successful_keys", "transfer_time", "transfer_bytes")
)
CONTEXT = ExpectedClass(
    methods={
        "get_state": ("cls",),
        "set_state": ("val",),
        "get_offload_key_position": ("key",),
    },
    fields=("req_id",),
)
CONFIG = ExpectedClass(
    fields=(
        "groups",
        "worker_kv_bytes_per_block",
        "engine_id",
        "model",
        "cache",
        "parallel",
        "replicated_layout",
        "canonical_layout",
        "kv_cache_layout",
    )
)

_OFFLOAD = "vllm.v1.kv_offload"

INTERFACE: Mapping[str, ExpectedClass] = {
    f"{_OFFLOAD}.tiering.base.SecondaryTierManager": TIER,
    f"{_OFFLOAD}.tiering.base.TransferJob": JOB,
    f"{_OFFLOAD}.tiering.base.JobResult": RESULT,
    f"{_OFFLOAD}.base.ReqContext": CONTEXT,
    f"{_OFFLOAD}.config.OffloadingConfig": CONFIG,
}
"""What the tier uses of vLLM."""

_log = logging.getLogger("vllm.holdfast")


def check_interface() -> None:
    """Raise InterfaceError if the installed vLLM has another interface of tiers."""
    import vllm

    check_version("vLLM", vllm.__version__, TESTED, differences_of(INTERFACE), _log)
