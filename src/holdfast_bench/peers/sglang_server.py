"""Real SGLang servers on this machine, computing on the CPU, with the storage of one's choice."""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from holdfast.errors import HoldfastError
from holdfast.probe import free_port
from holdfast_bench.harness.completion import (
    TOP_LOGPROBS,
    CompletionAnswer,
    MeasuredCompletion,
    TokenSources,
)
from holdfast_bench.harness.process import ChildProcess, wait_until
from holdfast_bench.harness.server import HOST
from holdfast_bench.peers import sglang_environment

READY_S = 600.0
"""Start-up timeout: 40 s on idle cores, minutes on busy ones."""

ANSWER_S = 300.0

PAGE_TOKENS = 64

STORAGE = "storage"
"""What SGLang calls the tier behind its own memory, whichever tier of a node that is."""


class SglangServerOptions(msgspec.Struct, frozen=True):
    """Options of an SGLang server.

    `storage`: its `--hicache-storage-backend`, or empty for a server without one. `extra`: the
    storage's options. `tokens_max`: capacity of its KV cache; its host memory holds twice as much.
    """

    model: Path
    storage: str = ""
    extra: dict[str, object] = {}
    dtype: str = "float32"
    ranks: int = 1
    tokens_max: int = 16_384
    page_tokens: int = PAGE_TOKENS
    environment: dict[str, str] = {}


def holdfast_storage(node: str, layout: str = "exact") -> dict[str, object]:
    """Return the `extra` of a server whose storage is a Holdfast node."""
    return {
        "backend_name": "holdfast",
        "module_path": "holdfast.engines.sglang",
        "class_name": "HoldfastStorage",
        "interface_v1": 1,
        "holdfast": node,
        "layout": layout,
    }


class SglangServer:
    """One server. The constructor starts its process; call `wait_ready` before use."""

    def __init__(self, name: str, options: SglangServerOptions, log: Path) -> None:
        self.name = name
        self.port = free_port()
        argv = [
            *(sglang_environment.python(), "-m", "sglang.launch_server"),
            *("--host", HOST, "--port", str(self.port)),
            *("--model-path", str(options.model), "--served-model-name", "model"),
            *("--device", "cpu", "--attention-backend", "torch_native"),
            *("--dtype", options.dtype, "--tp-size", str(options.ranks)),
            *(
                "--page-size",
                str(options.page_tokens),
                "--max-total-tokens",
                str(options.tokens_max),
            ),
            *("--disable-overlap-schedule", "--skip-server-warmup", "--log-level", "warning"),
            "--sleep-on-idle",  # else an idle server keeps a core busy
            "--enable-hierarchical-cache",
            *("--hicache-ratio", "2.0", "--hicache-io-backend", "direct"),
            *("--hicache-mem-layout", "page_first_direct"),
            *("--hicache-storage-prefetch-policy", "wait_complete"),
        ]
        if options.storage:
            extra = {"prefetch_threshold": PAGE_TOKENS, **options.extra}
            argv += ["--hicache-storage-backend", options.storage]
            argv += ["--hicache-storage-backend-extra-config", json.dumps(extra)]
        env = sglang_environment.variables(log.parent) | _threads(options.ranks)
        self.process = ChildProcess(name, argv, log, env | options.environment)

    def wait_ready(self) -> None:
        """Return when the server answers; raise HoldfastError if it ends."""
        wait_until(self.process, self._ready, READY_S)

    def ask(
        self, prompt: Sequence[int], max_tokens: int, extra_key: str = ""
    ) -> MeasuredCompletion:
        """Request a greedy completion.

        With an `extra_key` SGLang shares the request's context with requests of that key only, and
        Holdfast does not store it as portable blocks.
        """
        body: dict[str, Any] = {
            "input_ids": list(prompt),
            "sampling_params": {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True},
            "return_logprob": True,
            "top_logprobs_num": TOP_LOGPROBS,
            "stream": True,
        }
        if extra_key:
            body["extra_key"] = extra_key
        with closing(http.client.HTTPConnection(HOST, self.port, timeout=ANSWER_S)) as connection:
            connection.connect()
            start_s = time.perf_counter()
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/generate", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise HoldfastError(f"{self.name} refused a request: {response.read().decode()}")
            first_s, last = 0.0, dict[str, Any]()
            for line in response:
                data = line.removeprefix(b"data: ").strip()
                if data and data != b"[DONE]":
                    first_s = first_s or time.perf_counter() - start_s
                    last = json.loads(data)
        return _measured(last, len(prompt), first_s)

    def forget(self) -> None:
        """Empty the server's own caches, on its device and in its host memory."""

        def flushed() -> bool:
            return self._call("POST", "/flush_cache")[0] == http.client.OK

        wait_until(self.process, flushed, ANSWER_S, "idle")

    def _ready(self) -> bool:
        try:
            return self._call("GET", "/health")[0] == http.client.OK
        except OSError:
            return False

    def _call(self, method: str, path: str) -> tuple[int, bytes]:
        with closing(http.client.HTTPConnection(HOST, self.port, timeout=30.0)) as connection:
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.read()


def _measured(last: Mapping[str, Any], prompt_tokens: int, first_s: float) -> MeasuredCompletion:
    """Return what the last event of an answer says."""
    told = last["meta_info"]
    steps = tuple(
        tuple(sorted((f"token_id:{token}", value) for value, token, _ in step))
        for step in told["output_top_logprobs"]
    )
    answer = CompletionAnswer(tuple(last["output_ids"]), steps, first_s)
    stored = (told["cached_tokens_details"] or {}).get("storage", 0)
    cached = told["cached_tokens"]
    fetched = {STORAGE: stored} if stored else {}
    return MeasuredCompletion(
        answer, TokenSources(prompt_tokens - cached, cached - stored, fetched)
    )


def _threads(ranks: int) -> dict[str, str]:
    """Return variables with which each rank computes on cores of its own."""
    cores = sorted(os.sched_getaffinity(0))
    if ranks == 1:
        return {"OMP_NUM_THREADS": str(len(cores))}
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(core) for core in cores[:ranks])}
