"""Real vLLM servers on this machine, used through their OpenAI-compatible API."""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import msgspec

from holdfast.errors import HoldfastError
from holdfast.limits import GIB, MIB
from holdfast.probe import free_port
from holdfast_bench.harness.process import ChildProcess, wait_until

READY_S = 180.0
"""Start-up timeout: on two cores one engine takes about 25 s, two in parallel 50 s."""

RESET_TIMEOUT_S = 30.0
"""How long pages may stay in use before the engine's cache can be reset."""

COVER_DEADLINE_MS = 1000
"""Deadline of a coverage query; engines and node share a few cores here, so answers may be late."""

HOST = "127.0.0.1"

KV_BYTES = GIB
"""Memory of an engine for KV pages, unless its options say otherwise."""

ENGINE_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # POST /reset_prefix_cache
    "TORCHDYNAMO_DISABLE": "1",  # else the first request with log-probabilities compiles code
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # Without these, malloc may return free memory to the kernel after every layer: of two identical
    # engines one took 2 page faults a request and the other 210,000, which took 0.4 s of 2.8 s.
    "MALLOC_MMAP_THRESHOLD_": str(32 * MIB),
    "MALLOC_TRIM_THRESHOLD_": str(8 * GIB),
}

SPIN_S = 1.2
"""How long a vLLM worker busy-waits after its last step, and a margin. On two cores another engine
is measured only after that."""


class VllmServerOptions(msgspec.Struct, frozen=True):
    """Options of a vLLM server; an empty `kv_transfer` starts it without a connector.

    `ranks`: its tensor-parallel size; `stages`: its pipeline stages; `replicas`: its data-parallel
    size. `requests_max`: requests that each replica serves at once; 0: as many as vLLM does by
    default. `kv_bytes`: memory of each rank for KV pages. `environment`: variables of its process
    that differ from the defaults here.
    """

    model: Path
    kv_transfer: dict[str, object] = {}
    model_tokens_max: int = 16_384
    batch_tokens_max: int = 1024
    dtype: str = "auto"
    ranks: int = 1
    stages: int = 1
    replicas: int = 1
    requests_max: int = 0
    kv_bytes: int = KV_BYTES
    environment: dict[str, str] = {}


def thread_variables(workers: int) -> dict[str, str]:
    """Return variables with which the workers of an engine divide all cores among them.

    vLLM's own binding leaves a core idle in an engine without a connector.
    """
    cores = len(os.sched_getaffinity(0))
    return {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(1, cores // workers)),
    }


def scheduler_apart_variables() -> dict[str, str]:
    """Return variables that bind the one worker of an engine to every core but the first.

    For requests that take less than a second. vLLM's scheduler busy-waits for a second after each
    step; without binding, two compute threads on two cores start on one core or on two by chance,
    and the same request takes 0.09 s or 0.25 s. On two cores one compute thread is left, as in
    vLLM's own setting for an engine without a connector.
    """
    cores = sorted(os.sched_getaffinity(0))
    return {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores[1:] or cores))}


def holdfast_kv_transfer(
    node: str, cover_deadline_ms: int = COVER_DEADLINE_MS, layout: str = "exact"
) -> dict[str, object]:
    """Return the value of `--kv-transfer-config` that connects an engine to the node `node`."""
    options = {"holdfast": node, "cover_deadline_ms": cover_deadline_ms, "layout": layout}
    return {
        "kv_connector": "HoldfastConnector",
        "kv_connector_module_path": "holdfast.engines.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": options,
    }


class VllmServer:
    """One vLLM server. The constructor starts its process; call `wait_all_ready` before use."""

    def __init__(self, name: str, options: VllmServerOptions, log: Path) -> None:
        self.name = name
        self.port = free_port()
        argv = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--host", HOST, "--port", str(self.port)),
            *("--model", str(options.model), "--served-model-name", "model"),
            *("--dtype", options.dtype),
            *("--tensor-parallel-size", str(options.ranks)),
            *("--max-model-len", str(options.model_tokens_max)),
            *("--max-num-batched-tokens", str(options.batch_tokens_max)),
            *("--kv-cache-memory-bytes", str(options.kv_bytes)),
            "--enable-prompt-tokens-details",
        ]
        if options.stages > 1:
            # A stage gets the buffer for what the one before computes only from the warm-up run,
            # which an eager engine with a given cache size leaves out.
            argv += ["--pipeline-parallel-size", str(options.stages), "-cc.mode=1"]
        else:
            argv.append("--enforce-eager")
        if options.replicas > 1:
            argv += ["--data-parallel-size", str(options.replicas)]
        if options.requests_max:
            argv += ["--max-num-seqs", str(options.requests_max)]
        if options.kv_transfer:
            argv += ["--kv-transfer-config", json.dumps(options.kv_transfer)]
        threads = thread_variables(options.ranks * options.stages * options.replicas)
        env = ENGINE_ENVIRONMENT | threads | options.environment
        self.process = ChildProcess(name, argv, log, env)

    def ready(self) -> bool:
        try:
            return self.call("GET", "/health")[0] == http.client.OK
        except OSError:
            return False

    def reset_prefix_cache(self) -> None:
        """Empty the engine's own prefix cache; retry while pages are in use."""

        def reset() -> bool:
            status, body = self.call("POST", "/reset_prefix_cache")
            if status != http.client.OK:
                raise HoldfastError(f"{self.name} cannot reset its prefix cache: HTTP {status}")
            return bool(json.loads(body or b'{"success": true}')["success"])

        wait_until(self.process, reset, RESET_TIMEOUT_S, "without pages in use")

    def metrics(self) -> str:
        status, body = self.call("GET", "/metrics")
        if status != http.client.OK:
            raise HoldfastError(f"{self.name} shows no metrics: HTTP {status}")
        return body.decode()

    def call(self, method: str, path: str) -> tuple[int, bytes]:
        """Send one request without a body; return status and body."""
        with closing(http.client.HTTPConnection(HOST, self.port, timeout=30.0)) as connection:
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.read()


class EngineCooldown:
    """Delays requests to one engine until the workers of the others no longer busy-wait."""

    def __init__(self) -> None:
        self._last: VllmServer | None = None

    def wait_others(self, engine: VllmServer) -> None:
        """Return when no other engine busy-waits; the caller sends its next request to `engine`."""
        if self._last not in (None, engine):
            time.sleep(SPIN_S)
        self._last = engine

    def wait_all(self) -> None:
        """Return when no engine busy-waits."""
        if self._last is not None:
            time.sleep(SPIN_S)
        self._last = None


def wait_all_ready(engines: Sequence[VllmServer], within_s: float = READY_S) -> None:
    """Return once every server answers; raise HoldfastError if one ends or is later than that."""

    def ready(engine: VllmServer) -> bool:
        for other in engines:
            other.process.check()
        return engine.ready()

    for engine in engines:
        wait_until(engine.process, partial(ready, engine), within_s)


def start_servers(
    stack: ExitStack,
    folder: Path,
    options: VllmServerOptions,
    kv_transfers: Mapping[str, dict[str, object]],
) -> list[VllmServer]:
    """Start a server for each name, with its `kv_transfer`; return them once all answer.

    They end with `stack`; `folder` is for their logs.
    """
    servers = []
    for name, kv_transfer in kv_transfers.items():
        own = msgspec.structs.replace(options, kv_transfer=kv_transfer)
        servers.append(VllmServer(name, own, folder / f"{name}.log"))
        stack.enter_context(servers[-1].process)
    wait_all_ready(servers)
    return servers
