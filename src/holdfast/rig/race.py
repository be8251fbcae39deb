"""Time to first token, cold against warm, in pairs: vLLM alone, with Holdfast, with a peer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import msgspec

from holdfast.errors import HoldfastError
from holdfast.limits import BLOCK_TOKENS
from holdfast.rig import lmcache
from holdfast.rig.ask import Answer, ask, wait_asking, wait_fetching
from holdfast.rig.node import Node
from holdfast.rig.server import Engine, EngineOptions, Rest, holdfast_kv_transfer, wait_all_ready

ANSWER_TOKENS = 4
PROBE_TOKENS = BLOCK_TOKENS + 32


class Track(msgspec.Struct, frozen=True):
    """What stands still during a race: engines of one model, and the node behind one of them.

    `lmcache` is None where LMCache is not installed.
    """

    alone: Engine
    behind: Engine
    lmcache: Engine | None
    node: Node
    rest: Rest


class Times(msgspec.Struct, frozen=True):
    """Seconds to the first token of one prompt, one entry a round.

    `missed` counts warm requests whose context did not come whole from where it was measured;
    their times stay in: it is what a user would have waited.
    """

    cold: list[float] = []
    host: list[float] = []
    disk: list[float] = []
    lmcache: list[float] = []
    missed: dict[str, int] = {}


PEER = "external_unspecified"
"""What vLLM calls where another connector's tokens came from."""


def gain(slow: Sequence[float], fast: Sequence[float]) -> float:
    """How many times sooner: the median over the pairs."""
    return median(s / f for s, f in zip(slow, fast, strict=True))


def lay_track(stack: ExitStack, folder: Path, model: Path, tokens_max: int) -> Track:
    """Start node and engines; they end with `stack`."""
    node = stack.enter_context(Node(folder / "node"))
    flags = {"vllm-alone": {}, "vllm-holdfast": holdfast_kv_transfer(node.address)}
    if lmcache.installed():
        flags["vllm-lmcache"] = lmcache.start(stack, folder)
    engines = []
    for name, flag in flags.items():
        options = EngineOptions(model=model, kv_transfer=flag, model_tokens_max=tokens_max)
        engines.append(Engine(name, options, folder / f"{name}.log"))
        stack.enter_context(engines[-1].process)
    wait_all_ready(engines)
    alone, behind, *peer = engines
    return Track(alone, behind, peer[0] if peer else None, node, Rest())


def race(track: Track, prompt: Sequence[int], rounds: int, tell: Callable[[str], None]) -> Times:
    """Ask the engines in turn, the order changing each time; a first round is not counted.

    Raises HoldfastError if an answer of vLLM or of Holdfast differs from the others.
    """
    times, right, probe = _warm_up(track, prompt)
    for turn in range(rounds):
        tell(f"{len(prompt)} tokens, round {turn + 1} of {rounds} ...")
        runs: list[tuple[list[float], Callable[[], Answer]]] = [
            (times.cold, lambda: _cold(track, prompt)),
            (times.host, lambda: _warm(track, track.behind, prompt, "host", times)),
            (times.disk, lambda: _from_disk(track, prompt, probe, times)),
        ]
        for seconds, run in runs if turn % 2 == 0 else reversed(runs):
            seconds.append(_checked_s(run(), right))
        if track.lmcache is not None:
            answer = _warm(track, track.lmcache, prompt, PEER, times)
            times.lmcache.append(answer.ttft_s)
    return times


def _warm_up(track: Track, prompt: Sequence[int]) -> tuple[Times, Answer, list[int]]:
    """Save the context everywhere; return empty times, the right answer, and a probe that hits."""
    probe = list(reversed(prompt[:PROBE_TOKENS]))
    blocks = track.node.blocks_on_disk() + len(prompt) // BLOCK_TOKENS + len(probe) // BLOCK_TOKENS
    right = _cold(track, prompt)
    track.rest.before(track.behind)
    ask(track.behind, prompt, ANSWER_TOKENS)
    ask(track.behind, probe, 1)
    track.node.wait_on_disk(blocks)
    if track.lmcache is not None:
        track.rest.before(track.lmcache)
        ask(track.lmcache, prompt, ANSWER_TOKENS)
        wait_fetching(track.lmcache, prompt)
    return Times(), right, probe


def _cold(track: Track, prompt: Sequence[int]) -> Answer:
    track.rest.before(track.alone)
    track.alone.reset_prefix_cache()
    return ask(track.alone, prompt, ANSWER_TOKENS).answer


def _from_disk(track: Track, prompt: Sequence[int], probe: Sequence[int], times: Times) -> Answer:
    """Ask a node that was started anew, so that nothing is in its memory; afterwards it is."""
    blocks = track.node.blocks_on_disk()
    track.node.restart()
    track.node.wait_on_disk(blocks)
    wait_asking(track.behind, track.node.last_plan, probe)
    return _warm(track, track.behind, prompt, "disk", times)


def _warm(track: Track, engine: Engine, prompt: Sequence[int], tier: str, times: Times) -> Answer:
    track.rest.before(engine)
    engine.reset_prefix_cache()
    asked = ask(engine, prompt, ANSWER_TOKENS)
    whole = {tier: len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS}
    times.missed[tier] = times.missed.get(tier, 0) + (asked.tokens.fetched != whole)
    return asked.answer


def _checked_s(answer: Answer, right: Answer) -> float:
    if not answer.equals(right):
        raise HoldfastError(f"the output differs: {answer.tokens} instead of {right.tokens}")
    return answer.ttft_s
