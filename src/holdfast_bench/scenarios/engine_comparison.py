"""Compare what engines answer behind each other's contexts with what they compute alone.

For each prompt vLLM and transformers in turn compute and save the context, and the other one goes
on behind it. Its answer is compared with its own without a store. The two engines alone differ,
too, because their kernels do: that is the measure of what is no error.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import permutations, product
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
from holdfast_bench.scenarios.demo_scenario import DEMO_COVER_DEADLINE_MS
from holdfast_bench.scenarios.engines_demo_scenario import VllmPair

Ask: TypeAlias = Callable[[list[int], int], MeasuredCompletion]

ANSWER_TOKENS = 64
CONTEXT_TOKENS = 3 * BLOCK_TOKENS
TAIL_TOKENS = 50
SAVED_S = 60.0


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
    """How to ask an engine that has the store, and the same engine without it."""

    shared: Ask
    alone: Ask


def compare(
    folder: Path, model: Path, name: str, prompts: int, tell: Callable[[str], None]
) -> list[Comparison]:
    """Return the comparisons of vLLM and transformers, in both directions, in float32."""
    with ExitStack() as stack:
        node = stack.enter_context(NodeUnderTest(folder / "node", settings={"plan": "held"}))
        store = stack.enter_context(holdfast.open(node.address))
        options = VllmServerOptions(model, model_tokens_max=2048, dtype="float32")
        kv_transfer = holdfast_kv_transfer(node.address, DEMO_COVER_DEADLINE_MS, "portable")
        servers = start_servers(stack, folder, options, {"vllm": kv_transfer, "vllm-alone": {}})
        vllm = VllmPair(*servers)
        shared = TransformersEngine(model, "float32", store)
        alone = TransformersEngine(model, "float32")
        pairs = {
            "vllm": ComparedEngine(vllm.shared, vllm.alone),
            "transformers": ComparedEngine(shared.ask, alone.ask),
        }
        return compare_pairs(node, pairs, SHAPES[name].vocabulary, prompts, tell)


def compare_pairs(
    node: NodeUnderTest,
    pairs: Mapping[str, ComparedEngine],
    vocabulary: int,
    prompts: int,
    tell: Callable[[str], None],
) -> list[Comparison]:
    """Return the comparisons of engines that share a node, for each writer and reader.

    Raises HoldfastError if a context was not fetched whole.
    """
    found = [Comparison(*names, [], [], []) for names in permutations(pairs, 2)]
    for number, each in product(range(prompts), found):
        tell(f"prompt {number + 1} of {prompts}, {each.writer} to {each.reader}")
        prompt = _prompt(f"{number} {each.writer}", vocabulary)
        blocks = node.status()["blocks"] + CONTEXT_TOKENS // BLOCK_TOKENS
        pairs[each.writer].shared(prompt, 1)
        holds = partial(_holds, node, blocks)
        wait_until(node.process, holds, SAVED_S, "holding the context")
        answer = pairs[each.reader].shared(prompt, ANSWER_TOKENS)
        if answer.tokens.fetched_total != CONTEXT_TOKENS:
            raise HoldfastError(
                f"{each.reader} fetched {answer.tokens.fetched_total} tokens of "
                f"{CONTEXT_TOKENS} that {each.writer} wrote"
            )
        own = pairs[each.reader].alone(prompt, ANSWER_TOKENS).answer
        _add(each, answer.answer, own, pairs[each.writer].alone(prompt, ANSWER_TOKENS).answer)
    return found


def _holds(node: NodeUnderTest, blocks: int) -> bool:
    return int(node.status()["blocks"]) >= blocks


def _add(
    to: Comparison, answer: CompletionAnswer, own: CompletionAnswer, other: CompletionAnswer
) -> None:
    to.equal.append(answer.tokens == own.tokens)
    to.differences.append(largest_difference(answer, own))
    to.between.append(largest_difference(own, other))


def _prompt(seed: str, vocabulary: int) -> list[int]:
    words = random.Random(seed)  # noqa: S311  # prompts, no secrets
    return [words.randrange(300, vocabulary) for _ in range(CONTEXT_TOKENS + TAIL_TOKENS)]
