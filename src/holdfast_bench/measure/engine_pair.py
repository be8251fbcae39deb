"""Two engines, one without Holdfast and one behind a node, for `bench plan` and `calibrate`.

The bench places contexts on the tier that they are to be fetched from: the node's memory, its disk,
a disk with a read limit, or a target over loopback TCP. Each context is a new random text, so that
the node holds only contexts that the bench has placed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import HoldfastError
from holdfast.limits import BLOCK_TOKENS, GIB, MIB
from holdfast_bench.harness.completion import NO_HINT, ask, complete
from holdfast_bench.harness.model import SHAPES
from holdfast_bench.harness.network import LoopbackNetwork
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.harness.pool import PoolUnderTest
from holdfast_bench.harness.process import wait_until
from holdfast_bench.harness.server import (
    EngineCooldown,
    VllmServer,
    VllmServerOptions,
    holdfast_kv_transfer,
    start_servers,
)

NODE = "node"
POOL = "pool"
TAIL_TOKENS = 16
SLOW = 0.5
"""Read speed of the slow disk, relative to the speed at which a fetch takes as long as prefill."""

BYPASS = {"bypass": True}
"""Hint that makes the engine compute a context without Holdfast."""

WARM_UP_TOKENS = (128, 256, 512, 1024, 2048)
PROBE_TOKENS = (256, 512, 1024, 2048)
DROP_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 30.0
SAVED_S = (10.0, 20.0)
"""Timeouts of writing contexts to disk, after the first and the second request for them."""

SHORT_TOKENS = 512
SHORT_TIMES = 2
"""Factor of rounds for short contexts: they take tens of milliseconds, as long as a disturbance."""

SHORTEST_TOKENS = 128
SHORTEST_TIMES = 5
"""Factor of rounds for the shortest contexts: on a quiet machine the ratios of ten pairs range from
0.74 to 1.27, so that 15 pairs cannot tell whether the median is above 1.05."""

LONG_TOKENS = 4096
LONG_ROUNDS = 4
"""Rounds of long contexts: they take seconds, so that disturbances matter less."""

HOST_BYTES = 3 * GIB
DISK_BYTES = 8 * GIB


class EnginePairSettings(NamedTuple):
    """Settings of a bench: the model's name and folder, context lengths in tokens, and rounds."""

    model: str
    made: Path
    lengths: Sequence[int]
    cut_lengths: Sequence[int]
    rounds: int
    tell: Callable[[str], None]

    def rounds_at(self, tokens: int) -> int:
        """Return the number of rounds for contexts of this length; it is even."""
        if tokens <= SHORT_TOKENS:
            times = SHORTEST_TIMES if tokens <= SHORTEST_TOKENS else SHORT_TIMES
            rounds = times * self.rounds
        else:
            rounds = self.rounds if tokens < LONG_TOKENS else min(self.rounds, LONG_ROUNDS)
        return rounds + rounds % 2


class EnginePair:
    """Two engines, `alone` without Holdfast and `behind` a node; methods restart node and engines.

    `disk_node` is the node whose disk receives saved blocks: the node itself, or its target.
    """

    def __init__(self, stack: ExitStack, folder: Path, settings: EnginePairSettings) -> None:
        self._stack = stack
        self._folder = folder
        self._settings = settings
        self._rng = random.Random(folder.name)  # noqa: S311  # prompts, not secrets
        self._slow_bytes_per_s = 0
        self._cooldown = EngineCooldown()
        self._pool: PoolUnderTest | None = None
        self.node = self.disk_node = self._start("disk", "best")
        stack.callback(self._stop)
        self.alone, self.behind = self._start_engines()
        self.probe = self.text(BLOCK_TOKENS)
        self.warm_up()

    def text(self, tokens: int) -> list[int]:
        """Return a new random prompt: a context of `tokens` tokens and a tail of `TAIL_TOKENS`."""
        vocabulary = range(16, SHAPES[self._settings.model].vocabulary - 16)
        return self._rng.choices(vocabulary, k=tokens + TAIL_TOKENS)

    def ttft_s(
        self, engine: VllmServer, prompt: Sequence[int], hint: Mapping[str, object] = NO_HINT
    ) -> tuple[float, int]:
        """Reset the engine's cache and send a prompt; return seconds to first token, and hits.

        Hits are the tokens fetched from Holdfast.
        """
        if self._pool is not None:
            self._pool.renew_token()  # valid for ten minutes; a round may take longer
        self._cooldown.wait_others(engine)
        engine.reset_prefix_cache()
        asked = ask(engine, prompt, 1, hint)
        return asked.answer.ttft_s, asked.tokens.fetched_total

    def burst_s(
        self,
        engine: VllmServer,
        prompts: Sequence[Sequence[int]],
        hint: Mapping[str, object] = NO_HINT,
    ) -> list[float]:
        """Reset the engine's cache, send prompts at once; return their seconds to first token."""
        if self._pool is not None:
            self._pool.renew_token()
        self._cooldown.wait_others(engine)
        engine.reset_prefix_cache()
        with ThreadPoolExecutor(len(prompts)) as clients:
            answers = clients.map(lambda prompt: complete(engine, prompt, 1, hint), prompts)
            return [answer.ttft_s for answer in answers]

    def wait_idle(self) -> None:
        self._cooldown.wait_all()

    def save(self, prompts: Sequence[Sequence[int]]) -> None:
        """Send prompts to the engine behind the node; return when `disk_node` holds their blocks.

        The engine drops a block if the node has no free slot in time; the prompts are then sent a
        second time. Raises HoldfastError if blocks are still missing.
        """
        added = sum(len(prompt) // BLOCK_TOKENS for prompt in prompts)
        blocks = self.disk_node.blocks_on_disk() + added
        for within_s in SAVED_S:
            for prompt in prompts:
                self.ttft_s(self.behind, prompt)
            with suppress(HoldfastError):
                self.disk_node.wait_on_disk(blocks, within_s)
                return
        self.disk_node.wait_on_disk(blocks)

    def restart_engines(self) -> None:
        """Replace both engines, and send them the first few prompts as a warm-up."""
        for engine in (self.alone, self.behind):
            engine.process.stop()
        self.alone, self.behind = self._start_engines()
        for engine in (self.alone, self.behind):
            for tokens in PROBE_TOKENS:
                self.ttft_s(engine, self.text(tokens))

    def drop_contexts(self) -> None:
        """Drop all contexts but the probe; the contexts of all rounds exceed the disk."""
        disk_node = self.disk_node
        for each in (self.node, disk_node):
            each.drop_all()
        wait_until(
            disk_node.process, lambda: not disk_node.blocks_on_disk(), DROP_TIMEOUT_S, "empty"
        )
        self.save([self.probe])

    def place_contexts(self, place: str, plan: str, prompts: Sequence[Sequence[int]]) -> None:
        """Start the node with this planner, and place contexts on the tier `place` and below."""
        if place == POOL:
            # A node without a disk does not save its estimates, so after each start it measures
            # the engine and the target again, with prompts of their own.
            self.restart_node(POOL, plan)
            probes = [self.text(tokens) for tokens in PROBE_TOKENS]
            self.save([*probes, *prompts])
            self.node.drop_all()  # the target keeps its copies
            for prompt in probes:
                self.ttft_s(self.behind, prompt)
            return
        if place == "host" or self.disk_node is not self.node:
            self.restart_node("disk", plan)  # blocks saved after a restart stay in memory
        self.save(prompts)
        if place != "host":
            self.restart_node(place, plan)

    def probe_tier(self, place: str) -> None:
        """Let the node measure a tier; until then its estimates of the tier are defaults."""
        prompts = [self.text(length) for length in PROBE_TOKENS]
        self.place_contexts(place, "best", prompts)
        for prompt in prompts:
            self.ttft_s(self.behind, prompt)

    def warm_up(self) -> None:
        """Let the node measure the engine's prefill and its disk; set the slow disk's speed."""
        prompts = [self.text(tokens) for tokens in (*WARM_UP_TOKENS, *WARM_UP_TOKENS)]
        for prompt in prompts[: len(WARM_UP_TOKENS)]:
            self.ttft_s(self.alone, prompt)
        self.save([self.probe, *prompts])
        seconds, _ = self.ttft_s(self.alone, self.text(2048))
        self._slow_bytes_per_s = int(SLOW * self.node.token_bytes() * 2048 / seconds)

    def restart_node(self, place: str, plan: str) -> None:
        """Restart the node with this tier and planner: it keeps only the blocks on disk."""
        self._stop()
        if place == POOL:
            if self._pool is None:
                self._pool = PoolUnderTest(self._stack, self._folder, LoopbackNetwork())
                self._pool.start_targets(1, DISK_BYTES)
            [self.disk_node] = self._pool.targets.values()
            self.node = self._pool.start_host(NODE, plan)
        else:
            self.node = self.disk_node = self._start(place, plan)
        self.node.wait_recovered()

        def node_has_planned() -> bool:
            self.ttft_s(self.behind, self.probe)
            return bool(self.node.plans()["plans"])

        wait_until(self.behind.process, node_has_planned, CONNECT_TIMEOUT_S, "asking its node")

    def _start_engines(self) -> tuple[VllmServer, VllmServer]:
        options = VllmServerOptions(
            model=self._settings.made, model_tokens_max=max(self._settings.lengths) + 1024
        )
        flags = {"alone": {}, "behind": holdfast_kv_transfer(self.node.address)}
        alone, behind = start_servers(self._stack, self._folder, options, flags)
        return alone, behind

    def _stop(self) -> None:
        self.node.process.stop()

    def _start(self, place: str, plan: str) -> NodeUnderTest:
        disk: dict[str, object] = {
            "kind": "disk",
            "path": str(self._folder / NODE / "disk"),
            "capacity": DISK_BYTES,
        }
        if place == "slow":
            disk["read_limit"] = max(MIB, self._slow_bytes_per_s)
        tiers = [{"kind": "host", "capacity": HOST_BYTES}, disk]
        return NodeUnderTest(self._folder / NODE, settings={"plan": plan, "tiers": tiers})
