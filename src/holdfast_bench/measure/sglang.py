"""Time to first token of SGLang: computed, and from its storage, one storage after the other.

Every storage gets the same prompts. A round computes a prompt that was never asked before, empties
SGLang's own caches, and asks for it again. The servers run one after the other, because an idle
SGLang server keeps a core busy.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import HoldfastError
from holdfast.limits import GIB
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.peers.sglang_server import (
    PAGE_TOKENS,
    SglangServer,
    SglangServerOptions,
    holdfast_storage,
)

HOLDFAST = "holdfast"
FILE = "file"
"""SGLang's own storage: one file a page."""

STORAGES = (FILE, HOLDFAST)

TAIL_TOKENS = 16
"""Tokens of a prompt behind its last whole page."""

SAVED_S = 60.0
"""Longest time until a context that was computed is stored."""

POLL_S = 0.5

SEED = 2026


class SglangTimes(NamedTuple):
    """Seconds to the first token of each round: computed, and with the context from the storage."""

    cold: list[float]
    warm: list[float]


class SglangRace(NamedTuple):
    """What is measured: model, tokens of a context, rounds, folder for logs and stores."""

    model: Path
    vocabulary: int
    tokens: int
    rounds: int
    folder: Path


def measure(race: SglangRace, storage: str, tell: Callable[[str], None]) -> SglangTimes:
    """Measure one storage. Raises HoldfastError if a context is not stored."""
    folder = race.folder / storage
    folder.mkdir(parents=True)
    if storage == FILE:
        return _rounds(race, storage, {"file_storage_path": str(folder / "pages")}, tell)
    with NodeUnderTest(folder, GIB, 2 * GIB) as node:
        return _rounds(race, "dynamic", holdfast_storage(node.address), tell)


def _rounds(
    race: SglangRace, storage: str, extra: dict[str, object], tell: Callable[[str], None]
) -> SglangTimes:
    tokens_max = 2 * (race.tokens + PAGE_TOKENS)
    options = SglangServerOptions(race.model, storage, extra, tokens_max=tokens_max)
    server = SglangServer("sglang", options, race.folder / f"{storage}.log")
    drawn = random.Random(SEED)  # noqa: S311  # prompts, not secrets
    times = SglangTimes([], [])
    with server.process:
        server.wait_ready()
        server.ask([7] * 300, 1)  # the first request pays for what is set up on demand
        for number in range(race.rounds):
            tell(f"storage {storage}: round {number + 1} of {race.rounds}")
            count = race.tokens + TAIL_TOKENS
            prompt = [drawn.randrange(10, race.vocabulary) for _ in range(count)]
            times.cold.append(server.ask(prompt, 1).answer.ttft_s)
            times.warm.append(_warm_s(server, prompt, race.tokens // PAGE_TOKENS * PAGE_TOKENS))
    return times


def _warm_s(server: SglangServer, prompt: Sequence[int], stored: int) -> float:
    """Return the seconds to the first token with the whole context from the storage."""
    until_s, found = time.monotonic() + SAVED_S, 0
    while time.monotonic() < until_s:
        time.sleep(POLL_S)
        server.forget()
        asked = server.ask(prompt, 1)
        found = asked.tokens.fetched_total
        if found == stored:
            return asked.answer.ttft_s
    raise HoldfastError(
        f"{server.name}: {found} of {stored} tokens are stored after {SAVED_S:.0f} s; "
        f"{server.process.tail()}"
    )
