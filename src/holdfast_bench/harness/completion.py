"""Streaming completions: time to first token, exact output, and the sources of the KV state."""

from __future__ import annotations

import http.client
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from holdfast.errors import HoldfastError
from holdfast_bench.harness.process import POLL_S, wait_until
from holdfast_bench.harness.server import HOST, VllmServer

TIMEOUT_S = 600.0
TOP_LOGPROBS = 5

BY_SOURCE = "prompt_tokens_by_source"
CACHED_BY_TIER = "prompt_tokens_cached_by_source"
EXTERNAL = "external_kv_transfer"
TIERS = {"p2p": "pool"}
"""Names of tiers in the engine's metrics, if they differ from Holdfast's."""

METRICS_TIMEOUT_S = 10.0
"""How long the engine's counters may take to account for every token of a prompt."""

RECONNECT_TIMEOUT_S = 20.0
"""How long an engine may take to use its node again after the node was away."""

NO_HINT: Mapping[str, object] = {}
ANY_REPLICA = -1

Counts: TypeAlias = Counter[tuple[str, str]]
"""Prompt tokens by metric and source."""

_SAMPLE = re.compile(r"^vllm:(\w+?)(?:_total)?\{(.*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class CompletionAnswer(msgspec.Struct, frozen=True):
    """Output of one request, and seconds to its first token.

    `logprobs` holds, for each step, the `TOP_LOGPROBS` best tokens as (token id, log-probability).
    """

    tokens: tuple[int, ...]
    logprobs: tuple[tuple[tuple[str, float], ...], ...]
    ttft_s: float

    def equals(self, other: CompletionAnswer) -> bool:
        """Whether tokens and log-probabilities are bitwise the same; the time is not compared."""
        return self.tokens == other.tokens and self.logprobs == other.logprobs


class TokenSources(msgspec.Struct, frozen=True):
    """Prompt tokens by the source of their KV state.

    `computed` by the engine, `local` from the engine's own cache, `fetched` from Holdfast, by tier.
    """

    computed: int
    local: int
    fetched: dict[str, int]

    @property
    def fetched_total(self) -> int:
        """Tokens fetched from Holdfast, summed over all tiers."""
        return sum(self.fetched.values())


class MeasuredCompletion(msgspec.Struct, frozen=True):
    """The answer to one request, and the sources of its prompt's KV state."""

    answer: CompletionAnswer
    tokens: TokenSources


def ask(
    engine: VllmServer,
    prompt: Sequence[int],
    max_tokens: int,
    hint: Mapping[str, object] = NO_HINT,
    replica: int = ANY_REPLICA,
) -> MeasuredCompletion:
    """Request a greedy completion and count the sources of its prompt tokens.

    No other client may use the engine during the call: the counters are the engine's own. `hint`
    is sent to Holdfast with the request. `replica`: the data-parallel rank that answers. Raises
    HoldfastError if the server refuses or aborts the request.
    """
    before = _prompt_counts(engine.metrics())
    answer = complete(engine, prompt, max_tokens, hint, replica)
    return MeasuredCompletion(answer, _token_sources(_wait_counted(engine, before, len(prompt))))


def fetched_tokens(engine: VllmServer) -> int:
    """Return the prompt tokens that the engine has got from its connector since its start."""
    return _prompt_counts(engine.metrics())[BY_SOURCE, EXTERNAL]


def wait_fetching(engine: VllmServer, probe: Sequence[int]) -> None:
    """Return once the engine fetches a prompt that it has saved through its connector.

    Resets the engine's own cache. The first block of `probe` must have been saved.
    """

    def fetches() -> bool:
        engine.reset_prefix_cache()
        return ask(engine, probe, 1).tokens.fetched_total > 0

    wait_until(engine.process, fetches, RECONNECT_TIMEOUT_S, "fetching")


def wait_asking(engine: VllmServer, last_plan: Callable[[], int], probe: Sequence[int]) -> None:
    """Return once the engine asks its node for plans again after the node was away.

    Resets the engine's own cache. `probe` is a short prompt whose first block the node holds;
    `last_plan` returns the number of the node's newest plan. A fetch is not required: the node may
    plan to recompute, because a tiny model computes a block as fast as it is read.
    """

    def asks() -> bool:
        before = last_plan()
        engine.reset_prefix_cache()
        ask(engine, probe, 1)
        return last_plan() != before

    wait_until(engine.process, asks, RECONNECT_TIMEOUT_S, "asking its node")


def complete(
    engine: VllmServer,
    prompt: Sequence[int],
    max_tokens: int,
    hint: Mapping[str, object] = NO_HINT,
    replica: int = ANY_REPLICA,
) -> CompletionAnswer:
    """Send one streaming request with its hint, and measure the time to its first token.

    `replica`: the data-parallel rank that answers.
    """
    body = {
        "model": "model",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": TOP_LOGPROBS,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "stream": True,
    }
    if hint:
        body["kv_transfer_params"] = {"holdfast": hint}
    encoded, headers = json.dumps(body), {"Content-Type": "application/json"}
    if replica != ANY_REPLICA:
        headers["X-data-parallel-rank"] = str(replica)
    connection = http.client.HTTPConnection(HOST, engine.port, timeout=TIMEOUT_S)
    try:
        connection.connect()
        start_s = time.perf_counter()
        connection.request("POST", "/v1/completions", encoded, headers)
        response = connection.getresponse()
        if response.status != http.client.OK:
            reason = response.read().decode(errors="replace")
            raise HoldfastError(
                f"{engine.name} refused a request: HTTP {response.status}: {reason}"
            )
        answer = _collect(response, start_s)
    except (OSError, http.client.HTTPException) as error:
        raise HoldfastError(
            f"{engine.name} broke off a request: {error!r}; {engine.process.tail()}"
        ) from error
    finally:
        connection.close()
    if len(answer.tokens) != max_tokens:
        raise HoldfastError(f"{engine.name} gave {len(answer.tokens)} of {max_tokens} tokens")
    return answer


def _collect(response: http.client.HTTPResponse, start_s: float) -> CompletionAnswer:
    """Read the server-sent events; each has one choice, because `n` is 1."""
    tokens: list[int] = []
    logprobs: list[tuple[tuple[str, float], ...]] = []
    first_s = 0.0
    for line in response:
        data = line.removeprefix(b"data: ").strip()
        if not data or data == b"[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise HoldfastError(f"the engine failed a request: {event['error']}")
        for choice in event["choices"]:
            if choice.get("token_ids"):
                first_s = first_s or time.perf_counter() - start_s
                tokens += choice["token_ids"]
            if choice.get("logprobs"):
                steps = choice["logprobs"]["top_logprobs"]
                logprobs += (tuple(sorted(step.items())) for step in steps)
    return CompletionAnswer(tuple(tokens), tuple(logprobs), first_s)


def _prompt_counts(page: str) -> Counts:
    """Parse the engine's counters of prompt tokens from its metrics page."""
    counted: Counts = Counter()
    for name, labels, value in _SAMPLE.findall(page):
        if name in (BY_SOURCE, CACHED_BY_TIER):
            counted[name, dict(_LABEL.findall(labels))["source"]] += int(float(value))
    return counted


def _wait_counted(engine: VllmServer, before: Counts, prompt_tokens: int) -> Counts:
    """Return how much the counters grew, once that accounts for every token of the prompt."""
    end_s = time.monotonic() + METRICS_TIMEOUT_S
    while True:
        grown = _prompt_counts(engine.metrics()) - before
        seen = sum(count for (name, _), count in grown.items() if name == BY_SOURCE)
        if seen == prompt_tokens:
            return grown
        if time.monotonic() > end_s:
            raise HoldfastError(
                f"{engine.name} accounts for {seen} prompt tokens of {prompt_tokens}; "
                "does another client use it?"
            )
        time.sleep(POLL_S)


def _token_sources(grown: Counts) -> TokenSources:
    external = grown[BY_SOURCE, EXTERNAL]
    fetched = {
        TIERS.get(tier, tier): count
        for (name, tier), count in grown.items()
        if name == CACHED_BY_TIER and tier != "device"
    }
    # The engine counts tokens that failed to load as computed, but does not subtract them from the
    # tier's count; the tiers are then unknown.
    if sum(fetched.values()) != external:
        fetched = {"unknown": external} if external else {}
    return TokenSources(
        computed=grown[BY_SOURCE, "local_compute"],
        local=grown[BY_SOURCE, "local_cache_hit"],
        fetched=fetched,
    )
