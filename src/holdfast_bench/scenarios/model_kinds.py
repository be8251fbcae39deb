"""Time to first token of models with layers of one kind, computed and fetched, and bytes stored."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from holdfast.errors import HoldfastError
from holdfast_bench.harness.completion import MeasuredCompletion, ask, wait_fetching
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.harness.server import (
    EngineCooldown,
    VllmServer,
    VllmServerOptions,
    holdfast_kv_transfer,
    start_servers,
)

ANSWER_TOKENS = 4

_FETCHED = re.compile(r"^vllm:holdfast_fetched_bytes_total\{[^}]*\} (\S+)$", re.MULTILINE)


class KindTimes(msgspec.Struct, frozen=True):
    """What one prompt cost, with a model of one kind.

    `cold` and `warm`: seconds to the first token in each round, computed and fetched from host
    memory. `missed`: rounds in which not all whole blocks were fetched. `stored_bytes`: of all
    blocks of the prompt; `fetched_bytes`: of one fetch.
    """

    cold: list[float]
    warm: list[float]
    missed: int
    stored_bytes: int
    fetched_bytes: float


def measure(
    folder: Path,
    made: Path,
    prompt: Sequence[int],
    rounds: int,
    tell: Callable[[str], None],
) -> KindTimes:
    """Measure a prompt on an engine without a store and on one with it, in turns.

    Raises HoldfastError if an answer differs from the first one of its engine.
    """
    with ExitStack() as stack:
        node = stack.enter_context(NodeUnderTest(folder / "node"))
        options = VllmServerOptions(model=made, model_tokens_max=len(prompt) + 1024)
        transfers = {"alone": {}, "behind": holdfast_kv_transfer(node.address)}
        alone, behind = start_servers(stack, folder, options, transfers)
        rest = EngineCooldown()
        rest.wait_others(behind)
        ask(behind, prompt, ANSWER_TOKENS)
        wait_fetching(behind, prompt)
        stored = sum(each["blocks"] * each["raw_bytes"] for each in node.listing())
        before = _fetched_bytes(behind)
        right = {engine.name: _asked(rest, engine, prompt) for engine in (behind, alone)}
        fetched_bytes = _fetched_bytes(behind) - before
        whole = right[behind.name].tokens.fetched_total
        cold, warm, missed = list[float](), list[float](), 0
        for number in range(rounds):
            tell(f"round {number + 1} of {rounds} ...")
            for engine in (alone, behind) if number % 2 == 0 else (behind, alone):
                asked = _asked(rest, engine, prompt)
                if not asked.answer.equals(right[engine.name].answer):
                    raise HoldfastError(f"the output of {engine.name} differs from its first one")
                if engine is behind:
                    warm.append(asked.answer.ttft_s)
                    missed += asked.tokens.fetched != {"host": whole}
                else:
                    cold.append(asked.answer.ttft_s)
    return KindTimes(cold, warm, missed, stored, fetched_bytes)


def _asked(rest: EngineCooldown, engine: VllmServer, prompt: Sequence[int]) -> MeasuredCompletion:
    """Ask an engine whose own cache is empty, and alone on the machine."""
    rest.wait_others(engine)
    engine.reset_prefix_cache()
    return ask(engine, prompt, ANSWER_TOKENS)


def _fetched_bytes(engine: VllmServer) -> float:
    return sum(float(value) for value in _FETCHED.findall(engine.metrics()))
