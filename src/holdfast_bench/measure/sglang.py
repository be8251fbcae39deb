"""Time to first token of SGLang: computed, and from its storage, with two storages in turn.

Every storage gets the same prompts. A round computes a prompt that was never asked before, empties
SGLang's own caches, and asks for it again, when what was saved is on disk. Rounds alternate between
the servers, so that a disturbance affects both; a server that is not asked sleeps.

Attention computes the new tokens only. SGLang's backend for CPUs computes all tokens of a prompt
again, which takes seconds, so the milliseconds of a storage would not be visible.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import HoldfastError
from holdfast.limits import GIB
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.peers.sglang_environment import NEW_TOKENS_ONLY
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

WAITING_SLEEPS = {"OMP_WAIT_POLICY": "PASSIVE"}
"""OpenMP's threads sleep while they wait for each other, and do not spin.

Beside other work on its cores a server that spins takes several times the processor time for the
same tokens. Whether GNU's OpenMP spins depends on how many of its threads a process has, and so on
whether a storage copies with torch in threads of its own.
"""

SEED = 2026


class SglangTimes(NamedTuple):
    """Seconds to the first token of each round: computed, and with the context from the storage."""

    cold: list[float]
    warm: list[float]


class SglangRace(NamedTuple):
    """What is measured: model, lengths of contexts, rounds, folder for logs and stores."""

    model: Path
    vocabulary: int
    lengths: tuple[int, ...]
    rounds: int
    folder: Path


def measure(
    race: SglangRace, tell: Callable[[str], None]
) -> Iterator[tuple[int, dict[str, SglangTimes]]]:
    """Yield the times of every storage by length. Raises HoldfastError if a context is not stored.

    The servers end with the iteration.
    """
    drawn = random.Random(SEED)  # noqa: S311  # prompts, not secrets
    with ExitStack() as stack:
        tell("the servers start")
        node = stack.enter_context(NodeUnderTest(race.folder / HOLDFAST, GIB, 2 * GIB))
        servers = _servers(stack, race, node)
        for server in servers.values():
            server.wait_ready()
            server.ask([7] * 300, 1)  # the first request pays for what is set up on demand
        for tokens in race.lengths:
            times = {storage: SglangTimes([], []) for storage in STORAGES}
            stored = tokens // PAGE_TOKENS * PAGE_TOKENS
            for number in range(race.rounds):
                prompt = [drawn.randrange(10, race.vocabulary) for _ in range(tokens + TAIL_TOKENS)]
                for storage, server in servers.items():
                    tell(f"{tokens} tokens, storage {storage}: round {number + 1} of {race.rounds}")
                    times[storage].cold.append(server.ask(prompt, 1).answer.ttft_s)
                    times[storage].warm.append(_warm_s(server, prompt, stored, node))
            yield tokens, times


def _servers(stack: ExitStack, race: SglangRace, node: NodeUnderTest) -> dict[str, SglangServer]:
    """Start a server for each storage; they end with `stack`."""
    storages: dict[str, tuple[str, dict[str, object]]] = {
        FILE: (FILE, {"file_storage_path": str(race.folder / "pages")}),
        HOLDFAST: ("dynamic", holdfast_storage(node.address)),
    }
    servers = {}
    for storage, (backend, extra) in storages.items():
        options = SglangServerOptions(
            *(race.model, backend, extra),
            tokens_max=2 * (max(race.lengths) + PAGE_TOKENS),
            environment=NEW_TOKENS_ONLY | WAITING_SLEEPS,
        )
        servers[storage] = SglangServer(storage, options, race.folder / f"{storage}.log")
        stack.enter_context(servers[storage].process)
    return servers


def _warm_s(server: SglangServer, prompt: Sequence[int], stored: int, node: NodeUnderTest) -> float:
    """Return the seconds to the first token with the whole context from the storage."""
    until_s, found = time.monotonic() + SAVED_S, 0
    while time.monotonic() < until_s:
        time.sleep(POLL_S)
        node.wait_idle()  # neither storage may write to the drive while it is read
        os.sync()
        server.forget()
        asked = server.ask(prompt, 1)
        found = asked.tokens.fetched_total
        if found == stored:
            return asked.answer.ttft_s
    raise HoldfastError(
        f"{server.name}: {found} of {stored} tokens are stored after {SAVED_S:.0f} s; "
        f"{server.process.tail()}"
    )
