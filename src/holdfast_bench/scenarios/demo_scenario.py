"""The steps of `holdfast demo`: one context is saved once and fetched after each kind of loss."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from holdfast.errors import ConfigError, HoldfastError
from holdfast.limits import BLOCK_TOKENS
from holdfast_bench.harness.completion import CompletionAnswer, MeasuredCompletion, ask, wait_asking
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.harness.server import (
    SPIN_S,
    VllmServer,
    VllmServerOptions,
    holdfast_kv_transfer,
    start_servers,
)
from holdfast_bench.scenarios import document
from holdfast_bench.scenarios.miss_causes import MissWatch

BATCH_TOKENS = 1024
"""Tokens of one prefill step."""

QUESTION = "\n\n# Question: what is the text above about, and which part matters most?\n# Answer:"
FOLLOW_UP = "\n\n# Question: and what should a reader look at next, and why?\n# Answer:"
QUESTION_TOKENS_MAX = 40
FOLLOW_UP_TOKENS_MAX = 48
ANSWER_TOKENS = 16

DEMO_COVER_DEADLINE_MS = 10_000
"""Longest wait for the node's answer, long enough that a busy or stalled machine does not make the
engine compute. A dead node is noticed at once by its closed socket."""


class Prompts(msgspec.Struct, frozen=True):
    """The parts of the prompts, as token ids.

    Outputs are compared bit for bit, and in bfloat16 the shape of a matrix product changes its
    last bits. So the tail after the last whole block must have the same shape if the context is
    computed and if it is fetched: the context ends where a prefill step ends, and question, answer
    and follow-up together fit into the block after it.
    """

    context: list[int]
    question: list[int]
    follow_up: list[int]

    @property
    def first(self) -> list[int]:
        """The context and the question about it."""
        return self.context + self.question

    @property
    def unrelated(self) -> list[int]:
        """A prompt as long as `first` without a common prefix: the context in reverse order."""
        return [*reversed(self.context), *self.question]

    @property
    def probe(self) -> list[int]:
        """The beginning of `unrelated`: one whole block and the length of the question."""
        return self.unrelated[: BLOCK_TOKENS + len(self.question)]

    def next(self, answer: CompletionAnswer) -> list[int]:
        """The conversation so far and another question."""
        return [*self.first, *answer.tokens, *self.follow_up]


class DemoSettings(msgspec.Struct, frozen=True):
    """The demo's folder, model and prompts, its nodes' planning mode, and the progress callback.

    `prompts`: one for `walk`. With a pool of `targets` targets the first half is for the first
    steps, the rest for the target that joins.
    """

    folder: Path
    model: Path
    dtype: str
    prompts: Sequence[Prompts]
    plan: str
    tell: Callable[[str], None]
    targets: int = 0


class DemoStep(msgspec.Struct, frozen=True):
    """One row of the demo: the requests of a step, one for each context, and what is expected.

    `equal`: every output is the reference output. `fetched`: tokens expected from Holdfast. `tier`:
    the tier expected, "" for any. `token_bytes`: KV state of one token. `reason`: the reason in the
    node's plan. `cause`: the recorded cause for the first context not fetched as expected.
    """

    name: str
    asked: Sequence[MeasuredCompletion]
    equal: bool
    fetched: int
    tier: str = ""
    token_bytes: float = 0.0
    reason: str = ""
    cause: str = ""

    @property
    def ok(self) -> bool:
        """Whether every output is right and the contexts came from the expected tier."""
        right_tier = not self.tier or set(self.tiers) <= {self.tier}
        return self.equal and self.fetched_tokens == self.fetched and right_tier

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token, the mean of the contexts."""
        return sum(each.answer.ttft_s for each in self.asked) / len(self.asked)

    @property
    def computed_tokens(self) -> int:
        """Tokens that the engine computed, summed over the contexts."""
        return sum(each.tokens.computed for each in self.asked)

    @property
    def fetched_tokens(self) -> int:
        """Tokens fetched from Holdfast, summed over the contexts."""
        return sum(each.tokens.fetched_total for each in self.asked)

    @property
    def tiers(self) -> list[str]:
        return sorted({tier for each in self.asked for tier in each.tokens.fetched})

    @property
    def gb_per_s(self) -> float | None:
        """KV state fetched per second of the time to the first token, over requests that hit."""
        hits = [each for each in self.asked if each.tokens.fetched]
        if not hits:
            return None
        return self.token_bytes * self.fetched_tokens / sum(e.answer.ttft_s for e in hits) / 1e9


def prompts_of(model: Path, source: Path | None, tokens: int) -> Prompts:
    """Tokenize the document and the questions. Raises ConfigError if they make no valid prompt."""
    if tokens < BATCH_TOKENS or tokens % BATCH_TOKENS:
        nearest = max(1, round(tokens / BATCH_TOKENS)) * BATCH_TOKENS
        raise ConfigError(
            f"--tokens: {tokens} is not a multiple of {BATCH_TOKENS}, so outputs could not be "
            f"compared bit for bit; take {nearest}"
        )
    tokenizer = document.tokenizer_of(model)
    return Prompts(
        context=document.read_tokens(tokenizer, source, tokens),
        question=document.tokens_of(tokenizer, QUESTION)[:QUESTION_TOKENS_MAX],
        follow_up=document.tokens_of(tokenizer, FOLLOW_UP)[:FOLLOW_UP_TOKENS_MAX],
    )


def walk(setting: DemoSettings) -> Generator[DemoStep]:
    """Run the demo and yield each step when it is done; all processes end with the iteration."""
    [prompts], tell = setting.prompts, setting.tell
    context_tokens = len(prompts.context)
    with ExitStack() as stack:
        tell("the node starts, then an engine")
        node = stack.enter_context(
            NodeUnderTest(setting.folder / "node", settings={"plan": setting.plan})
        )
        kv_transfer = holdfast_kv_transfer(node.address, DEMO_COVER_DEADLINE_MS)
        [engine] = start_engines(stack, setting, {"engine-a": kv_transfer})
        # An engine's first long prompt is slower than its later ones: do not measure it.
        _ask(engine, prompts.unrelated)

        tell("the engine reads the document for the first time")
        cold = _ask(engine, prompts.first)
        right, right_next = _references(engine, prompts)
        token_bytes = node.token_bytes()
        yield DemoStep("cold", [cold], cold.answer.equals(right), fetched=0)
        blocks = 2 * context_tokens // BLOCK_TOKENS
        node.wait_on_disk(blocks)

        def hit(
            name: str,
            engine: VllmServer,
            prompt: list[int] = prompts.first,
            right: CompletionAnswer = right,
            tier: str = "",
        ) -> DemoStep:
            """Send a prompt whose context must be fetched whole."""
            watch = MissWatch(node, engine.process.log)
            asked = _ask(engine, prompt)
            plan = watch.plan()
            reason = str(plan["reason"]) if plan else ""
            equal = asked.answer.equals(right)
            step = DemoStep(name, [asked], equal, context_tokens, tier, token_bytes, reason)
            return step if step.ok else msgspec.structs.replace(step, cause=watch.why())

        tell("the engine has forgotten it and is asked again")
        engine.reset_prefix_cache()
        yield hit("warm", engine)

        tell("the engine was stopped; it starts again, and a second one beside it")
        engine.process.stop()
        again = {"engine-a-again": kv_transfer, "engine-b": kv_transfer}
        engine, second = start_engines(stack, setting, again)
        for fresh in (engine, second):
            _ask(fresh, prompts.question)
        time.sleep(SPIN_S)
        yield hit("engine_restart", engine)

        tell("the node was killed with -9 and starts again")
        node.restart()
        node.wait_on_disk(blocks)
        for waiting in (engine, second):
            wait_asking(waiting, node.last_plan, prompts.probe)
        time.sleep(SPIN_S)
        yield hit("node_restart", engine, tier="disk")

        tell("the second engine is asked, while the first is alive")
        time.sleep(SPIN_S)
        yield hit("second_engine", second)

        tell("the second engine has forgotten it and is asked a follow-up")
        second.reset_prefix_cache()
        yield hit("follow_up", second, prompts.next(right), right_next)


def start_engines(
    stack: ExitStack, setting: DemoSettings, kv_transfers: Mapping[str, dict[str, object]]
) -> list[VllmServer]:
    """Start an engine for each name, with its `kv_transfer`; return them once all answer."""
    options = VllmServerOptions(
        model=setting.model,
        model_tokens_max=len(setting.prompts[0].context) + BATCH_TOKENS,
        batch_tokens_max=BATCH_TOKENS,
        dtype=setting.dtype,
    )
    return start_servers(stack, setting.folder, options, kv_transfers)


def _ask(engine: VllmServer, prompt: list[int]) -> MeasuredCompletion:
    return ask(engine, prompt, ANSWER_TOKENS)


def _references(engine: VllmServer, prompts: Prompts) -> list[CompletionAnswer]:
    """Return the right outputs of `first` and of `next`, from the engine's own cache.

    Raises HoldfastError if the context was evicted from that cache.
    """
    first = _ask(engine, prompts.first)
    follow_up = _ask(engine, prompts.next(first.answer))
    for asked in (first, follow_up):
        if asked.tokens.local != len(prompts.context):
            raise HoldfastError(
                f"no reference: the engine had {asked.tokens.local} tokens of its own instead of "
                f"{len(prompts.context)}; is its cache too small for this model?"
            )
    return [first.answer, follow_up.answer]
