"""Time to first token, computed and fetched, in pairs: vLLM alone, with Holdfast, with LMCache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import msgspec

from holdfast.errors import HoldfastError
from holdfast.limits import BLOCK_TOKENS
from holdfast_bench.harness.completion import (
    CompletionAnswer,
    MeasuredCompletion,
    ask,
    wait_asking,
    wait_fetching,
)
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.harness.server import (
    EngineCooldown,
    VllmServer,
    VllmServerOptions,
    holdfast_kv_transfer,
    start_servers,
)
from holdfast_bench.peers import lmcache_server

ANSWER_TOKENS = 4
PROBE_TOKENS = BLOCK_TOKENS + 32


class RaceTrack(msgspec.Struct, frozen=True):
    """The servers that a comparison uses: engines of one model, and the node behind one of them.

    `alone` has no connector, `behind` uses Holdfast, `portable` uses it with portable blocks,
    `lmcache` LMCache (None if not installed).
    """

    alone: VllmServer
    behind: VllmServer
    portable: VllmServer
    lmcache: VllmServer | None
    node: NodeUnderTest
    rest: EngineCooldown


class RaceTimes(msgspec.Struct, frozen=True):
    """Seconds to the first token of one prompt, one entry for each round.

    `cold` is computed, the others fetched from that tier or peer. `missed` counts, by tier, the
    requests whose context was not fetched whole from that tier. Their times are included, because
    a user would have waited as long.
    """

    cold: list[float] = []
    host: list[float] = []
    disk: list[float] = []
    lmcache: list[float] = []
    missed: dict[str, int] = {}


PEER = "external_unspecified"
"""vLLM's name for the source of tokens that another connector fetched."""


def gain(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Return the speed-up: the median over the pairs of slow time divided by fast time."""
    return median(s / f for s, f in zip(slow, fast, strict=True))


def lay_track(stack: ExitStack, folder: Path, model: Path, tokens_max: int) -> RaceTrack:
    """Start the node and the engines; they end with `stack`."""
    node = stack.enter_context(NodeUnderTest(folder / "node"))
    flags = {
        "vllm-alone": {},
        "vllm-holdfast": holdfast_kv_transfer(node.address),
        "vllm-portable": holdfast_kv_transfer(node.address, layout="portable"),
    }
    if lmcache_server.installed():
        flags["vllm-lmcache"] = lmcache_server.LMCacheServer(stack, folder).kv_transfer()
    options = VllmServerOptions(
        model=model,
        model_tokens_max=tokens_max,
        environment=lmcache_server.variables(),
    )
    alone, behind, portable, *peer = start_servers(stack, folder, options, flags)
    return RaceTrack(alone, behind, portable, peer[0] if peer else None, node, EngineCooldown())


class LayoutTimes(msgspec.Struct, frozen=True):
    """Seconds to the first token of one prompt from host memory, one entry for each round.

    `missed` counts the requests whose context was not fetched whole from there.
    """

    exact: list[float] = []
    portable: list[float] = []
    missed: dict[str, int] = {}


def compare_layouts(
    track: RaceTrack, prompt: Sequence[int], rounds: int, tell: Callable[[str], None]
) -> LayoutTimes:
    """Time the prompt from host memory with exact and with portable blocks, in turns.

    Raises HoldfastError if an answer differs from the first one of its engine.
    """
    times = LayoutTimes()
    engines = {"exact": (track.behind, times.exact), "portable": (track.portable, times.portable)}
    right: dict[str, CompletionAnswer] = {}
    for name, (engine, _) in engines.items():
        track.rest.wait_others(engine)
        ask(engine, prompt, ANSWER_TOKENS)
        wait_fetching(engine, prompt)
        right[name] = _fetched(track, engine, prompt).answer
    whole = {"host": len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS}
    for number in range(rounds):
        tell(f"{len(prompt)} tokens, layouts, round {number + 1} of {rounds} ...")
        for name in engines if number % 2 == 0 else reversed(engines):
            engine, seconds = engines[name]
            asked = _fetched(track, engine, prompt)
            if not asked.answer.equals(right[name]):
                raise HoldfastError(f"the output of {name} blocks differs: {asked.answer.tokens}")
            seconds.append(asked.answer.ttft_s)
            times.missed[name] = times.missed.get(name, 0) + (asked.tokens.fetched != whole)
    return times


def race(
    track: RaceTrack, prompt: Sequence[int], rounds: int, tell: Callable[[str], None]
) -> RaceTimes:
    """Time the prompt on each engine, `rounds` times in alternating order, after a warm-up.

    Raises HoldfastError if an answer of vLLM or of Holdfast differs from the first one.
    """
    # A short saved prompt: `wait_asking` sends it until the engine asks its node for a plan again.
    probe = prompt[:PROBE_TOKENS][::-1]
    times, right = RaceTimes(), _warm_up(track, prompt, probe)
    for number in range(rounds):
        tell(f"{len(prompt)} tokens, round {number + 1} of {rounds} ...")
        runs: list[tuple[list[float], Callable[[], CompletionAnswer]]] = [
            (times.cold, lambda: _cold(track, prompt)),
            (times.host, lambda: _warm(track, track.behind, prompt, "host", times)),
            (times.disk, lambda: _from_disk(track, prompt, probe, times)),
        ]
        for seconds, run in runs if number % 2 == 0 else reversed(runs):
            answer = run()
            if not answer.equals(right):
                raise HoldfastError(f"the output differs: {answer.tokens}, not {right.tokens}")
            seconds.append(answer.ttft_s)
        if track.lmcache is not None:
            times.lmcache.append(_warm(track, track.lmcache, prompt, PEER, times).ttft_s)
    return times


def _warm_up(track: RaceTrack, prompt: Sequence[int], probe: Sequence[int]) -> CompletionAnswer:
    """Save the context on every engine, and the probe; return the right answer to the prompt."""
    blocks = track.node.blocks_on_disk() + len(prompt) // BLOCK_TOKENS + len(probe) // BLOCK_TOKENS
    right = _cold(track, prompt)
    track.rest.wait_others(track.behind)
    ask(track.behind, prompt, ANSWER_TOKENS)
    ask(track.behind, probe, 1)
    track.node.wait_on_disk(blocks)
    if track.lmcache is not None:
        track.rest.wait_others(track.lmcache)
        ask(track.lmcache, prompt, ANSWER_TOKENS)
        wait_fetching(track.lmcache, prompt)
    return right


def _cold(track: RaceTrack, prompt: Sequence[int]) -> CompletionAnswer:
    track.rest.wait_others(track.alone)
    track.alone.reset_prefix_cache()
    return ask(track.alone, prompt, ANSWER_TOKENS).answer


def _from_disk(
    track: RaceTrack, prompt: Sequence[int], probe: Sequence[int], times: RaceTimes
) -> CompletionAnswer:
    """Restart the node, so that it reads the context from disk, and ask the engine."""
    blocks = track.node.blocks_on_disk()
    track.node.restart()
    track.node.wait_on_disk(blocks)
    wait_asking(track.behind, track.node.last_plan, probe)
    return _warm(track, track.behind, prompt, "disk", times)


def _warm(
    track: RaceTrack, engine: VllmServer, prompt: Sequence[int], tier: str, times: RaceTimes
) -> CompletionAnswer:
    """Ask an engine whose own cache is empty; count a miss if `tier` did not give the context."""
    asked = _fetched(track, engine, prompt)
    whole = {tier: len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS}
    times.missed[tier] = times.missed.get(tier, 0) + (asked.tokens.fetched != whole)
    return asked.answer


def _fetched(track: RaceTrack, engine: VllmServer, prompt: Sequence[int]) -> MeasuredCompletion:
    """Ask an engine whose own cache is empty."""
    track.rest.wait_others(engine)
    engine.reset_prefix_cache()
    return ask(engine, prompt, ANSWER_TOKENS)
