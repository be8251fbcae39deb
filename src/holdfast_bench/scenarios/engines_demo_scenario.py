"""The steps of `holdfast demo --engines`: one conversation goes from engine to engine.

vLLM reads a context, and Hugging Face transformers answers a question about it from the store.
Then vLLM, whose own cache is empty, goes on behind what transformers wrote, and SGLang, if it is
installed, behind both. Each output is compared with what the same engine computes without a store.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec

import holdfast
from holdfast.limits import BLOCK_TOKENS
from holdfast_bench.harness.completion import MeasuredCompletion, ask
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.harness.server import EngineCooldown, VllmServer, holdfast_kv_transfer
from holdfast_bench.harness.transformers_engine import TransformersEngine, largest_difference
from holdfast_bench.peers import sglang_environment
from holdfast_bench.peers.sglang_server import (
    SglangServer,
    SglangServerOptions,
    holdfast_storage,
)
from holdfast_bench.scenarios.demo_scenario import (
    ANSWER_TOKENS,
    DEMO_COVER_DEADLINE_MS,
    DemoSettings,
    DemoStep,
    start_engines,
)

ONLY_TRANSFORMERS = (
    "vLLM is not installed here, so transformers alone reads and continues the context; "
    "`make setup` brings vLLM's CPU build"
)


class EnginesStep(DemoStep, frozen=True):
    """A step of one engine, compared with what it computes without a store.

    `equal`: the tokens are the same. `difference`: largest of log-probabilities.
    """

    difference: float = 0.0


def walk(setting: DemoSettings) -> Generator[DemoStep]:
    """Run the demo and yield each step when it is done; all processes end with the iteration."""
    [prompts], tell = setting.prompts, setting.tell
    context_tokens = len(prompts.context)
    with ExitStack() as stack:
        tell("the node starts, and transformers loads the model")
        node = stack.enter_context(
            NodeUnderTest(setting.folder / "node", settings={"plan": setting.plan})
        )
        store = stack.enter_context(holdfast.open(node.address))
        transformers = TransformersEngine(setting.model, setting.dtype, store)
        alone = TransformersEngine(setting.model, setting.dtype)
        for engine in (transformers, alone):
            engine.ask(prompts.probe, 1)  # the first answer of a process is slower
        if find_spec("vllm") is None:
            tell(ONLY_TRANSFORMERS)
            yield _step("transformers_reads", transformers.ask, alone.ask, prompts.first, 0)
            fresh = TransformersEngine(setting.model, setting.dtype, store)
            fresh.ask(prompts.probe, 1)
            yield _step("transformers", fresh.ask, alone.ask, prompts.first, context_tokens)
            yield from _sglang(stack, setting, node, prompts.first)
            return
        tell("vLLM starts, with Holdfast and without")
        kv_transfer = holdfast_kv_transfer(node.address, DEMO_COVER_DEADLINE_MS, "portable")
        vllm, plain = start_engines(stack, setting, {"vllm": kv_transfer, "vllm-alone": {}})
        asks = VllmPair(vllm, plain)
        for server in (asks.shared, asks.alone):
            server(prompts.unrelated, 1)

        tell("vLLM reads the document for the first time")
        yield _step("vllm_reads", asks.shared, asks.alone, prompts.first, 0)
        node.wait_on_disk(2 * context_tokens // BLOCK_TOKENS)

        tell("transformers is asked about it")
        asks.cool()
        # Long enough that transformers saves a block of its own behind the context.
        step = _step(
            "transformers", transformers.ask, alone.ask, prompts.first, context_tokens, BLOCK_TOKENS
        )
        yield step

        tell("vLLM has forgotten the document, and is asked to go on behind that answer")
        vllm.reset_prefix_cache()
        [answered] = step.asked
        turn = [*prompts.first, *answered.answer.tokens, *prompts.follow_up]
        written = (len(prompts.first) + BLOCK_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        yield _step("vllm", asks.shared, asks.alone, turn, written)
        asks.cool()
        yield from _sglang(stack, setting, node, turn)


def _sglang(
    stack: ExitStack, setting: DemoSettings, node: NodeUnderTest, prompt: list[int]
) -> Iterator[EnginesStep]:
    """Yield the step of SGLang, if it is installed: it is asked what another engine was asked."""
    if not sglang_environment.installed():
        return
    setting.tell("SGLang starts, which has never seen the document")
    options = SglangServerOptions(
        setting.model,
        "dynamic",
        holdfast_storage(node.address, "portable"),
        dtype=setting.dtype,
        tokens_max=2 * (len(prompt) + BLOCK_TOKENS) // BLOCK_TOKENS * BLOCK_TOKENS,
        page_tokens=BLOCK_TOKENS,
    )
    server = SglangServer("sglang", options, setting.folder / "sglang" / "server.log")
    stack.enter_context(server.process)
    server.wait_ready()
    server.ask(prompt[: BLOCK_TOKENS // 2], 1)  # the first answer of a process is slower
    whole = (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    yield _step("sglang", server.ask, partial(server.ask, extra_key="alone"), prompt, whole)


class VllmPair:
    """Two vLLM servers, with Holdfast and without, of which one at a time is asked."""

    def __init__(self, shared: VllmServer, alone: VllmServer) -> None:
        self._shared, self._alone = shared, alone
        self._cooldown = EngineCooldown()

    def shared(self, prompt: list[int], max_tokens: int) -> MeasuredCompletion:
        """Ask the server with Holdfast."""
        self._cooldown.wait_others(self._shared)
        return ask(self._shared, prompt, max_tokens)

    def alone(self, prompt: list[int], max_tokens: int) -> MeasuredCompletion:
        """Ask the server without."""
        self._cooldown.wait_others(self._alone)
        return ask(self._alone, prompt, max_tokens)

    def cool(self) -> None:
        """Return when neither busy-waits any more."""
        self._cooldown.wait_all()


def _step(
    name: str,
    shared: Callable[[list[int], int], MeasuredCompletion],
    alone: Callable[[list[int], int], MeasuredCompletion],
    prompt: list[int],
    fetched: int,
    answer_tokens: int = ANSWER_TOKENS,
) -> EnginesStep:
    """Ask an engine, and the same engine without a store."""
    asked, own = shared(prompt, answer_tokens), alone(prompt, answer_tokens)
    equal = asked.answer.tokens == own.answer.tokens
    difference = largest_difference(asked.answer, own.answer)
    return EnginesStep(name, [asked], equal, fetched, difference=difference)
