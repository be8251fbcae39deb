"""Measure a striped pool: contexts that survive a lost target, what that costs, and their speed.

Survival and cost are counts: the pool tier of this package writes to targets in this process, which
keep what they get. The speed is that of real nodes in network namespaces, where each target has a
link of its own with a limited rate.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import numpy.typing as npt

import holdfast
from holdfast.blocks.envelope import read_header
from holdfast.blocks.namespace import Namespace, namespace_of
from holdfast.errors import HoldfastError, Outcome
from holdfast.limits import BLOCK_TOKENS, MIB
from holdfast.membership.members import Member
from holdfast.report import Row, at_least, at_most, not_measured, share
from holdfast.testing.chained import ChainedBlocks
from holdfast.tiers.pool.tier import PoolTier, PoolTierOptions
from holdfast.wire.remote.client import BlockCount, HeldFlags, ReceivedRecords, TargetClient
from holdfast_bench.harness.hardware_limits import SEED
from holdfast_bench.harness.network import open_network
from holdfast_bench.harness.pool import ManualMembers, PoolUnderTest

MEMBERS = 16
PREFIX_BLOCKS = 2_048
PREFIXES = 12
WRITE_BLOCKS = 32
"""Blocks of a prompt that a store writes at a time."""

TURNS = 8
TURN_BLOCKS = 12
"""Blocks that a turn of a conversation adds at a time; `ANSWER_BLOCKS` more come one by one."""

ANSWER_BLOCKS = 3
WHOLE_GOAL = 0.98
AMPLIFICATION_GOAL = 1.3

TARGETS = 4
LINK_BITS_PER_S = 1_000_000_000
CONTEXT_BLOCKS = 256
BLOCK_BYTES = 1 * MIB
SPEED_GOAL = 0.85
"""Of the links' rate together: 3.4 Gbit/s of 4."""

FETCH_S = 30.0
_PAYLOAD_BYTES = 1_000


class KeepingTarget(TargetClient):
    """A client of a target that is a dictionary in this process; it may be `dead`."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.records: dict[tuple[Namespace, bytes], bytes] = {}
        self.dead = False

    def put(
        self,
        records: Sequence[memoryview],
        deadline_s: float,  # noqa: ARG002
        on_progress: Callable[[int], None] | None = None,  # noqa: ARG002
    ) -> list[Outcome]:
        if self.dead:
            return [Outcome.GONE] * len(records)
        for record in records:
            header, _ = read_header(record)
            self.records[namespace_of(header), header.key] = bytes(record)
        return [Outcome.OK] * len(records)

    def get(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        deadline_s: float,  # noqa: ARG002
        on_progress: Callable[[int], None] | None = None,  # noqa: ARG002
    ) -> ReceivedRecords:
        if self.dead:
            return ReceivedRecords(0, Outcome.GONE)
        for number, (key, buffer) in enumerate(zip(keys, into, strict=True)):
            record = self.records.get((namespace, key))
            if record is None:
                return ReceivedRecords(number, Outcome.MISS)
            buffer[: len(record)] = record
        return ReceivedRecords(len(keys), Outcome.OK)

    def exist(self, namespace: Namespace, keys: Sequence[bytes], deadline_s: float) -> HeldFlags:  # noqa: ARG002
        if self.dead:
            return HeldFlags(bytes(len(keys)), Outcome.GONE)
        return HeldFlags(bytes((namespace, key) in self.records for key in keys), Outcome.OK)

    def suspect(self, namespace: Namespace, keys: Sequence[bytes], deadline_s: float) -> BlockCount:  # noqa: ARG002
        return BlockCount(0, Outcome.OK)

    def use(self, namespace: Namespace, keys: Sequence[bytes], deadline_s: float) -> BlockCount:  # noqa: ARG002
        return BlockCount(0, Outcome.OK)

    def probe(self, deadline_s: float) -> Outcome:  # noqa: ARG002
        return Outcome.GONE if self.dead else Outcome.OK


def stripe_rows(folder: Path) -> list[Row]:
    """Measure survival, cost and speed."""
    return [*survival_rows(), *speed_rows(folder)]


def survival_rows() -> list[Row]:
    """Write conversations to 16 targets, lose one, and count the prefixes that come back whole."""
    members = [Member(id=f"t{n}", address=f"tcp://10.0.0.{n + 1}:1") for n in range(MEMBERS)]
    targets = {member.id: KeepingTarget(member.address) for member in members}
    chains = [ChainedBlocks(_PAYLOAD_BYTES) for _ in range(PREFIXES)]
    with closing(_pool(members, targets)) as pool:
        for chain in chains:
            _write(pool, chain)
    written = len(chains) * PREFIX_BLOCKS * chains[0].namespace.slot_bytes
    stored = sum(len(record) for target in targets.values() for record in target.records.values())
    whole, rng = 0, random.Random(SEED)  # noqa: S311  # no secret
    for chain in chains:
        lost = targets[f"t{rng.randrange(MEMBERS)}"]
        lost.dead = True
        with closing(_pool(members, targets)) as pool:
            whole += _is_whole(pool, chain)
        lost.dead = False
    more = {"members": MEMBERS, "prefix_blocks": PREFIX_BLOCKS}
    return [
        at_least("pool.stripe.whole", whole / len(chains), "of prefixes", WHOLE_GOAL, **more),
        at_most(
            "pool.stripe.written", stored / written, "x the blocks", AMPLIFICATION_GOAL, **more
        ),
    ]


def speed_rows(folder: Path) -> list[Row]:
    """Fetch one context over the links of four targets together; one row without links."""
    what = "pool.stripe.fetch"
    with ExitStack() as stack:
        network = stack.enter_context(open_network(folder / "network.log"))
        if not network.limits:
            return [not_measured(what, "links of limited rate need root, `ip` and `tc`")]
        pool = PoolUnderTest(stack, folder / "stripes", network)
        pool.start_targets(TARGETS, bits_per_s=LINK_BITS_PER_S)
        host = pool.start_host("host")
        tokens, blocks = _context()
        with holdfast.open(host.address) as store:
            store.session(_fingerprint()).save(tokens, blocks)
        pool.wait_holding(CONTEXT_BLOCKS + CONTEXT_BLOCKS // (TARGETS - 1))  # parity too
        host.restart()  # its memory is empty now
        pool.wait_agreed()
        into = np.ones_like(blocks)  # an engine's pages are there; new memory faults page by page
        with holdfast.open(host.address) as store:
            session = store.session(_fingerprint())
            held = session.cover(tokens)
            begun = time.perf_counter()
            landed = session.fetch(tokens, into, FETCH_S)
            seconds = time.perf_counter() - begun
        if landed.blocks != CONTEXT_BLOCKS or not np.array_equal(
            into.view(np.uint16), blocks.view(np.uint16)
        ):
            raise HoldfastError(f"{landed.blocks} of {held // BLOCK_TOKENS} blocks: {landed}")
    speed, limit = 8e-9 * blocks.nbytes / seconds, 1e-9 * TARGETS * LINK_BITS_PER_S
    return [share(what, speed, "Gbit/s", limit, SPEED_GOAL, targets=TARGETS, seconds=seconds)]


def _pool(members: Sequence[Member], targets: dict[str, KeepingTarget]) -> PoolTier:
    source, options = ManualMembers(members), PoolTierOptions(deadline_s=30.0, ask_s=30.0)
    return PoolTier(source, lambda member: targets[member.id], options)


def _write(pool: PoolTier, chain: ChainedBlocks) -> None:
    """Write a conversation: a long prompt, then turns whose answers come block by block."""
    sizes = [*[TURN_BLOCKS] * TURNS, *[1] * TURNS * ANSWER_BLOCKS]
    turns = [TURN_BLOCKS, *[1] * ANSWER_BLOCKS] * TURNS
    prompt, at = PREFIX_BLOCKS - sum(sizes), 0
    steps = [min(WRITE_BLOCKS, prompt - begin) for begin in range(0, prompt, WRITE_BLOCKS)]
    for count in [*steps, *turns]:
        outcomes = set(chain.save(pool, range(at, at + count)))
        if outcomes != {Outcome.OK}:
            raise HoldfastError(f"the pool did not accept {count} records: {outcomes}")
        at += count


def _is_whole(pool: PoolTier, chain: ChainedBlocks) -> bool:
    """Return whether a prefix is found and read whole. Raises AssertionError if it is wrong."""
    if pool.held(chain.namespace, chain.keys(PREFIX_BLOCKS), 0) < PREFIX_BLOCKS:
        return False
    return all(
        set(chain.load(pool, range(at, at + WRITE_BLOCKS))) == {Outcome.OK}
        for at in range(0, PREFIX_BLOCKS, WRITE_BLOCKS)
    )


def _fingerprint() -> holdfast.Fingerprint:
    layout = holdfast.Layout.portable(
        layers=4, kv_heads=4, head_size=128, dtype="float16", block_tokens=BLOCK_TOKENS
    )
    names = dict.fromkeys(("model", "positions", "adapter", "kv_quantisation", "kv_scales"), "none")
    return holdfast.Fingerprint.portable(layout, **names)


def _context() -> tuple[list[int], npt.NDArray[np.float16]]:
    """Return the tokens and the blocks of a context of 32K tokens, 1 MiB a block."""
    rng = np.random.default_rng(SEED)
    numbers = rng.integers(0, 1 << 16, CONTEXT_BLOCKS * BLOCK_BYTES // 2, np.uint16)
    tokens = rng.integers(0, 50_000, CONTEXT_BLOCKS * BLOCK_TOKENS).tolist()
    return tokens, numbers.view(np.float16).reshape(CONTEXT_BLOCKS, -1)
