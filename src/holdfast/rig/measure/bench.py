"""A couple of engines, one alone and one behind a node: what `bench plan` and `calibrate` ask.

Contexts are put where they are to come from: in the node's memory, on its disk, on a disk that is
slowed on purpose, or at a target over loopback TCP. Texts are seen once, so nothing is held that
was not put there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import HoldfastError
from holdfast.limits import BLOCK_TOKENS, GIB, MIB
from holdfast.rig.ask import NO_HINT, ask
from holdfast.rig.model import SHAPES
from holdfast.rig.network import LoopbackNetwork
from holdfast.rig.node import Node
from holdfast.rig.pool import Pool
from holdfast.rig.process import wait_until
from holdfast.rig.server import (
    Engine,
    EngineOptions,
    Rest,
    holdfast_kv_transfer,
    wait_all_ready,
)

NODE = "node"
POOL = "pool"
TAIL_TOKENS = 16
SLOW = 0.5
"""How fast the slow disk is read, as a share of what would make fetching as quick as computing."""

BYPASS = {"bypass": True}
"""The hint with which an engine computes a context as if Holdfast were not there."""

TEACHING = (128, 256, 512, 1024, 2048)
MEETING = (256, 512, 1024, 2048)
CLEARED_S = 10.0
CONNECTED_S = 30.0
SAVED_S = (10.0, 20.0)
"""How long contexts may take to the disk after an engine was asked, and was asked again."""

SHORT_TOKENS = 512
SHORT_TIMES = 2
"""A short context takes tens of milliseconds, as a disturbance does: it gets more rounds."""

SHORTEST_TOKENS = 128
SHORTEST_TIMES = 5
"""Of so short a context ten pairs on a quiet machine gave ratios from 0.74 to 1.27: the median of
15 would say by chance whether it is above 1.05."""

LONG_TOKENS = 4096
LONG_ROUNDS = 4
"""A long context takes seconds, of which a disturbance is a smaller share."""

HOST_BYTES = 3 * GIB
DISK_BYTES = 8 * GIB


class Course(NamedTuple):
    """What is measured: a model's name and folder, tokens of the contexts, rounds of each."""

    model: str
    made: Path
    lengths: Sequence[int]
    cut_lengths: Sequence[int]
    rounds: int
    tell: Callable[[str], None]

    def rounds_at(self, tokens: int) -> int:
        """Return how many rounds a context of this length gets; an even number."""
        if tokens <= SHORT_TOKENS:
            times = SHORTEST_TIMES if tokens <= SHORTEST_TOKENS else SHORT_TIMES
            rounds = times * self.rounds
        else:
            rounds = self.rounds if tokens < LONG_TOKENS else min(self.rounds, LONG_ROUNDS)
        return rounds + rounds % 2


class Bench:
    """Two engines, one alone and one behind a node that is started anew as it is needed.

    `keeper`: who has what is saved on its disk, the node itself or the target it writes to.
    """

    def __init__(self, stack: ExitStack, folder: Path, course: Course) -> None:
        self._stack = stack
        self._folder = folder
        self._course = course
        self._chance = random.Random(folder.name)  # noqa: S311  # texts that nobody has seen
        self._slow_bytes_per_s = 0
        self._rest = Rest()
        self._pool: Pool | None = None
        self.node = self.keeper = self._start("disk", "best")
        stack.callback(self._stop)
        self.alone, self.behind = self._start_engines()
        self.probe = self.text(BLOCK_TOKENS)
        self.teach()

    def text(self, tokens: int) -> list[int]:
        """Return a prompt of so many tokens and a tail, seen by nobody before."""
        vocabulary = range(16, SHAPES[self._course.model].vocabulary - 16)
        return self._chance.choices(vocabulary, k=tokens + TAIL_TOKENS)

    def ttft_s(
        self, engine: Engine, prompt: Sequence[int], hint: Mapping[str, object] = NO_HINT
    ) -> tuple[float, int]:
        """Ask without the engine's own cache: seconds to the first token, tokens fetched."""
        if self._pool is not None:
            self._pool.renew_token()  # it lasts ten minutes, a round of long contexts may be longer
        self._rest.before(engine)
        engine.reset_prefix_cache()
        asked = ask(engine, prompt, 1, hint)
        return asked.answer.ttft_s, asked.tokens.fetched_total

    def rest(self) -> None:
        """Return when neither engine spins from the time before."""
        self._rest.everywhere()

    def save(self, prompts: Sequence[Sequence[int]]) -> None:
        """Compute these behind the node, until its disk has them, or its target's.

        An engine gives a block up that the node has no room for in time: it is asked once more.
        """
        blocks = self.keeper.blocks_on_disk() + sum(len(each) // BLOCK_TOKENS for each in prompts)
        for within_s in SAVED_S:
            for prompt in prompts:
                self.ttft_s(self.behind, prompt)
            with suppress(HoldfastError):
                self.keeper.wait_on_disk(blocks, within_s)
                return
        self.keeper.wait_on_disk(blocks)

    def renew(self) -> None:
        """Have another couple of engines; the first prompts are behind them."""
        for engine in (self.alone, self.behind):
            engine.process.stop()
        self.alone, self.behind = self._start_engines()
        for engine in (self.alone, self.behind):
            for tokens in MEETING:
                self.ttft_s(engine, self.text(tokens))

    def clear(self) -> None:
        """Have the node hold nothing but the probe: all that is asked would not fit its disk."""
        keeper = self.keeper
        for each in (self.node, keeper):
            each.drop_all()
        wait_until(keeper.process, lambda: not keeper.blocks_on_disk(), CLEARED_S, "empty")
        self.save([self.probe])

    def have(self, place: str, plan: str, prompts: Sequence[Sequence[int]]) -> None:
        """Have contexts at a place and no nearer, behind a node just started that plans so."""
        if place == POOL:
            self._have_in_pool(plan, prompts)
            return
        if place == "host" or self.keeper is not self.node:
            self.move("disk", plan)  # what is saved after it is in memory
        self.save(prompts)
        if place != "host":
            self.move(place, plan)

    def meet(self, place: str) -> None:
        """Let the node meet a place: its first fetch from a new medium is a guess."""
        prompts = [self.text(length) for length in MEETING]
        self.have(place, "best", prompts)
        for prompt in prompts:
            self.ttft_s(self.behind, prompt)

    def teach(self) -> None:
        """Let the node see how fast the engine computes, and how fast its disk is."""
        taught = [self.text(tokens) for tokens in (*TEACHING, *TEACHING)]
        for prompt in taught[: len(TEACHING)]:
            self.ttft_s(self.alone, prompt)
        self.save([self.probe, *taught])
        seconds, _ = self.ttft_s(self.alone, self.text(2048))
        self._slow_bytes_per_s = int(SLOW * self.node.token_bytes() * 2048 / seconds)

    def move(self, place: str, plan: str) -> None:
        """Start the node anew, warm from its disk and with nothing in memory."""
        self._stop()
        if place == POOL:
            self.node, self.keeper = self._start_in_pool(plan)
        else:
            self.node = self.keeper = self._start(place, plan)
        self.node.wait_recovered()

        def heard() -> bool:
            self.ttft_s(self.behind, self.probe)
            return bool(self.node.plans()["plans"])

        wait_until(self.behind.process, heard, CONNECTED_S, "asking its node")

    def _have_in_pool(self, plan: str, prompts: Sequence[Sequence[int]]) -> None:
        """Have contexts at the target alone.

        A node without a disk keeps nothing it has learnt: each learns the engine and the target.
        """
        self.move(POOL, plan)
        taught = [self.text(tokens) for tokens in MEETING]
        self.save([*taught, *prompts])
        self.node.drop_all()
        for prompt in taught:
            self.ttft_s(self.behind, prompt)

    def _start_engines(self) -> tuple[Engine, Engine]:
        tokens_max = max(self._course.lengths) + 1024
        engines = []
        for name, flag in (("alone", {}), ("behind", holdfast_kv_transfer(self.node.address))):
            options = EngineOptions(
                model=self._course.made, kv_transfer=flag, model_tokens_max=tokens_max
            )
            engines.append(Engine(name, options, self._folder / f"{name}.log"))
            self._stack.enter_context(engines[-1].process)
        wait_all_ready(engines)
        alone, behind = engines
        return alone, behind

    def _stop(self) -> None:
        self.node.process.stop()

    def _start(self, place: str, plan: str) -> Node:
        disk: dict[str, object] = {
            "kind": "disk",
            "path": str(self._folder / NODE / "disk"),
            "capacity": DISK_BYTES,
        }
        if place == "slow":
            disk["read_limit"] = max(MIB, self._slow_bytes_per_s)
        tiers = [{"kind": "host", "capacity": HOST_BYTES}, disk]
        return Node(self._folder / NODE, settings={"plan": plan, "tiers": tiers})

    def _start_in_pool(self, plan: str) -> tuple[Node, Node]:
        """Return a node without a disk, and the target that keeps what is saved."""
        if self._pool is None:
            self._pool = Pool(self._stack, self._folder, LoopbackNetwork())
            self._pool.start_targets(1, DISK_BYTES)
        [target] = self._pool.targets.values()
        return self._pool.start_host(NODE, plan), target
