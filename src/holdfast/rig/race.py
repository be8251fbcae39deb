"""Time to first token, cold against warm, in pairs: vLLM alone beside vLLM with Holdfast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import msgspec

from holdfast.errors import HoldfastError
from holdfast.limits import BLOCK_TOKENS
from holdfast.rig.ask import Answer, ask, wait_fetching
from holdfast.rig.node import Node
from holdfast.rig.server import Engine, EngineOptions, holdfast_kv_transfer, wait_all_ready

ANSWER_TOKENS = 4
PROBE_TOKENS = BLOCK_TOKENS + 32


class Track(msgspec.Struct, frozen=True):
    """What stands still during a race: two engines of one model, and the node behind one."""

    alone: Engine
    behind: Engine
    node: Node


class Times(msgspec.Struct, frozen=True):
    """Seconds to the first token of one prompt, one entry a repetition.

    `missed` counts warm requests whose context did not come whole from the tier being measured
    (by tier); their times stay in: it is what a user would have waited.
    """

    cold: list[float]
    host: list[float]
    disk: list[float]
    missed: dict[str, int]

    def gain(self, warm: Sequence[float]) -> float:
        """How many times sooner than cold: the median over the pairs."""
        return median(c / w for c, w in zip(self.cold, warm, strict=True))


def lay_track(stack: ExitStack, folder: Path, model: Path, tokens_max: int) -> Track:
    """Start node and engines; they end with `stack`."""
    node = stack.enter_context(Node(folder / "node"))
    alone = EngineOptions(model=model, model_tokens_max=tokens_max)
    behind = msgspec.structs.replace(alone, kv_transfer=holdfast_kv_transfer(node.address))
    engines = [
        Engine("vllm-alone", alone, folder / "vllm-alone.log"),
        Engine("vllm-holdfast", behind, folder / "vllm-holdfast.log"),
    ]
    for engine in engines:
        stack.enter_context(engine.process)
    wait_all_ready(engines)
    return Track(engines[0], engines[1], node)


def race(
    track: Track, prompt: Sequence[int], repetitions: int, tell: Callable[[str], None]
) -> Times:
    """Ask both engines in turn, the order changing each time.

    The first round saves the context and is not counted. Raises HoldfastError if an answer differs
    from the cold one.
    """
    times = Times([], [], [], {"host": 0, "disk": 0})
    probe = list(reversed(prompt[:PROBE_TOKENS]))
    blocks = track.node.blocks_on_disk() + len(prompt) // BLOCK_TOKENS + len(probe) // BLOCK_TOKENS
    _cold(track, prompt)
    right = ask(track.behind, prompt, ANSWER_TOKENS).answer
    ask(track.behind, probe, 1)
    track.node.wait_on_disk(blocks)
    for turn in range(repetitions):
        tell(f"{len(prompt)} tokens, round {turn + 1} of {repetitions}")
        runs: list[tuple[list[float], Callable[[], Answer]]] = [
            (times.cold, lambda: _cold(track, prompt)),
            (times.host, lambda: _warm(track, prompt, "host", times)),
            (times.disk, lambda: _from_disk(track, prompt, probe, times)),
        ]
        for seconds, run in runs if turn % 2 == 0 else reversed(runs):
            seconds.append(_checked_s(run(), right))
    return times


def _cold(track: Track, prompt: Sequence[int]) -> Answer:
    track.alone.reset_prefix_cache()
    return ask(track.alone, prompt, ANSWER_TOKENS).answer


def _from_disk(track: Track, prompt: Sequence[int], probe: Sequence[int], times: Times) -> Answer:
    """Ask a node that was started anew, so that nothing is in its memory; afterwards it is."""
    blocks = track.node.blocks_on_disk()
    track.node.restart()
    track.node.wait_on_disk(blocks)
    wait_fetching(track.behind, probe)
    return _warm(track, prompt, "disk", times)


def _warm(track: Track, prompt: Sequence[int], tier: str, times: Times) -> Answer:
    track.behind.reset_prefix_cache()
    asked = ask(track.behind, prompt, ANSWER_TOKENS)
    wanted = len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS
    times.missed[tier] += asked.tokens.fetched != {tier: wanted}
    return asked.answer


def _checked_s(answer: Answer, right: Answer) -> float:
    if not answer.equals(right):
        raise HoldfastError(f"the output differs: {answer.tokens} instead of {right.tokens}")
    return answer.ttft_s
