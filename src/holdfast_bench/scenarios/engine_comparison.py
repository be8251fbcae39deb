"""Compare what engines answer behind each other's contexts with what they compute alone.

Each engine in turn computes and saves a batch of contexts, and every other one goes on behind them.
Its answers are compared with its own without a store. Two engines alone differ, too, because their
kernels do: that is the measure of what is no error.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import NamedTuple, TypeAlias

import holdfast
from holdfast.errors import HoldfastError
from holdfast.limits import BLOCK_TOKENS
from holdfast_bench.harness.completion import CompletionAnswer, MeasuredCompletion
from holdfast_bench.harness.model import SHAPES
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.harness.process import wait_until
from holdfast_bench.harness.server import (
    VllmServerOptions,
    holdfast_kv_transfer,
    start_servers,
)
from holdfast_bench.harness.transformers_engine import TransformersEngine, largest_difference
from holdfast_bench.peers import sglang_environment
from holdfast_bench.peers.sglang_server import (
    SglangServer,
    SglangServerOptions,
    holdfast_storage,
)
from holdfast_bench.scenarios.demo_scenario import DEMO_COVER_DEADLINE_MS
from holdfast_bench.scenarios.engines_demo_scenario import VllmPair

Ask: TypeAlias = Callable[[list[int], int], MeasuredCompletion]

ANSWER_TOKENS = 64
CONTEXT_TOKENS = 3 * BLOCK_TOKENS
TAIL_TOKENS = 50
SAVED_S = 60.0

BATCH_PROMPTS = 10
"""Prompts between two changes of the engine: vLLM's workers busy-wait for a while after each."""


class Comparison(NamedTuple):
    """One reader behind one writer: answers with the tokens of its own, and differences.

    `equal`: for each prompt, whether all tokens are equal. `differences`: for each prompt, the
    largest of log-probabilities, while the tokens agree. `between`: the same of the two engines,
    each alone.
    """

    writer: str
    reader: str
    equal: list[bool]
    differences: list[float]
    between: list[float]


class ComparedEngine(NamedTuple):
    """How to ask an engine that has the store, and the same engine without it.

    `forget` empties the engine's own cache of contexts.
    """

    shared: Ask
    alone: Ask
    forget: Callable[[], None]


def compare(
    folder: Path, model: Path, name: str, prompts: int, tell: Callable[[str], None]
) -> list[Comparison]:
    """Return the comparisons of vLLM, transformers and SGLang in float32, each with each.

    SGLang is left out if it is not installed.
    """
    with ExitStack() as stack:
        node = stack.enter_context(NodeUnderTest(folder / "node", settings={"plan": "held"}))
        store = stack.enter_context(holdfast.open(node.address))
        engines = {"vllm": _vllm(stack, folder, model, node)}
        alone = TransformersEngine(model, "float32")
        shared = TransformersEngine(model, "float32", store)
        engines["transformers"] = ComparedEngine(shared.ask, alone.ask, lambda: None)
        if sglang_environment.installed():
            tell("SGLang starts")
            engines["sglang"] = _sglang(stack, folder, model, node)
        return compare_engines(
            node, engines, list(_prompts(prompts, SHAPES[name].vocabulary)), tell
        )


def compare_engines(
    node: NodeUnderTest,
    engines: Mapping[str, ComparedEngine],
    prompts: Sequence[list[int]],
    tell: Callable[[str], None],
) -> list[Comparison]:
    """Return the comparisons of engines that share a node, for each writer and reader.

    Raises HoldfastError if a context was not fetched whole, or not computed by its writer.
    """
    found = {names: Comparison(*names, [], [], []) for names in permutations(engines, 2)}
    for first in range(0, len(prompts), BATCH_PROMPTS):
        batch = prompts[first : first + BATCH_PROMPTS]
        tell(f"prompts {first + 1} to {first + len(batch)} of {len(prompts)}")
        own = {
            name: [engine.alone(prompt, ANSWER_TOKENS).answer for prompt in batch]
            for name, engine in engines.items()
        }
        for writer in engines:
            _write(node, writer, engines[writer], batch)
            for reader in (name for name in engines if name != writer):
                answers = _answers(writer, reader, engines[reader], batch)
                _add(found[writer, reader], answers, own[reader], own[writer])
    return list(found.values())


def _write(
    node: NodeUnderTest, name: str, engine: ComparedEngine, prompts: Sequence[list[int]]
) -> None:
    """Let an engine compute the contexts of prompts; return once the node holds only these."""
    node.drop_all()
    engine.forget()
    for prompt in prompts:
        if engine.shared(prompt, 1).tokens.fetched_total:
            raise HoldfastError(f"{name} fetched a context that it was to write")
    blocks = len(prompts) * CONTEXT_TOKENS // BLOCK_TOKENS
    wait_until(node.process, partial(_holds, node, blocks), SAVED_S, "holding the contexts")


def _answers(
    writer: str, reader: str, engine: ComparedEngine, prompts: Sequence[list[int]]
) -> Iterator[CompletionAnswer]:
    """Yield an engine's answers behind the contexts of another one."""
    engine.forget()
    for prompt in prompts:
        asked = engine.shared(prompt, ANSWER_TOKENS)
        if asked.tokens.fetched_total != CONTEXT_TOKENS:
            raise HoldfastError(
                f"{reader} fetched {asked.tokens.fetched_total} tokens of "
                f"{CONTEXT_TOKENS} that {writer} wrote"
            )
        yield asked.answer


def _vllm(stack: ExitStack, folder: Path, model: Path, node: NodeUnderTest) -> ComparedEngine:
    options = VllmServerOptions(model, model_tokens_max=2048, dtype="float32")
    kv_transfer = holdfast_kv_transfer(node.address, DEMO_COVER_DEADLINE_MS, "portable")
    servers = start_servers(stack, folder, options, {"vllm": kv_transfer, "vllm-alone": {}})
    pair = VllmPair(*servers)
    return ComparedEngine(pair.shared, pair.alone, servers[0].reset_prefix_cache)


def _sglang(stack: ExitStack, folder: Path, model: Path, node: NodeUnderTest) -> ComparedEngine:
    storage = holdfast_storage(node.address, "portable")
    options = SglangServerOptions(model, "dynamic", storage, page_tokens=BLOCK_TOKENS)
    server = SglangServer("sglang", options, folder / "sglang" / "server.log")
    stack.enter_context(server.process)
    server.wait_ready()
    return ComparedEngine(server.ask, partial(server.ask, extra_key="alone"), server.forget)


def _holds(node: NodeUnderTest, blocks: int) -> bool:
    return int(node.status()["blocks"]) >= blocks


def _add(
    to: Comparison,
    answers: Iterator[CompletionAnswer],
    own: Sequence[CompletionAnswer],
    other: Sequence[CompletionAnswer],
) -> None:
    for answer, right, elsewhere in zip(answers, own, other, strict=True):
        to.equal.append(answer.tokens == right.tokens)
        to.differences.append(largest_difference(answer, right))
        to.between.append(largest_difference(right, elsewhere))


def _prompts(count: int, vocabulary: int) -> Iterator[list[int]]:
    for number in range(count):
        words = random.Random(number)  # noqa: S311  # prompts, no secrets
        yield [words.randrange(300, vocabulary) for _ in range(CONTEXT_TOKENS + TAIL_TOKENS)]
