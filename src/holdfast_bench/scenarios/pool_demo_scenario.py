"""The steps of `holdfast demo --pool`: contexts saved on one host are fetched on another.

One context of the demo is one segment, which is placed on one target. So the demo uses several
contexts, and each step requests all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from holdfast.errors import ConfigError, HoldfastError
from holdfast.limits import BLOCK_TOKENS
from holdfast_bench.harness.completion import CompletionAnswer, MeasuredCompletion, ask
from holdfast_bench.harness.network import open_network
from holdfast_bench.harness.pool import PoolUnderTest
from holdfast_bench.harness.server import holdfast_kv_transfer
from holdfast_bench.scenarios import document
from holdfast_bench.scenarios.demo_scenario import (
    ANSWER_TOKENS,
    DEMO_COVER_DEADLINE_MS,
    DemoSettings,
    DemoStep,
    Prompts,
    prompts_of,
    start_engines,
)
from holdfast_bench.scenarios.miss_causes import MissWatch

CONTEXTS = 6
"""Contexts that a step requests."""

TARGETS_MIN, TARGETS_MAX = 2, 16


class PoolStep(DemoStep, frozen=True):
    """One row of the demo of a pool; `fetched`: tokens expected from the pool, at least.

    `spread`: contexts of this step held by each living target.
    """

    spread: dict[str, int] = msgspec.field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every output is right and all contexts that the pool still had came from it."""
        enough = self.fetched_tokens >= self.fetched if self.fetched else not self.fetched_tokens
        return self.equal and enough and set(self.tiers) <= {"pool"}


def prompts_of_pool(model: Path, source: Path | None, tokens: int) -> list[Prompts]:
    """Cut a document into contexts of `tokens` tokens, none of them a prefix of another.

    The first half are the parts of the text, the second half the same parts in reverse token order.
    Raises ConfigError.
    """
    first = prompts_of(model, source, tokens)
    text = document.read_tokens(document.tokenizer_of(model), source, 2 * CONTEXTS * tokens)
    parts = [text[start : start + tokens] for start in range(0, len(text), tokens)]
    return [
        msgspec.structs.replace(first, context=context)
        for context in (*parts, *(part[::-1] for part in parts))
    ]


def check_targets(targets: int) -> None:
    """Raise ConfigError if the demo does not support this number of targets."""
    if not TARGETS_MIN <= targets <= TARGETS_MAX:
        raise ConfigError(
            f"--pool: {targets} targets, not from {TARGETS_MIN} to {TARGETS_MAX}; choose another"
        )


def walk(setting: DemoSettings) -> Generator[PoolStep]:
    """Run the demo and yield each step when it is done; all processes end with the iteration."""
    with ExitStack() as stack:
        network = stack.enter_context(open_network(setting.folder / "network.log"))
        setting.tell(f"{setting.targets} targets and two hosts start, on {network.kind}")
        pool = PoolUnderTest(stack, setting.folder, network)
        pool.start_targets(setting.targets)
        yield from _PoolDemo(stack, setting, pool).walk()


class _PoolDemo:
    """The pool, its two engines, and the outputs and owners of the contexts computed so far."""

    def __init__(self, stack: ExitStack, setting: DemoSettings, pool: PoolUnderTest) -> None:
        self._tell, self._pool = setting.tell, pool
        self._first = list(setting.prompts[:CONTEXTS])
        self._further = list(setting.prompts[CONTEXTS:])
        self._tokens = len(self._first[0].context)
        self._right: list[CompletionAnswer] = []
        self._owners: list[str] = []
        nodes = {name: pool.start_host(name, setting.plan) for name in ("host-a", "host-b")}
        kv_transfers = {
            f"{name}-engine": holdfast_kv_transfer(node.address, DEMO_COVER_DEADLINE_MS)
            for name, node in nodes.items()
        }
        self._a, self._b = start_engines(stack, setting, kv_transfers)

    def walk(self) -> Generator[PoolStep]:
        self._warm_up()
        self._tell("host A reads the contexts for the first time")
        cold = [self._read_on_a(prompts) for prompts in self._first]
        equal = all(map(_equals, cold, self._right))
        yield PoolStep("prefill_on_a", cold, equal, fetched=0, spread=self._spread(0))

        self._tell("host B is asked about them")
        yield self._served("served_on_b", self._first, 0)

        held = Counter(self._owners)
        lost = min(held, key=lambda name: held[name])
        self._tell(f"{lost} was killed with -9; host B has forgotten everything and is asked again")
        self._pool.hosts["host-b"].drop_all()
        self._b.reset_prefix_cache()
        self._pool.targets.pop(lost).kill()  # it stays in the members file
        yield self._served("target_killed", self._first, 0)

        self._tell(f"another target takes the place of {lost}")
        joined = self._pool.replace_target(lost)
        self._tell(f"{joined} has joined; host A reads new contexts")
        fresh = self._read_until_on(joined)
        self._tell("host B is asked about the new contexts")
        yield self._served("target_joined", fresh, CONTEXTS)

    def _warm_up(self) -> None:
        """Send one long prompt to each engine: the first is slower than later ones."""
        self._tell("both engines warm up")
        for shift, engine in enumerate((self._a, self._b), 1):
            context, question = self._first[0].context, self._first[0].question
            ask(engine, [*context[shift:], *context[:shift], *question], ANSWER_TOKENS)
        self._pool.wait_holding(2 * self._tokens // BLOCK_TOKENS)

    def _read_on_a(self, prompts: Prompts) -> MeasuredCompletion:
        """Let A compute a context; record the right output, and the target that now holds it."""
        before = self._pool.blocks()
        asked = ask(self._a, prompts.first, ANSWER_TOKENS)
        again = ask(self._a, prompts.first, ANSWER_TOKENS)
        if asked.tokens.fetched_total or again.tokens.local != self._tokens:
            raise HoldfastError(
                f"no reference: of {self._tokens} tokens the engine fetched "
                f"{asked.tokens.fetched_total} instead of none, and then had "
                f"{again.tokens.local} itself instead of all"
            )
        self._pool.wait_holding(sum(before.values()) + self._tokens // BLOCK_TOKENS)
        after = self._pool.blocks()
        self._owners.append(max(after, key=lambda name: after[name] - before[name]))
        self._right.append(again.answer)
        return asked

    def _served(self, name: str, prompts: Sequence[Prompts], start: int) -> PoolStep:
        """Request contexts from B; the first is number `start` of those that A computed."""
        asked, causes = [], []
        for number, each in enumerate(prompts, start):
            if self._pool.is_whole:
                self._pool.wait_agreed()
            watch = MissWatch(self._pool.hosts["host-b"], self._b.process.log)
            asked.append(ask(self._b, each.first, ANSWER_TOKENS))
            owner = self._owners[number]
            if owner in self._pool.targets and set(asked[-1].tokens.fetched) != {"pool"}:
                causes.append(watch.why())
        stop = start + len(prompts)
        kept = sum(owner in self._pool.targets for owner in self._owners[start:stop])
        return PoolStep(
            name=name,
            asked=asked,
            equal=all(map(_equals, asked, self._right[start:stop])),
            fetched=kept * self._tokens,
            spread=self._spread(start),
            token_bytes=self._pool.hosts["host-a"].token_bytes(),
            cause=next(iter(causes), ""),
        )

    def _spread(self, start: int) -> dict[str, int]:
        counted = Counter(self._owners[start:])
        return {name: counted[name] for name in self._pool.targets}

    def _read_until_on(self, joined: str) -> list[Prompts]:
        """Let A compute `CONTEXTS` new contexts, and more until each target holds one of them."""
        start = len(self._owners)
        fresh: list[Prompts] = []
        for prompts in self._further:
            owners = set(self._owners[start:])
            if len(fresh) >= CONTEXTS and owners == self._pool.targets.keys():
                break
            self._pool.wait_agreed()
            self._read_on_a(prompts)
            fresh.append(prompts)
        if joined not in self._owners:
            raise HoldfastError(f"{joined} received none of {len(fresh)} new contexts")
        return fresh


def _equals(asked: MeasuredCompletion, right: CompletionAnswer) -> bool:
    return asked.answer.equals(right)
