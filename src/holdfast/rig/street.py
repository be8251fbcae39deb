"""The demo's steps: one context, saved once, comes back through every door."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path

import msgspec

from holdfast.errors import ConfigError, HoldfastError
from holdfast.limits import BLOCK_TOKENS
from holdfast.rig import document
from holdfast.rig.ask import Answer, Asked, ask, wait_asking
from holdfast.rig.node import Node
from holdfast.rig.server import (
    SPIN_S,
    Engine,
    EngineOptions,
    holdfast_kv_transfer,
    wait_all_ready,
)

BATCH_TOKENS = 1024
"""Prefill goes in steps of so many tokens."""

QUESTION = "\n\n# Question: what is the text above about, and which part matters most?\n# Answer:"
FOLLOW_UP = "\n\n# Question: and what should a reader look at next, and why?\n# Answer:"
QUESTION_TOKENS_MAX = 40
FOLLOW_UP_TOKENS_MAX = 48
ANSWER_TOKENS = 16


class Prompts(msgspec.Struct, frozen=True):
    """What is asked, in tokens.

    Outputs are compared bit for bit, and in bfloat16 the shape of a matrix product changes its
    last bits. So the tail behind the last whole block must have one shape whether the context is
    computed or fetched: the context ends where a prefill step ends, and question, answer and
    follow-up together stay within the block after it.
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
        """As long as `first`, and without a common prefix: the same text, backwards."""
        return [*reversed(self.context), *self.question]

    @property
    def probe(self) -> list[int]:
        """The beginning of `unrelated`: one whole block and a bit."""
        return self.unrelated[: BLOCK_TOKENS + len(self.question)]

    def next(self, answer: Answer) -> list[int]:
        """The conversation so far and another question."""
        return [*self.first, *answer.tokens, *self.follow_up]


class Setting(msgspec.Struct, frozen=True):
    """Where the demo runs, on what, how its node plans, and whom it tells what it is doing."""

    folder: Path
    model: Path
    dtype: str
    prompts: Prompts
    plan: str
    tell: Callable[[str], None]


class Step(msgspec.Struct, frozen=True):
    """One row of the demo: what was asked, what came of it, what had to.

    `fetched` is how many tokens had to come from Holdfast, `tier` from which tier (empty: any).
    `token_bytes` is the size of one token's KV state, `reason` that of the node's last plan.
    """

    name: str
    asked: Asked
    equal: bool
    fetched: int
    tier: str = ""
    token_bytes: float = 0.0
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether the output was right and the context came from where it had to."""
        tokens = self.asked.tokens
        right_tier = not self.tier or set(tokens.fetched) <= {self.tier}
        return self.equal and tokens.fetched_total == self.fetched and right_tier

    @property
    def gb_per_s(self) -> float | None:
        """KV state fetched over the whole time to the first token; None where none was."""
        nbytes = self.asked.tokens.fetched_total * self.token_bytes
        return nbytes / self.asked.answer.ttft_s / 1e9 if nbytes else None


class _References(msgspec.Struct, frozen=True):
    """The right outputs, from KV state that the engine computed itself and never gave away."""

    first: Answer
    next: Answer


def prompts_of(model: Path, source: Path | None, tokens: int) -> Prompts:
    """Tokenize the document and the questions. Raises ConfigError for what cannot be asked."""
    if tokens < BATCH_TOKENS or tokens % BATCH_TOKENS:
        nearest = max(1, round(tokens / BATCH_TOKENS)) * BATCH_TOKENS
        raise ConfigError(
            f"--tokens: {tokens} is not a multiple of {BATCH_TOKENS}, so that outputs could not be "
            f"compared bit for bit; take {nearest}"
        )
    tokenizer = document.tokenizer_of(model)
    return Prompts(
        context=document.read_tokens(tokenizer, source, tokens),
        question=document.tokens_of(tokenizer, QUESTION)[:QUESTION_TOKENS_MAX],
        follow_up=document.tokens_of(tokenizer, FOLLOW_UP)[:FOLLOW_UP_TOKENS_MAX],
    )


def walk(setting: Setting) -> Generator[Step]:
    """Yield every step of the demo as it is done; all processes end with the iteration."""
    prompts, tell = setting.prompts, setting.tell
    with ExitStack() as stack:
        tell("the node starts, then an engine")
        node = stack.enter_context(Node(setting.folder / "node", settings={"plan": setting.plan}))
        engine = _start(stack, setting, node, "engine-a")
        wait_all_ready([engine])
        # An engine's first long prompt is slower than its later ones; nothing is measured on it.
        _ask(engine, prompts.unrelated)

        tell("the engine reads the document for the first time")
        cold = _ask(engine, prompts.first)
        right = _references(engine, prompts)
        expect = _Expect(len(prompts.context), node.token_bytes(), node)
        yield Step("cold", cold, cold.answer.equals(right.first), fetched=0)
        blocks = 2 * len(prompts.context) // BLOCK_TOKENS
        node.wait_on_disk(blocks)

        tell("the engine has forgotten it and is asked again")
        engine.reset_prefix_cache()
        yield expect.hit("warm", _ask(engine, prompts.first), right.first)

        tell("the engine was stopped; it starts again, and a second one beside it")
        engine.process.stop()
        engine = _start(stack, setting, node, "engine-a-again")
        second = _start(stack, setting, node, "engine-b")
        wait_all_ready([engine, second])
        for fresh in (engine, second):
            _ask(fresh, prompts.question)
        yield expect.hit("engine_restart", _ask_rested(engine, prompts.first), right.first)

        tell("the node was killed with -9 and starts again")
        node.restart()
        node.wait_on_disk(blocks)
        for waiting in (engine, second):
            wait_asking(waiting, node.last_plan, prompts.probe)
        yield expect.hit(
            "node_restart", _ask_rested(engine, prompts.first), right.first, tier="disk"
        )

        tell("the second engine is asked, while the first is alive")
        yield expect.hit("second_engine", _ask_rested(second, prompts.first), right.first)

        tell("the second engine has forgotten it and is asked a follow-up")
        second.reset_prefix_cache()
        yield expect.hit("follow_up", _ask(second, prompts.next(right.first)), right.next)


class _Expect(msgspec.Struct, frozen=True):
    """What every hit has in common: tokens that must be fetched, bytes of a token, the node."""

    context: int
    token_bytes: float
    node: Node

    def hit(self, name: str, asked: Asked, right: Answer, tier: str = "") -> Step:
        """Make the step of a request whose whole context had to come from Holdfast."""
        equal = asked.answer.equals(right)
        reason = self.node.last_reason()
        return Step(name, asked, equal, self.context, tier, self.token_bytes, reason)


def _start(stack: ExitStack, setting: Setting, node: Node, name: str) -> Engine:
    options = EngineOptions(
        model=setting.model,
        kv_transfer=holdfast_kv_transfer(node.address),
        model_tokens_max=len(setting.prompts.context) + BATCH_TOKENS,
        batch_tokens_max=BATCH_TOKENS,
        dtype=setting.dtype,
    )
    engine = Engine(name, options, setting.folder / f"{name}.log")
    stack.enter_context(engine.process)
    return engine


def _ask(engine: Engine, prompt: list[int]) -> Asked:
    return ask(engine, prompt, ANSWER_TOKENS)


def _ask_rested(engine: Engine, prompt: list[int]) -> Asked:
    """Ask when the other engine, asked last, has come to rest."""
    time.sleep(SPIN_S)
    return _ask(engine, prompt)


def _references(engine: Engine, prompts: Prompts) -> _References:
    """Ask again while the engine still has what it computed; raise if it does not."""
    first = _ask(engine, prompts.first)
    follow_up = _ask(engine, prompts.next(first.answer))
    for asked in (first, follow_up):
        if asked.tokens.local != len(prompts.context):
            raise HoldfastError(
                f"no reference: the engine had {asked.tokens.local} tokens of its own instead of "
                f"{len(prompts.context)}; is its cache too small for this model?"
            )
    return _References(first.answer, follow_up.answer)
