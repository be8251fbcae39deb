"""Start LMCache's multi-process server for a vLLM engine, to compare times to first token."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path

from holdfast.probe import free_port
from holdfast_bench.harness.process import ChildProcess, listens, wait_until
from holdfast_bench.harness.server import HOST

READY_S = 60.0
MEMORY_GB = 2
CHUNK_TOKENS = 256
"""LMCache's default."""


def start(stack: ExitStack, folder: Path) -> dict[str, object]:
    """Start a server that ends with `stack`; return the `--kv-transfer-config` for it.

    Transfers use shared memory, LMCache's fastest transport on a CPU.
    """
    port = free_port()
    argv = [
        *(sys.executable, "-m", "lmcache.cli.main", "server"),
        *("--host", HOST, "--port", str(port), "--http-port", str(free_port())),
        *("--l1-size-gb", str(MEMORY_GB), "--chunk-size", str(CHUNK_TOKENS)),
        *("--eviction-policy", "LRU", "--supported-transfer-mode", "auto"),
        *("--shm-name", f"holdfast-bench-{os.getpid()}"),
    ]
    env = {"LMCACHE_TRACK_USAGE": "false"}
    process = stack.enter_context(ChildProcess("lmcache", argv, folder / "lmcache.log", env))
    wait_until(process, lambda: listens(port), READY_S)
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.mp.host": f"tcp://{HOST}", "lmcache.mp.port": port},
    }
