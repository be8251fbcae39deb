"""Measure naming, coverage, the index's memory and a full disk's recovery."""

from __future__ import annotations

import os
import statistics
import time
import tracemalloc

from holdfast.blocks.key import DOMAIN_KEY_BYTES, KEY_BYTES, Chain
from holdfast.blocks.world import World
from holdfast.index.residency import Residency
from holdfast.policy.cost_aware import CostAware
from holdfast.rig.report import Row, at_most

TOKENS = 131_072
BLOCK_TOKENS = 128
COVERAGE_GOAL_MS = 3.0
BLOCK_GOAL_BYTES = 250.0
CHAIN_BLOCKS = 1_000
WORLD = World(b"f" * KEY_BYTES, b"d" * KEY_BYTES, 2 << 20, BLOCK_TOKENS)


def coverage_row(rounds: int) -> Row:
    """Time keys and coverage of a 128K-token context, from a list of tokens, all of it held."""
    tokens = [(7919 * i) % 150_000 for i in range(TOKENS)]
    index = Residency(2)
    _hold(index, _chain(tokens).keys)
    times_ms = []
    for _ in range(rounds):
        start_s = time.perf_counter()
        coverage = index.cover(WORLD, _chain(tokens).keys)
        times_ms.append(1e3 * (time.perf_counter() - start_s))
        if coverage.blocks != TOKENS // BLOCK_TOKENS:
            raise RuntimeError(f"{coverage.blocks} blocks covered, all were held")
    return at_most("coverage.128k", statistics.median(times_ms), "ms", COVERAGE_GOAL_MS)


def index_row(blocks: int) -> Row:
    """Weigh index and eviction policy with so many blocks, in chains of 1,000, on two tiers."""
    tracemalloc.start()
    try:
        index, policy = Residency(2), CostAware()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(blocks // CHAIN_BLOCKS):
            rows = _hold(index, _random_keys())
            for row in reversed(rows):
                policy.insert(row, index.parent_row(row), index.keys[row], 0.0)
            del rows
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return at_most("index.block", (after - before) / len(index), "bytes", BLOCK_GOAL_BYTES)


def _chain(tokens: list[int]) -> Chain:
    chain = Chain(bytes(DOMAIN_KEY_BYTES), WORLD.fingerprint, BLOCK_TOKENS)
    chain.extend(tokens)
    return chain


def _hold(index: Residency, keys: list[bytes]) -> list[int]:
    rows, parent = [], WORLD.fingerprint
    for depth, key in enumerate(keys):
        row = index.add(WORLD, key, parent, depth)
        index.places[0][row] = index.places[1][row] = depth << 12
        rows.append(row)
        parent = key
    return rows


def _random_keys() -> list[bytes]:
    noise = os.urandom(CHAIN_BLOCKS * KEY_BYTES)
    return [noise[i : i + KEY_BYTES] for i in range(0, len(noise), KEY_BYTES)]
