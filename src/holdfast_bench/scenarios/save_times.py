"""One load of sessions on three engines that save at different times: bytes saved, tokens computed.

The sessions come back in an order that favours those that were used last, and most of them fit in
an engine's own cache. Each engine has a node of its own, which counts what the engine saves.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from holdfast.limits import BLOCK_TOKENS, GIB
from holdfast.report import Row, at_least, at_most
from holdfast_bench.harness.completion import ask
from holdfast_bench.harness.hardware_limits import SEED
from holdfast_bench.harness.model import SmallModelShape
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.harness.server import (
    VllmServer,
    VllmServerOptions,
    holdfast_kv_transfer,
    start_servers,
)
from holdfast_bench.scenarios.serving_loads import ANSWER_TOKENS, ServingPrompts, Sessions

AT_ONCE, DEFERRED = "when_full", "before_eviction"
SAVE_TIMES = (AT_ONCE, DEFERRED, "auto")

HOST_BYTES = 2 * GIB
"""Memory of each node: nothing is evicted there, so what it holds is what was saved."""

BATCH_TOKENS = 512
"""Tokens of an engine's step: blocks are saved as many pages early as a step may take."""

NEAR = 4
"""Sessions that count as used last."""

NEAR_SHARE = 0.8
"""Share of the turns that are of one of those."""

BYTES_GOAL = 2.0
COMPUTED_GOAL = 1.02
"""Most tokens computed with deferred saves, relative to those with `when_full`."""


class SaveLoad(NamedTuple):
    """Sessions, and how many whole ones an engine's own cache holds."""

    sessions: Sessions = Sessions(number=12, turns=4, first_tokens=1500, later_tokens=250)
    cached_sessions: int = 9

    @property
    def cache_tokens(self) -> int:
        """Tokens that an engine's own cache holds."""
        return self.cached_sessions * self.sessions.longest + BLOCK_TOKENS


QUICK_LOAD = SaveLoad(Sessions(number=8, turns=3, first_tokens=500, later_tokens=100), 6)


class SaveTimeSettings(NamedTuple):
    """The model's folder and shape, rounds, the load, and the receiver of progress texts."""

    made: Path
    shape: SmallModelShape
    rounds: int
    load: SaveLoad
    tell: Callable[[str], None]

    def options(self) -> VllmServerOptions:
        """Return the options of every engine."""
        return VllmServerOptions(
            model=self.made,
            model_tokens_max=self.load.sessions.longest + 2 * BLOCK_TOKENS,
            batch_tokens_max=BATCH_TOKENS,
            kv_bytes=self.load.cache_tokens * self.shape.token_bytes,
        )


class SaveTimeResult(NamedTuple):
    """What one engine did with the load: bytes saved, prompt tokens computed, and fetched."""

    saved_bytes: int
    computed: int
    fetched: int


def turn_order(sessions: Sessions, seed: int) -> list[int]:
    """Return the session of each turn: often one of those that were used last."""
    source = random.Random(seed)  # noqa: S311  # a load, not a secret
    left, used = dict.fromkeys(range(sessions.number), sessions.turns), list[int]()
    order = []
    while left:
        near = [session for session in used[-NEAR:] if session in left]
        is_near = bool(near) and source.random() < NEAR_SHARE
        session = source.choice(near if is_near else sorted(left))
        order.append(session)
        used = [*(each for each in used if each != session), session]
        left[session] -= 1
        if not left[session]:
            del left[session]
    return order


def save_time_rows(folder: Path, settings: SaveTimeSettings) -> Iterator[Row]:
    """Run the load on one engine after the other; each starts with a node of its own, and ends.

    No time is measured, so no engine needs to be compared at the same moment as another one.
    """
    results: dict[str, SaveTimeResult] = {}
    for save in SAVE_TIMES:
        settings.tell(f"a node and an engine with {save} start")
        with ExitStack() as stack:
            node = stack.enter_context(NodeUnderTest(folder / save / "node", HOST_BYTES))
            transfer = {save: _kv_transfer(node.address, save)}
            [engine] = start_servers(stack, folder / save, settings.options(), transfer)
            rounds = []
            for number in range(settings.rounds):
                settings.tell(f"{save}, round {number + 1} of {settings.rounds}")
                rounds.append(_run(engine, node, settings, number))
        results[save] = SaveTimeResult(*map(sum, zip(*rounds, strict=True)))
    yield from rows_of(results, settings)


def _kv_transfer(address: str, save: str) -> dict[str, object]:
    transfer = holdfast_kv_transfer(address)
    options = transfer["kv_connector_extra_config"]
    assert isinstance(options, dict)
    return transfer | {"kv_connector_extra_config": options | {"save": save}}


def _run(
    engine: VllmServer, node: NodeUnderTest, settings: SaveTimeSettings, number: int
) -> SaveTimeResult:
    """Serve one round of sessions; every engine gets the same prompts in the same order."""
    sessions = settings.load.sessions
    prompts = ServingPrompts(SEED + number, settings.shape.vocabulary)
    conversations: list[list[int]] = [[] for _ in range(sessions.number)]
    engine.reset_prefix_cache()
    before, computed, fetched = _saved_bytes(node), 0, 0
    for session in turn_order(sessions, SEED + number):
        conversation = conversations[session]
        new = sessions.later_tokens if conversation else sessions.first_tokens
        conversation += prompts.tokens(new)
        found = ask(engine, conversation, ANSWER_TOKENS)
        conversation += found.answer.tokens
        computed += found.tokens.computed
        fetched += found.tokens.fetched_total
    return SaveTimeResult(_saved_bytes(node) - before, computed, fetched)


def _saved_bytes(node: NodeUnderTest) -> int:
    node.wait_idle()
    return sum(int(domain["raw_bytes"]["host"]) for domain in node.status()["domains"])


def rows_of(results: Mapping[str, SaveTimeResult], settings: SaveTimeSettings) -> Iterator[Row]:
    """Yield how the engines compare."""
    full, deferred = results[AT_ONCE], results[DEFERRED]
    load = settings.load
    about = {
        "sessions": load.sessions.number,
        "turns": load.sessions.turns,
        "cached_sessions": load.cached_sessions,
        "rounds": settings.rounds,
    }
    saved = {f"{save}_bytes": result.saved_bytes for save, result in results.items()}
    gain = full.saved_bytes / max(deferred.saved_bytes, 1)
    yield at_least("saves.bytes", gain, "x", BYTES_GOAL, **saved, **about)
    computed = {f"{save}_tokens": result.computed for save, result in results.items()}
    fetched = {f"{save}_fetched": result.fetched for save, result in results.items()}
    ratio = deferred.computed / full.computed
    yield at_most("saves.computed", ratio, "x", COMPUTED_GOAL, **computed, **fetched, **about)
