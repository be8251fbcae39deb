"""Measure key computation, coverage, planning, and the memory of the index."""

from __future__ import annotations

import os
import statistics
import time
import tracemalloc

from holdfast.blocks.key import DOMAIN_KEY_BYTES, KEY_BYTES, Chain
from holdfast.blocks.namespace import Namespace
from holdfast.index.residency import Residency
from holdfast.limits import BLOCK_TOKENS
from holdfast.plan.cost import PrefillCost, TierEstimate
from holdfast.plan.planner import BestCut, PlanQuestion
from holdfast.policy.cost_aware import CostAware
from holdfast.report import Row, at_most

TOKENS = 131_072
COVERAGE_GOAL_MS = 3.0
PLAN_BLOCKS = 1024
PLAN_GOAL_US = 200.0
PLAN_SPEEDS = (5e9, 2e9, 5e8)
PLANS_A_ROUND = 20
BLOCK_GOAL_BYTES = 250.0
CHAIN_BLOCKS = 1_000
NAMESPACE = Namespace(b"f" * KEY_BYTES, b"d" * KEY_BYTES, 2 << 20, BLOCK_TOKENS)


def coverage_row(rounds: int) -> Row:
    """Time the keys and the coverage of a 128K-token context that is held completely."""
    tokens = [(7919 * i) % 150_000 for i in range(TOKENS)]
    index = Residency(2)
    _hold(index, _chain(tokens).keys)
    times_ms = []
    for _ in range(rounds):
        start_s = time.perf_counter()
        coverage = index.cover(NAMESPACE, _chain(tokens).keys)
        times_ms.append(1e3 * (time.perf_counter() - start_s))
        if coverage.blocks != TOKENS // BLOCK_TOKENS:
            raise RuntimeError(f"{coverage.blocks} blocks covered, all were held")
    return at_most("coverage.128k", statistics.median(times_ms), "ms", COVERAGE_GOAL_MS)


def plan_row(rounds: int) -> Row:
    """Time one plan for 1,024 blocks in four runs, one per tier; `mixed_us`: in mixed order."""
    estimates = [TierEstimate(0.0, 2e10), *(TierEstimate(1e-3, speed) for speed in PLAN_SPEEDS)]
    runs = [tier for tier in range(len(estimates)) for _ in range(PLAN_BLOCKS // len(estimates))]
    mixed = [(7919 * block >> 3) % len(estimates) for block in range(PLAN_BLOCKS)]
    question = PlanQuestion(
        tiers=runs,
        block_bytes=NAMESPACE.slot_bytes,
        block_tokens=BLOCK_TOKENS,
        estimates=estimates,
        names=("host", "disk", "pool", "object"),
        limit_s=60.0,
        cost=PrefillCost(1e-2, 1e-4, 1e-9),
        prompt_tokens=PLAN_BLOCKS * BLOCK_TOKENS + 1,
    )
    us, mixed_us = (_plan_us(question._replace(tiers=tiers), rounds) for tiers in (runs, mixed))
    return at_most("plan.1024", us, "us", PLAN_GOAL_US, mixed_us=mixed_us)


def _plan_us(question: PlanQuestion, rounds: int) -> float:
    """Return the median over rounds of the mean of a few plans."""
    planner, times_us = BestCut(), []
    for _ in range(rounds):
        start_s = time.perf_counter()
        for _ in range(PLANS_A_ROUND):
            planner.plan(question)
        times_us.append(1e6 * (time.perf_counter() - start_s) / PLANS_A_ROUND)
    return statistics.median(times_us)


def index_row(blocks: int) -> Row:
    """Measure bytes per block of index and eviction policy, for chains of 1,000 on two tiers."""
    tracemalloc.start()
    try:
        index, policy = Residency(2), CostAware()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(blocks // CHAIN_BLOCKS):
            rows = _hold(index, _random_keys())
            policy.insert(rows, index.parent_rows(rows), [index.keys[row] for row in rows], 0.0)
            del rows
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return at_most("index.block", (after - before) / len(index), "bytes", BLOCK_GOAL_BYTES)


def _chain(tokens: list[int]) -> Chain:
    chain = Chain(bytes(DOMAIN_KEY_BYTES), NAMESPACE.fingerprint, BLOCK_TOKENS)
    chain.extend(tokens)
    return chain


def _hold(index: Residency, keys: list[bytes]) -> list[int]:
    rows, parent = [], NAMESPACE.fingerprint
    for depth, key in enumerate(keys):
        row = index.add(NAMESPACE, key, parent, depth)
        index.places[0][row] = index.places[1][row] = depth << 12
        rows.append(row)
        parent = key
    return rows


def _random_keys() -> list[bytes]:
    noise = os.urandom(CHAIN_BLOCKS * KEY_BYTES)
    return [noise[i : i + KEY_BYTES] for i in range(0, len(noise), KEY_BYTES)]
