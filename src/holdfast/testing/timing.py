"""Whether time betrays what another domain holds: hit and miss must look the same from outside.

One domain saves contexts; another asks, in its own name, for those and for contexts that nobody
ever saved. A classifier that sees only how long an answer took must do no better than a coin: the
area under its curve (AUC) is 0.50 within 0.02. The control asks for contexts of its own, held and
not held: there it must do well, or the measurement sees nothing.

After Gu et al., "Auditing Prompt Caching in Language Model APIs" (ICML 2025).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.blocks.key import Chain
from holdfast.buffers import aligned_buffer
from holdfast.limits import MIB
from holdfast.store.store import Store
from holdfast.testing.campaign import Order, Tally
from holdfast.testing.contexts import FINGERPRINT, Contexts
from holdfast.wire.target import Target

AUC_WITHIN = 0.02
CONTROL_AUC_MIN = 0.75
POOL = 64
CONTEXT_BLOCKS = 8
BLOCK_TOKENS = 128
PAYLOAD_BYTES = 124_000
"""So large that a hit, which is sent, is told from a miss on a busy machine too."""

HOST_BYTES = 192 * MIB
SAMPLES_MIN = 400
_SIGMAS = 5.0
"""With few samples chance alone may leave the goal; then so many of its deviations are let pass."""

SECRETS = {"victim": b"v" * 32, "curious": b"c" * 32}

Tokens: TypeAlias = "npt.NDArray[np.int64]"
Ask: TypeAlias = Callable[[Tokens], int]
"""Asks for a context; returns how long the answer took, in ns."""


def run(order: Order) -> Iterator[Tally]:
    """Measure in this process by CPU time, and over TCP by the clock."""
    with contextlib.closing(Store(HOST_BYTES, [], SECRETS)) as store:
        store.start()
        victim, curious = (Contexts(store, PAYLOAD_BYTES, name) for name in SECRETS)
        theirs, nobodys, own, missing = (_pool(seed) for seed in range(4))
        for contexts, pool in ((victim, theirs), (curious, own)):
            for tokens in pool:
                contexts.save(_keys(contexts, tokens))
        with order.target(store) as address, contextlib.closing(Target(address)) as target:
            ways = {"store": _by_cpu(curious), "target": _by_clock(curious, target)}
            for way, ask in ways.items():
                part = order.share(len(ways))
                yield _compared(f"timing.{way}", part, ask, (theirs, nobodys))
                yield _control(f"timing.{way}.control", part, ask, (own, missing))


def auc(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> float:
    """Return the chance that a sample of `one` is larger than one of `other`; ties count half."""
    ordered = np.sort(other)
    below = np.searchsorted(ordered, one, "left") + np.searchsorted(ordered, one, "right")
    return float(below.sum() / (2 * len(one) * len(other)))


def _pool(seed: int) -> list[Tokens]:
    dice = np.random.default_rng(seed)
    return [dice.integers(0, 50_000, CONTEXT_BLOCKS * BLOCK_TOKENS) for _ in range(POOL)]


def _keys(contexts: Contexts, tokens: Tokens) -> list[bytes]:
    name = next(n for n in SECRETS if contexts.store.domain(n)[1] == contexts.world.domain)
    chain = Chain(SECRETS[name], FINGERPRINT, BLOCK_TOKENS)
    chain.extend(tokens)
    return chain.keys


def _by_cpu(contexts: Contexts) -> Ask:
    """Ask the store in this thread: what it costs does not depend on who else runs."""

    def ask(tokens: Tokens) -> int:
        start = time.thread_time_ns()
        keys = _keys(contexts, tokens)
        contexts.store.cover(contexts.world, keys)
        fetched = contexts.store.fetch(contexts.world, keys, 1.0)
        contexts.store.release(fetched.lease)
        return time.thread_time_ns() - start

    return ask


def _by_clock(contexts: Contexts, target: Target) -> Ask:
    """Ask a target over loopback TCP, as another node does."""
    into = [aligned_buffer(contexts.world.record_bytes) for _ in range(CONTEXT_BLOCKS)]

    def ask(tokens: Tokens) -> int:
        keys = _keys(contexts, tokens)
        start = time.perf_counter_ns()
        target.get(contexts.world, keys, into, 5.0)
        return time.perf_counter_ns() - start

    return ask


def _samples(
    tally: Tally, order: Order, ask: Ask, pools: tuple[list[Tokens], list[Tokens]]
) -> float:
    """Ask for one of either pool, in pairs of random order; return the AUC, NaN of nothing.

    What nobody saved is asked for before each: what the last answer left behind, such as figures
    to be worked out anew, is not this one's.
    """
    times: tuple[list[int], list[int]] = ([], [])
    before = _pool(len(SECRETS) * POOL)[0]
    for tokens in pools[0] + pools[1]:
        ask(tokens)  # once each, so that nothing is measured for the first time
    for dice in order.rounds(tally):
        for which in dice.sample((0, 1), 2):
            ask(before)
            times[which].append(ask(dice.choice(pools[which])))
        tally.tried += 2
    if not tally.tried:
        return math.nan
    one, other = (np.array(arm, np.float64) for arm in times)
    tally.figures |= {"median_us": float(np.median(one)) / 1e3}
    tally.figures |= {"median_other_us": float(np.median(other)) / 1e3}
    return auc(one, other)


def _tally(what: str) -> Tally:
    """Return a tally whose samples have one verdict, all together."""
    tally = Tally(what, "samples")
    tally.each_may_fail = False
    return tally


def _compared(what: str, order: Order, ask: Ask, pools: tuple[list[Tokens], list[Tokens]]) -> Tally:
    tally = _tally(what)
    found = _samples(tally, order, ask, pools)
    chance = math.sqrt((tally.tried + 1) / (12 * (tally.tried / 2) ** 2)) if tally.tried else 1.0
    within = max(AUC_WITHIN, _SIGMAS * chance)
    tally.figures |= {"auc": found, "within": within}
    tally.expect(abs(found - 0.5) <= within, f"AUC {found:.4f} is not 0.50 within {within:.3f}")
    return tally


def _control(what: str, order: Order, ask: Ask, pools: tuple[list[Tokens], list[Tokens]]) -> Tally:
    tally = _tally(what)
    found = _samples(tally, order._replace(tries=max(SAMPLES_MIN, order.tries // 10)), ask, pools)
    tally.figures["auc"] = found
    order.expect_enough(tally, found >= CONTROL_AUC_MIN, f"AUC {found:.3f}: own hits do not show")
    return tally
