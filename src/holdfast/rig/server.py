"""Real servers on this machine: vLLM behind its OpenAI-compatible API."""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from holdfast.errors import HoldfastError
from holdfast.limits import GIB, MIB
from holdfast.probe import free_port
from holdfast.rig.process import Process, wait_until

READY_S = 180.0
"""An engine starts in about 25 s here, two at once in 50; a loaded machine takes longer."""

FORGOTTEN_S = 30.0

COVER_DEADLINE_MS = 1000
"""Engines and node share a few cores here, perhaps with others: an answer may have to queue."""

HOST = "127.0.0.1"

ENGINE_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # POST /reset_prefix_cache
    "TORCHDYNAMO_DISABLE": "1",  # else the first request with log-probabilities compiles for long
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # Else it is chance whether a process gives its free memory back after every layer: of two
    # engines alike one took 2 page faults a request, the other 210,000: 0.4 s more of 2.8.
    "MALLOC_MMAP_THRESHOLD_": str(32 * MIB),
    "MALLOC_TRIM_THRESHOLD_": str(8 * GIB),
}

SPIN_S = 1.2
"""A worker of vLLM keeps a core busy for about a second after its last step: others wait for that,
or two engines on two cores disturb each other's times."""


class EngineOptions(msgspec.Struct, frozen=True):
    """How an engine is started. `kv_transfer` is the value of its flag; empty for vLLM alone."""

    model: Path
    kv_transfer: dict[str, object] = {}
    model_tokens_max: int = 16_384
    batch_tokens_max: int = 1024
    kv_bytes: int = 1 << 30
    dtype: str = "auto"


def holdfast_kv_transfer(node: str) -> dict[str, object]:
    """Return the vLLM flag's value that puts the node at this address behind an engine."""
    return {
        "kv_connector": "HoldfastConnector",
        "kv_connector_module_path": "holdfast.engines.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"holdfast": node, "cover_deadline_ms": COVER_DEADLINE_MS},
    }


class Engine:
    """One vLLM server. Its process starts at once; `wait_all_ready` before asking."""

    def __init__(self, name: str, options: EngineOptions, log: Path) -> None:
        self.name = name
        self.options = options
        self.port = free_port()
        env = ENGINE_ENVIRONMENT | _core_environment()
        self.process = Process(name, _argv(options, self.port), log, env)

    def ready(self) -> bool:
        """Whether the server answers."""
        try:
            return self.call("GET", "/health")[0] == http.client.OK
        except OSError:
            return False

    def reset_prefix_cache(self) -> None:
        """Make the engine forget its own cached prefixes; retried while pages are still in use."""

        def forgotten() -> bool:
            status, body = self.call("POST", "/reset_prefix_cache")
            if status != http.client.OK:
                raise HoldfastError(f"{self.name} cannot reset its prefix cache: HTTP {status}")
            return bool(json.loads(body or b'{"success": true}')["success"])

        wait_until(self.process, forgotten, FORGOTTEN_S, "without pages in use")

    def metrics(self) -> str:
        """Return the server's metrics page."""
        status, body = self.call("GET", "/metrics")
        if status != http.client.OK:
            raise HoldfastError(f"{self.name} shows no metrics: HTTP {status}")
        return body.decode()

    def call(self, method: str, path: str) -> tuple[int, bytes]:
        """Send one request without a body; return status and body."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=30.0)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


class Rest:
    """Has whoever asks engines by turns wait until the one asked last has come to rest."""

    def __init__(self) -> None:
        self._asked: Engine | None = None

    def before(self, engine: Engine) -> None:
        """Return when no other engine still spins; this one is asked next."""
        if self._asked not in (None, engine):
            time.sleep(SPIN_S)
        self._asked = engine

    def everywhere(self) -> None:
        """Return when no engine spins any more, the one asked last included."""
        if self._asked is not None:
            time.sleep(SPIN_S)
        self._asked = None


def wait_all_ready(engines: Sequence[Engine]) -> None:
    """Return once every server answers; raise HoldfastError as soon as one of them ends."""

    def ready(engine: Engine) -> bool:
        for other in engines:
            other.process.check()
        return engine.ready()

    for engine in engines:
        wait_until(engine.process, partial(ready, engine), READY_S)


def _argv(options: EngineOptions, port: int) -> list[str]:
    argv = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--host", HOST, "--port", str(port)),
        *("--model", str(options.model), "--served-model-name", "model"),
        *("--dtype", options.dtype),
        *("--max-model-len", str(options.model_tokens_max)),
        *("--max-num-batched-tokens", str(options.batch_tokens_max)),
        *("--kv-cache-memory-bytes", str(options.kv_bytes)),
        "--enforce-eager",
        "--enable-prompt-tokens-details",
    ]
    if options.kv_transfer:
        argv += ["--kv-transfer-config", json.dumps(options.kv_transfer)]
    return argv


def _core_environment() -> dict[str, str]:
    """Give the engine every core: by default it keeps one of two for its front end."""
    cores = sorted(os.sched_getaffinity(0))
    return {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))}
