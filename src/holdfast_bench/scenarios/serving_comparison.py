"""One load on several servers: vLLM alone, with Holdfast, and with what else keeps its contexts.

All servers run the same model with the same threads and the same memory for KV pages. One is
measured at a time; the others are idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from holdfast.report import Row, at_least, at_most, not_measured
from holdfast_bench.harness.completion import ask, fetched_tokens
from holdfast_bench.harness.hardware_limits import SEED
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.harness.server import (
    EngineCooldown,
    VllmServer,
    VllmServerOptions,
    equal_threads,
    holdfast_kv_transfer,
    start_servers,
)
from holdfast_bench.harness.standard_error import percentile_90, percentile_99
from holdfast_bench.peers import lmcache_server
from holdfast_bench.scenarios.serving_loads import (
    PrefixRepetition,
    ServingPrompts,
    Sessions,
    SessionTimes,
    run_crowd,
    run_prefix_repetition,
    run_sessions,
)

ALONE, OURS, LMCACHE = "vllm", "holdfast", "lmcache"

MODEL_TOKENS_MAX = 16_384
TAIL_TOKENS = 16
CROWD_AT_ONCE = 4
"""Requests that an engine serves at once while a crowd waits."""

PEER_GOAL = 1.5
"""Smallest gain over every peer."""
FIRST_TURN_GOAL = 1.02
CROWD_GOAL = 1.05


class ServeLoads(NamedTuple):
    """The loads: lengths of warm prompts, sessions, clients at once, crowds, and prefixes.

    The default sessions have three times as much KV, with the model `small`, as an engine holds.
    """

    warm_tokens: tuple[int, ...] = (4096, 8192)
    sessions: Sessions = Sessions()
    clients: tuple[int, ...] = (2, 8)
    crowds: tuple[int, ...] = (16, 50)
    crowd_tokens: int = 4096
    prefixes: PrefixRepetition = PrefixRepetition()


QUICK_LOADS = ServeLoads(
    warm_tokens=(1024,),
    sessions=Sessions(number=3, turns=2, turn_tokens=512),
    clients=(2,),
    crowds=(8,),
    crowd_tokens=512,
    prefixes=PrefixRepetition(requests=4, prefixes=2, prefix_tokens=256, suffix_tokens=64),
)


class ServeSettings(NamedTuple):
    """The model's folder and vocabulary, rounds of warm prompts, loads, and the progress line."""

    made: Path
    vocabulary: int
    rounds: int
    loads: ServeLoads
    tell: Callable[[str], None]

    def prompts(self, seed: int) -> ServingPrompts:
        """Return prompts that are the same for every server."""
        return ServingPrompts(SEED + seed, self.vocabulary)


class Servers:
    """Servers by name, and the node behind ours. They end with `stack`.

    `requests_max`: requests that each serves at once.
    """

    def __init__(
        self, stack: ExitStack, folder: Path, made: Path, requests_max: int, *, peers: bool = True
    ) -> None:
        self.folder, self.made = folder, made
        self._node = stack.enter_context(NodeUnderTest(folder / "node"))
        kv_transfers: dict[str, dict[str, object]] = {
            ALONE: {},
            OURS: holdfast_kv_transfer(self._node.address),
        }
        if peers and lmcache_server.installed():
            kv_transfers[LMCACHE] = lmcache_server.start_for_engine(stack, folder)
        options = VllmServerOptions(
            model=made,
            model_tokens_max=MODEL_TOKENS_MAX,
            requests_max=requests_max,
            environment=equal_threads(),
        )
        servers = start_servers(stack, folder, options, kv_transfers)
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

    def written_bytes(self) -> int:
        """Return the bytes that the node has written to its disk since its start."""
        tiers = self._node.status()["tiers"]
        return sum(int(tier["written_bytes"]) for tier in tiers if tier["tier"] == "disk")


def serve_rows(folder: Path, settings: ServeSettings) -> Iterator[Row]:
    """Start the servers, and measure one load after the other; the servers end with the rows."""
    loads, made = settings.loads, settings.made
    if not lmcache_server.installed():
        yield not_measured(f"serve.{LMCACHE}", lmcache_server.WHY_NOT)
    with ExitStack() as stack:
        settings.tell("the servers start")
        servers = Servers(stack, folder / "servers", made, max(loads.clients))
        for tokens in loads.warm_tokens:
            yield _warm_row(servers, settings, tokens)
        for clients in loads.clients:
            yield from _session_rows(servers, settings, clients)
        yield from _prefix_repetition_rows(servers, settings)
    with ExitStack() as stack:
        settings.tell("the servers of crowds start")
        servers = Servers(stack, folder / "crowds", made, CROWD_AT_ONCE, peers=False)
        for size in loads.crowds:
            yield _crowd_row(servers, settings, size)


def _warm_row(servers: Servers, settings: ServeSettings, tokens: int) -> Row:
    """First token of a context that the server has computed before, its own cache being empty."""
    prompt = settings.prompts(tokens).tokens(tokens + TAIL_TOKENS)
    for _, engine in servers.in_turn(0):
        ask(engine, prompt, 1)
    times: dict[str, list[float]] = {name: [] for name in servers.by_name}
    fetched = 0
    for number in range(settings.rounds):
        settings.tell(f"{tokens} tokens again, round {number + 1} of {settings.rounds}")
        for name, engine in servers.in_turn(number):
            engine.reset_prefix_cache()
            asked = ask(engine, prompt, 1)
            times[name].append(asked.answer.ttft_s)
            fetched += asked.tokens.fetched_total if name == OURS else 0
    seconds = {name: median(each) for name, each in times.items()}
    more = {"rounds": settings.rounds, "fetched_tokens": fetched / settings.rounds}
    return _against_peers(f"serve.warm.{tokens}", seconds, **more)


def _session_rows(servers: Servers, settings: ServeSettings, clients: int) -> Iterator[Row]:
    """Sessions of several turns, over an engine's cache that holds three of them."""
    sessions = settings.loads.sessions
    times: dict[str, SessionTimes] = {}
    before = servers.written_bytes()
    for name, engine in servers.in_turn(clients):
        settings.tell(f"{sessions.number} sessions, {clients} at once, {name}")
        engine.reset_prefix_cache()
        times[name] = run_sessions(engine, settings.prompts(clients), sessions, clients)
    written = servers.written_bytes() - before
    what = f"serve.sessions.{clients}"
    figures: Mapping[str, Callable[[Sequence[float]], float]] = {
        "p50": median,
        "p90": percentile_90,
    }
    for figure, of in figures.items():
        seconds = {name: of(each.later) for name, each in times.items()}
        yield _against_peers(f"{what}.later.{figure}", seconds, requests=len(times[OURS].later))
    firsts = {name: fmean(each.first) for name, each in times.items()}
    yield at_most(
        f"{what}.first.mean",
        firsts[OURS] / firsts[ALONE],
        "x",
        FIRST_TURN_GOAL,
        written_bytes=written,
        requests=sessions.number,
        **_seconds_by_server(firsts),
    )


def _prefix_repetition_rows(servers: Servers, settings: ServeSettings) -> Iterator[Row]:
    """ServingPrompts of vLLM's own load generator."""
    load, found = settings.loads.prefixes, {}
    for name, engine in servers.in_turn(0):
        settings.tell(f"vLLM's load generator, {name}")
        engine.reset_prefix_cache()
        found[name] = run_prefix_repetition(engine, servers.made, servers.folder, load)
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
        loaded += fetched_tokens(engine) - before
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
    gain = seconds[best] / seconds[OURS]
    return at_least(
        what, gain, "x", PEER_GOAL, best_peer=best, **_seconds_by_server(seconds), **more
    )


def _seconds_by_server(seconds: Mapping[str, float]) -> dict[str, float]:
    return {f"{name}_s": value for name, value in seconds.items()}
