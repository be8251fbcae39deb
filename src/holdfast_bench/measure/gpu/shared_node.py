"""Engines of two domains that take a node's memory from each other, and engines and nodes killed.

The node has room for one and a half contexts, so each save of one domain has memory recalled that
the other's engine has locked. Every block that is fetched is compared with the pages it was saved
from. This file, run as a program, is the engine that is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing

import torch

from holdfast.blocks.key import Chain
from holdfast.errors import HoldfastError, NodeGoneError
from holdfast.limits import KIB, MIB
from holdfast.report import Row, at_most, not_measured
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.harness.process import start_owned
from holdfast_bench.measure.gpu.accelerator import HostAccelerator, Tensor, accelerator
from holdfast_bench.measure.gpu.paged_engine import PagedEngine
from holdfast_bench.measure.gpu.setting import Setting
from holdfast_bench.measure.gpu.shapes import BLOCK_TOKENS, LLAMA_70B_RANK, PageShape

PROGRAM = "holdfast_bench.measure.gpu.shared_node"
DOMAINS = ("first", "second")
BLOCKS, TOY_BLOCKS = 64, 112
TOY_SHARED = PageShape("toy", 4, 6 * KIB, 32)
"""A context of 11 MiB in many runs of slots, because a node has at least 16 MiB."""

ROOM = 1.5
"""Room of the node, in contexts."""

ALL_BLOCKS, TOY_ALL_BLOCKS = 10_000, 300
"""Blocks that are fetched and compared, if the time allows."""

KILL_S = 15.0
"""Time that is left for what follows the comparison."""

BACK_GOAL_S = 2.0
"""Time within which the memory of a killed engine can be used by others."""

BACK_S = 10.0
"""Longest wait for it."""

SAVES_S = 0.2
"""Time for which an engine saves or loads before it, or its node, is killed."""

FIRST_SEED, SECOND_SEED = 1_000_000, 2_000_000
"""Contexts of the engine that stays, apart from those compared before."""

SLOT_MARGIN = 8 * KIB
"""More than a slot has beside its block."""


class DomainEngine:
    """An engine of one domain, with pages whose content a seed determines."""

    def __init__(self, node: str, gpu: HostAccelerator, shape: PageShape, domain: str) -> None:
        blocks = TOY_BLOCKS if shape is TOY_SHARED else BLOCKS
        self._gpu, self.blocks = gpu, blocks
        self._pages = shape.new_tensors(blocks, gpu.kind)
        self.engine = PagedEngine(node, gpu, shape, self._pages, domain)
        self._per_block = shape.pages_per_block

    def save(self, seed: int) -> tuple[int, list[Tensor]]:
        """Save new pages as the context `seed`; return its new blocks, and copies of the pages."""
        before = [pages.random_(0, 256).clone() for pages in self._pages]
        return self.engine.save(self._chain(seed)), before

    def load(self, seed: int, before: Sequence[Tensor]) -> int:
        """Fetch what is held of a context; return its blocks.

        Raises HoldfastError if a page of them differs from `before`, or another page changed.
        """
        for pages in self._pages:
            pages.zero_()
        found = len(self.engine.fetch_held(self._chain(seed).keys).places)
        self._gpu.synchronise()
        end = found * self._per_block
        for pages, was in zip(self._pages, before, strict=True):
            if not torch.equal(pages[:end], was[:end]) or pages[end:].any():
                raise HoldfastError(f"{found} blocks of context {seed} came with wrong bytes")
        return found

    def close(self) -> None:
        """End the session."""
        self.engine.close()

    def _chain(self, seed: int) -> Chain:
        return self.engine.chain([seed] * (self.blocks * BLOCK_TOKENS))


def rows(setting: Setting) -> Iterator[Row]:
    """Yield how many blocks were compared, and the times after an engine and a node were killed."""
    gpu, shape = setting.gpu, TOY_SHARED if setting.rehearse else LLAMA_70B_RANK
    blocks, wanted = (TOY_BLOCKS, TOY_ALL_BLOCKS) if setting.rehearse else (BLOCKS, ALL_BLOCKS)
    room = int(ROOM * blocks * (shape.block_bytes + SLOT_MARGIN))
    with NodeUnderTest(setting.folder / "shared", settings=_settings(setting, room)) as node:
        first, second = (DomainEngine(node.address, gpu, shape, name) for name in DOMAINS)
        with closing(second):
            with closing(first):
                yield _compared(setting, (first, second), wanted)
            if setting.left_s() < KILL_S:
                yield not_measured("gpu.killed_engine.memory_back", "no time was left")
                return
            yield _after_killed_engine(setting, node, second)
            _kill_beside_load(node, second)
        begun_s = time.monotonic()
        node.start()
        with closing(DomainEngine(node.address, gpu, shape, DOMAINS[0])) as again:
            saved, before = again.save(1)
            if again.load(1, before) != saved or not saved:
                raise HoldfastError("a node that was started again does not hold what was saved")
        yield at_most("gpu.killed_node.again", time.monotonic() - begun_s, "s")


def _settings(setting: Setting, room: int) -> dict[str, object]:
    """Return a node's settings: two domains, and memory only."""
    domains = {}
    for name in DOMAINS:
        key = setting.folder / f"{name}.key"
        key.write_text(name.encode().hex().ljust(64, "0"))
        key.chmod(0o600)
        domains[name] = {"key_file": str(key)}
    return {"domains": domains, "tiers": [{"kind": "host", "capacity": room}]}


def _compared(setting: Setting, engines: tuple[DomainEngine, DomainEngine], wanted: int) -> Row:
    """Save and load contexts of both domains in turns; return the row of the blocks compared."""
    compared = contexts = short = 0
    while compared < wanted and setting.left_s() > KILL_S:
        for engine in engines:
            contexts += 1
            saved, before = engine.save(contexts)
            short += saved < engine.blocks
            compared += engine.load(contexts, before)
    locked = sum(engine.engine.await_locks(0, 0) for engine in engines)
    more: dict[str, object] = {"contexts": contexts, "not_whole": short, "locked_mib": locked / MIB}
    return Row("gpu.recalls.compared", compared, "blocks", more)


def _after_killed_engine(setting: Setting, node: NodeUnderTest, other: DomainEngine) -> Row:
    """Kill an engine that saves; return how long it took until another domain had its memory."""
    argv = [sys.executable, "-m", PROGRAM, node.address, *(["--rehearse"] * setting.rehearse)]
    process = start_owned(argv, stdout=subprocess.PIPE)
    with process:
        try:
            if process.stdout is None or not process.stdout.readline():
                raise HoldfastError("the engine to be killed ended by itself")
            time.sleep(SAVES_S)
        finally:
            process.kill()
    begun_s, seed = time.monotonic(), FIRST_SEED
    saved, before = other.save(seed)
    while saved < other.blocks and time.monotonic() < begun_s + BACK_S:
        seed += 1
        saved, before = other.save(seed)
    took_s = time.monotonic() - begun_s
    if other.load(seed, before) != saved:
        raise HoldfastError("blocks saved after an engine was killed are not held")
    more = {"blocks": saved}
    return at_most("gpu.killed_engine.memory_back", took_s, "s", BACK_GOAL_S, **more)


def _kill_beside_load(node: NodeUnderTest, engine: DomainEngine) -> None:
    """Kill the node while an engine loads; raise HoldfastError if the engine does not notice."""
    _, before = engine.save(SECOND_SEED)
    killer = threading.Timer(SAVES_S, node.kill)
    killer.start()
    try:
        with contextlib.suppress(NodeGoneError):
            until_s = time.monotonic() + BACK_S
            while time.monotonic() < until_s:
                engine.load(SECOND_SEED, before)
            raise HoldfastError("an engine does not notice that its node was killed")
    finally:
        killer.join()


def main(argv: Sequence[str]) -> int:
    """Save contexts until this process is killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("node")
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args(argv)
    shape = TOY_SHARED if args.rehearse else LLAMA_70B_RANK
    gpu = accelerator(rehearse=args.rehearse)
    engine = DomainEngine(args.node, gpu, shape, DOMAINS[0])
    engine.save(0)
    print("saving", flush=True)
    for seed in itertools.count(1):
        engine.save(seed)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
