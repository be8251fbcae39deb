"""One streaming completion: time to first token, exact output, where its KV state came from."""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from holdfast.errors import HoldfastError
from holdfast.rig.process import POLL_S, wait_until
from holdfast.rig.server import HOST, Engine

TIMEOUT_S = 600.0
TOP_LOGPROBS = 5

BY_SOURCE = "prompt_tokens_by_source"
CACHED_BY_TIER = "prompt_tokens_cached_by_source"
TIERS = {"p2p": "pool"}
"""What the engine calls a tier by another name than we do."""

SETTLE_S = 10.0
FETCHING_S = 20.0

NO_HINT: Mapping[str, object] = {}

Counts: TypeAlias = dict[tuple[str, str], int]

_SAMPLE = re.compile(r"^vllm:(\w+?)(?:_total)?\{(.*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Answer(msgspec.Struct, frozen=True):
    """What one request gave. `logprobs` holds the best few of every step, by token id.

    Two answers are equal only if every token and every log-probability is, bit for bit.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[tuple[tuple[str, float], ...], ...]
    ttft_s: float
    total_s: float

    def equals(self, other: Answer) -> bool:
        """Whether both outputs are bitwise the same (times aside)."""
        return self.tokens == other.tokens and self.logprobs == other.logprobs


class Tokens(msgspec.Struct, frozen=True):
    """Prompt tokens by where their KV state came from; `fetched` by tier."""

    computed: int
    local: int
    fetched: dict[str, int]

    @property
    def fetched_total(self) -> int:
        """Tokens that came from Holdfast, whatever the tier."""
        return sum(self.fetched.values())


class Asked(msgspec.Struct, frozen=True):
    """One request's answer and the origin of its prompt's KV state."""

    answer: Answer
    tokens: Tokens


def ask(
    engine: Engine,
    prompt: Sequence[int],
    max_tokens: int,
    hint: Mapping[str, object] = NO_HINT,
) -> Asked:
    """Ask for a greedy completion; nothing else may use the engine meanwhile.

    `hint` is what the request says to Holdfast. Raises HoldfastError if the server refuses or
    breaks off.
    """
    before = _counted(engine.metrics())
    answer = complete(engine, prompt, max_tokens, hint)
    after = _settled(engine, before, len(prompt))
    return Asked(answer, _tokens(before, after))


def wait_fetching(engine: Engine, probe: Sequence[int]) -> None:
    """Return once the engine fetches again after its node was away; its own cache is emptied.

    `probe` is a short prompt whose first block the node holds.
    """

    def fetches() -> bool:
        engine.reset_prefix_cache()
        return ask(engine, probe, 1).tokens.fetched_total > 0

    wait_until(engine.process, fetches, FETCHING_S, "fetching")


def wait_asking(engine: Engine, last_plan: Callable[[], int], probe: Sequence[int]) -> None:
    """Return once the engine asks its node again after that was away; its own cache is emptied.

    `probe` is a short prompt whose first block the node holds, `last_plan` says how many plans the
    node has made. Whether it is to be fetched is the node's to say: a tiny model computes a block
    as soon as it is read.
    """

    def asks() -> bool:
        before = last_plan()
        engine.reset_prefix_cache()
        ask(engine, probe, 1)
        return last_plan() > before

    wait_until(engine.process, asks, FETCHING_S, "asking its node")


def complete(
    engine: Engine,
    prompt: Sequence[int],
    max_tokens: int,
    hint: Mapping[str, object] = NO_HINT,
) -> Answer:
    """Send one streaming request, with its hint, and time its tokens."""
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
    encoded = json.dumps(body)
    connection = http.client.HTTPConnection(HOST, engine.port, timeout=TIMEOUT_S)
    try:
        connection.connect()
        start_s = time.perf_counter()
        connection.request("POST", "/v1/completions", encoded, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            reason = response.read().decode(errors="replace")
            raise HoldfastError(
                f"{engine.name} refused a request: HTTP {response.status}: {reason}"
            )
        answer = _collect(response, start_s)
    except (OSError, http.client.HTTPException) as error:
        raise HoldfastError(
            f"{engine.name} broke off a request: {error!r}; "
            f"the end of {engine.process.log}:\n{engine.process.tail()}"
        ) from error
    finally:
        connection.close()
    if len(answer.tokens) != max_tokens:
        raise HoldfastError(f"{engine.name} gave {len(answer.tokens)} of {max_tokens} tokens")
    return answer


def _collect(response: http.client.HTTPResponse, start_s: float) -> Answer:
    tokens: list[int] = []
    logprobs: list[tuple[tuple[str, float], ...]] = []
    first_s = 0.0
    for choice in _choices(response):
        if choice.get("token_ids"):
            first_s = first_s or time.perf_counter() - start_s
            tokens += choice["token_ids"]
        if choice.get("logprobs"):
            steps = choice["logprobs"]["top_logprobs"]
            logprobs += (tuple(sorted(step.items())) for step in steps)
    return Answer(tuple(tokens), tuple(logprobs), first_s, time.perf_counter() - start_s)


def _choices(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the only choice of each server-sent event."""
    for line in response:
        data = line.removeprefix(b"data: ").strip()
        if not data or data == b"[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise HoldfastError(f"the engine failed a request: {event['error']}")
        yield from event["choices"]


def _counted(page: str) -> Counts:
    """Return the engine's counters of prompt tokens by (metric, source)."""
    counted: Counts = {}
    for name, labels, value in _SAMPLE.findall(page):
        if name in (BY_SOURCE, CACHED_BY_TIER):
            key = name, dict(_LABEL.findall(labels))["source"]
            counted[key] = counted.get(key, 0) + int(float(value))
    return counted


def _settled(engine: Engine, before: Counts, prompt_tokens: int) -> Counts:
    """Return the counters once they account for every token of the prompt."""
    end_s = time.monotonic() + SETTLE_S
    while True:
        after = _counted(engine.metrics())
        seen = sum(after[key] - before.get(key, 0) for key in after if key[0] == BY_SOURCE)
        if seen == prompt_tokens:
            return after
        if time.monotonic() > end_s:
            raise HoldfastError(
                f"{engine.name} accounts for {seen} prompt tokens of {prompt_tokens}; "
                "is somebody else asking it?"
            )
        time.sleep(POLL_S)


def _tokens(before: Counts, after: Counts) -> Tokens:
    grown = {key: count - before.get(key, 0) for key, count in after.items()}
    external = grown[BY_SOURCE, "external_kv_transfer"]
    fetched = {
        TIERS.get(tier, tier): count
        for (name, tier), count in grown.items()
        if name == CACHED_BY_TIER and tier != "device" and count
    }
    # What failed to load is counted as computed, but stays in the tier's own count.
    if sum(fetched.values()) != external:
        fetched = {"unknown": external} if external else {}
    return Tokens(
        computed=grown[BY_SOURCE, "local_compute"],
        local=grown[BY_SOURCE, "local_cache_hit"],
        fetched=fetched,
    )
