"""One load on several servers: vLLM alone, with its own host tier, with LMCache, with Holdfast.

All servers run the same model with the same threads and the same memory for KV pages. One is
measured at a time; the others are idle. Warm prompts get servers of their own, whose scheduler has
a core for itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from holdfast.limits import BLOCK_TOKENS, GIB
from holdfast.report import Row, at_least, at_most, not_measured
from holdfast_bench.harness.completion import ask, fetched_tokens
from holdfast_bench.harness.hardware_limits import SEED
from holdfast_bench.harness.model import SmallModelShape
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.harness.server import (
    EngineCooldown,
    VllmServer,
    VllmServerOptions,
    holdfast_kv_transfer,
    scheduler_apart_variables,
    start_servers,
)
from holdfast_bench.harness.standard_error import of_median, percentile_90, percentile_99
from holdfast_bench.peers import lmcache_server, vllm_host_tier
from holdfast_bench.peers.lmcache_server import LMCacheServer
from holdfast_bench.scenarios.serving_loads import (
    PrefixRepetition,
    ServingPrompts,
    Sessions,
    SessionTimes,
    run_crowd,
    run_prefix_repetition,
    run_sessions,
)

ALONE, NATIVE, LMCACHE, OURS = "vllm", "native", "lmcache", "holdfast"

HOST_BYTES = 2 * GIB
"""Host memory of each server that keeps contexts there; LMCache's is `lmcache_server.MEMORY_GB`."""

TAIL_TOKENS = 16
SPARE_TOKENS = 2 * BLOCK_TOKENS
"""Tokens of a context beyond a load's longest one: its text may be tokenized to a few more."""

REQUESTS_AT_ONCE = 4
"""Requests that an engine serves at once; more wait."""

PEER_GOAL = 1.5
"""Smallest gain over every peer."""
FIRST_TURN_GOAL = 1.02
CROWD_GOAL = 1.05
SAVED_GOAL = 1.0
"""Largest number of bytes saved, relative to LMCache."""


class ServeLoads(NamedTuple):
    """The loads: lengths of warm prompts, sessions, clients at once, crowds, and prefixes.

    `cached_sessions`: whole sessions that an engine's own cache holds.
    """

    warm_tokens: tuple[int, ...] = (4096, 8192)
    sessions: Sessions = Sessions()
    cached_sessions: int = 3
    clients: tuple[int, ...] = (2, 8)
    crowds: tuple[int, ...] = (16, 50)
    crowd_tokens: int = 4096
    prefixes: PrefixRepetition = PrefixRepetition()

    @property
    def context_tokens(self) -> int:
        """Tokens of the longest context that an engine must take."""
        longest = max(*self.warm_tokens, self.crowd_tokens, self.sessions.longest)
        return max(longest, self.prefixes.longest) + SPARE_TOKENS

    @property
    def cache_tokens(self) -> int:
        """Tokens that an engine's own cache holds."""
        sessions = self.cached_sessions * self.sessions.longest + BLOCK_TOKENS
        return max(sessions, self.context_tokens + BLOCK_TOKENS)


QUICK_LOADS = ServeLoads(
    warm_tokens=(1024,),
    sessions=Sessions(number=3, turns=2, first_tokens=512, later_tokens=100),
    clients=(2,),
    crowds=(8,),
    crowd_tokens=512,
    prefixes=PrefixRepetition(requests=4, prefixes=2, prefix_tokens=256, suffix_tokens=64),
)


class ServeSettings(NamedTuple):
    """The model's folder and shape, rounds of warm prompts, loads, and the progress line.

    `threads`: variables that place the compute threads of every server; by default all cores.
    """

    made: Path
    shape: SmallModelShape
    rounds: int
    loads: ServeLoads
    tell: Callable[[str], None]
    threads: Mapping[str, str] = {}

    def prompts(self, seed: int) -> ServingPrompts:
        """Return prompts that are the same for every server."""
        return ServingPrompts(SEED + seed, self.shape.vocabulary)

    def options(self) -> VllmServerOptions:
        """Return the options of every server."""
        loads = self.loads
        return VllmServerOptions(
            model=self.made,
            model_tokens_max=loads.context_tokens,
            requests_max=REQUESTS_AT_ONCE,
            kv_bytes=loads.cache_tokens * self.shape.token_bytes,
            environment={
                **vllm_host_tier.variables(),
                **lmcache_server.variables(),
                **self.threads,
            },
        )


class SavedBytes(NamedTuple):
    """Bytes of KV state that a server has taken from its engine, and has written to a drive."""

    memory: int
    drive: int


class Servers:
    """Servers by name, and what keeps the contexts of two of them. They end with `stack`."""

    def __init__(self, stack: ExitStack, folder: Path, settings: ServeSettings) -> None:
        self.folder = folder
        self._node = stack.enter_context(NodeUnderTest(folder / "node", HOST_BYTES))
        self._lmcache: LMCacheServer | None = None
        kv_transfers: dict[str, dict[str, object]] = {
            ALONE: {},
            NATIVE: vllm_host_tier.kv_transfer(HOST_BYTES),
            OURS: holdfast_kv_transfer(self._node.address),
        }
        if lmcache_server.installed():
            self._lmcache = LMCacheServer(stack, folder)
            kv_transfers[LMCACHE] = self._lmcache.kv_transfer()
        stack.callback(vllm_host_tier.remove_left_memory, kv_transfers[NATIVE])
        servers = start_servers(stack, folder, settings.options(), kv_transfers)
        self.by_name = dict(zip(kv_transfers, servers, strict=True))
        self._cooldown = EngineCooldown()

    def in_turn(self, number: int) -> Iterator[tuple[str, VllmServer]]:
        """Yield every server when it may be measured; the first one changes with each turn."""
        names = list(self.by_name)
        at = number % len(names)
        for name in names[at:] + names[:at]:
            self._cooldown.wait_others(self.by_name[name])
            yield name, self.by_name[name]
            self._node.wait_idle()  # writes under way must not slow the next one

    def saved_bytes(self) -> dict[str, SavedBytes]:
        """Return what Holdfast and LMCache, which has no drive here, have saved until now."""
        status = self._node.status()
        drive = sum(int(t["written_bytes"]) for t in status["tiers"] if t["tier"] == "disk")
        memory = sum(int(domain["raw_bytes"]["host"]) for domain in status["domains"])
        saved = {OURS: SavedBytes(memory, drive)}
        if self._lmcache is not None:
            saved[LMCACHE] = SavedBytes(self._lmcache.held_bytes(), 0)
        return saved


LOADS = {
    "warm": "a context again, one request at a time",
    "sessions": "sessions of several turns, a few and many at once",
    "repetition": "vLLM's load generator with its data set prefix_repetition",
    "crowd": "requests that arrive together behind one saved prefix",
}
"""The loads that `serve_rows` puts on the servers, in this order."""


def serve_rows(
    folder: Path, settings: ServeSettings, chosen: Collection[str] = LOADS
) -> Iterator[Row]:
    """Start the servers, and measure the chosen loads in turn; the servers end with the rows."""
    loads = settings.loads
    if not lmcache_server.installed():
        yield not_measured(f"serve.{LMCACHE}", lmcache_server.why_not())
    if "warm" in chosen:
        apart = settings._replace(threads=scheduler_apart_variables())
        with ExitStack() as stack:
            settings.tell("the servers of warm prompts start")
            servers = Servers(stack, folder / "warm", apart)
            for tokens in loads.warm_tokens:
                yield _warm_row(servers, apart, tokens)
    if not {*chosen} - {"warm"}:
        return
    with ExitStack() as stack:
        settings.tell("the servers start")
        servers = Servers(stack, folder / "servers", settings)
        for clients in loads.clients if "sessions" in chosen else ():
            yield from _session_rows(servers, settings, clients)
        if "repetition" in chosen:
            yield from _prefix_repetition_rows(servers, settings)
        for size in loads.crowds if "crowd" in chosen else ():
            yield _crowd_row(servers, settings, size)


def _warm_row(servers: Servers, settings: ServeSettings, tokens: int) -> Row:
    """First token of a context that the server has computed before, its own cache being empty.

    `missed`: rounds in which a server had not kept the context whole, by name.
    """
    prompt = settings.prompts(tokens).tokens(tokens + TAIL_TOKENS)
    for number in range(2):  # the first load of a server is slower, and some save a step later
        for _, engine in servers.in_turn(number):
            engine.reset_prefix_cache()
            ask(engine, prompt, 1)
    times: dict[str, list[float]] = {name: [] for name in servers.by_name}
    missed: Counter[str] = Counter()
    for number in range(settings.rounds):
        settings.tell(f"{tokens} tokens again, round {number + 1} of {settings.rounds}")
        for name, engine in servers.in_turn(number):
            engine.reset_prefix_cache()
            asked = ask(engine, prompt, 1)
            times[name].append(asked.answer.ttft_s)
            missed[name] += name != ALONE and asked.tokens.fetched_total < tokens
    seconds = {name: median(each) for name, each in times.items()}
    misses = {f"{name}_missed": count for name, count in missed.items() if count}
    return _against_peers(f"serve.warm.{tokens}", seconds, rounds=settings.rounds, **misses)


def _session_rows(servers: Servers, settings: ServeSettings, clients: int) -> Iterator[Row]:
    """Sessions of several turns, over an engine's cache that holds a part of them."""
    sessions = settings.loads.sessions
    times: dict[str, SessionTimes] = {}
    before = servers.saved_bytes()
    for name, engine in servers.in_turn(clients):
        settings.tell(f"{sessions.number} sessions, {clients} at once, {name}")
        engine.reset_prefix_cache()
        times[name] = run_sessions(engine, settings.prompts(clients), sessions, clients)
    after = servers.saved_bytes()
    what = f"serve.sessions.{clients}"
    figures: Mapping[str, Callable[[Sequence[float]], float]] = {
        "p50": median,
        "p90": percentile_90,
    }
    for figure, of in figures.items():
        seconds = {name: of(each.later) for name, each in times.items()}
        yield _against_peers(f"{what}.later.{figure}", seconds, requests=len(times[OURS].later))
    firsts = {name: fmean(each.first) for name, each in times.items()}
    ratios = [
        ours / alone for ours, alone in zip(times[OURS].first, times[ALONE].first, strict=True)
    ]
    yield at_most(
        f"{what}.first.mean",
        firsts[OURS] / firsts[ALONE],
        "x",
        FIRST_TURN_GOAL,
        requests=sessions.number,
        standard_error=of_median(ratios),
        **_seconds_by_server(firsts),
    )
    grown = {
        name: SavedBytes(after[name].memory - was.memory, after[name].drive - was.drive)
        for name, was in before.items()
    }
    if LMCACHE in grown:
        yield at_most(
            f"{what}.saved",
            grown[OURS].memory / grown[LMCACHE].memory,
            "x",
            SAVED_GOAL,
            holdfast_bytes=grown[OURS].memory,
            lmcache_bytes=grown[LMCACHE].memory,
            holdfast_drive_bytes=grown[OURS].drive,
        )


def _prefix_repetition_rows(servers: Servers, settings: ServeSettings) -> Iterator[Row]:
    """Prompts of vLLM's own load generator."""
    load, found = settings.loads.prefixes, {}
    for name, engine in servers.in_turn(0):
        settings.tell(f"vLLM's load generator, {name}")
        engine.reset_prefix_cache()
        found[name] = run_prefix_repetition(engine, settings.made, servers.folder, load)
    for figure in ("mean", "p90"):
        seconds = {name: float(getattr(each, f"{figure}_s")) for name, each in found.items()}
        yield _against_peers(f"serve.prefix_repetition.{figure}", seconds, requests=load.requests)


def _crowd_row(servers: Servers, settings: ServeSettings, size: int) -> Row:
    """Requests behind one saved prefix that arrive together, beside an engine that computes it."""
    tokens = settings.loads.crowd_tokens
    prompts = settings.prompts(size)
    prefix = prompts.tokens(tokens)
    crowd = [[*prefix, *prompts.tokens(TAIL_TOKENS)] for _ in range(size)]
    slowest: dict[str, float] = {}
    loaded = 0
    for name, engine in servers.in_turn(size):
        settings.tell(f"{size} requests behind one prefix, {name}")
        ask(engine, prefix, 1)
        before = fetched_tokens(engine)
        slowest[name] = percentile_99(run_crowd(engine, crowd))
        loaded += fetched_tokens(engine) - before if name == OURS else 0
    return at_most(
        f"serve.crowd.{size}.p99",
        slowest[OURS] / slowest[ALONE],
        "x",
        CROWD_GOAL,
        prefix_loads=loaded / tokens,
        **_seconds_by_server(slowest),
    )


def _against_peers(what: str, seconds: Mapping[str, float], **more: object) -> Row:
    """Return how many times sooner ours is than the fastest of the others."""
    best = min((name for name in seconds if name != OURS), key=lambda name: seconds[name])
    return at_least(
        what,
        seconds[best] / seconds[OURS],
        "x",
        PEER_GOAL,
        best_peer=best,
        **_seconds_by_server(seconds),
        native_is=vllm_host_tier.ABOUT,
        **more,
    )


def _seconds_by_server(seconds: Mapping[str, float]) -> dict[str, float]:
    return {f"{name}_s": value for name, value in seconds.items()}
