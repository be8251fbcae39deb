"""LMCache's multi-process server behind vLLM, where it is installed: what we race against."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from holdfast.probe import free_port
from holdfast.rig.process import Process, wait_until
from holdfast.rig.server import HOST

READY_S = 60.0
MEMORY_GB = 2
CHUNK_TOKENS = 256
"""Its own default."""


def installed() -> bool:
    """Whether LMCache can be run by this Python."""
    return find_spec("lmcache") is not None


def start(stack: ExitStack, folder: Path) -> dict[str, object]:
    """Start a server that ends with `stack`; return the vLLM flag's value that puts it to use.

    Transfers go through shared memory, its fastest way on a CPU.
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
    process = stack.enter_context(Process("lmcache", argv, folder / "lmcache.log", env))
    wait_until(process, lambda: _listens(port), READY_S)
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": f"tcp://{HOST}",
            "lmcache.mp.port": port,
        },
    }


def _listens(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), timeout=1.0).close()
    except OSError:
        return False
    return True
