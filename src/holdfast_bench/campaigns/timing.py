"""Timing campaign: response times must not reveal what another domain holds.

One domain saves contexts. Another domain requests, under its own name, those contexts and contexts
that were never saved. A classifier of the two by response time must be no better than chance: the
area under its ROC curve (AUC) is 0.50 within `AUC_WITHIN`. The control requests own contexts, held
and not held; there the AUC must be high, or the measurement is not sensitive enough.

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

from holdfast.buffers import aligned_buffer
from holdfast.limits import BLOCK_TOKENS, MIB
from holdfast.store.store import Store
from holdfast.wire.remote.client import TargetClient
from holdfast_bench.campaigns.campaign import CampaignBudget, CampaignResult
from holdfast_bench.campaigns.contexts import Contexts, keys_of
from holdfast_bench.campaigns.loopback import open_target

AUC_WITHIN = 0.02
CONTROL_AUC_MIN = 0.75
POOL_CONTEXTS = 64
CONTEXT_BLOCKS = 8
PAYLOAD_BYTES = 124_000
"""Large enough that a hit, which transfers the payload, differs from a miss on a busy machine."""

REQUESTS = 5
"""Requests for one elapsed time, of which the shortest counts: the others may have waited for a
processor."""

HOST_BYTES = 192 * MIB
SAMPLES_MIN = 400
_SIGMAS = 5.0
"""With few samples the limit is this many standard deviations of the AUC under chance."""

SECRETS = {"victim": b"v" * 32, "curious": b"c" * 32}

Tokens: TypeAlias = "npt.NDArray[np.int64]"
Ask: TypeAlias = Callable[[Tokens], int]
"""Requests a context; returns the response time in ns."""


def run(budget: CampaignBudget) -> Iterator[CampaignResult]:
    """Measure CPU time in this process, and elapsed time over TCP."""
    with Store(HOST_BYTES, [], SECRETS) as store:
        store.start()
        victim, curious = (Contexts(store, PAYLOAD_BYTES, name) for name in SECRETS)
        theirs, unsaved, own, missing = (_pool(seed) for seed in range(4))
        for contexts, pool in ((victim, theirs), (curious, own)):
            for tokens in pool:
                contexts.save(_keys(contexts, tokens))
        with open_target(store) as address, contextlib.closing(TargetClient(address)) as target:
            ways = {"store": _by_cpu(curious), "target": _by_clock(curious, target)}
            part = budget.share(len(ways))
            fewer = part._replace(tries=max(SAMPLES_MIN, part.tries // 10))
            for way, ask in ways.items():
                result = _samples(f"timing.{way}", part, ask, (theirs, unsaved))
                _expect_chance(result)
                yield result
                result = _samples(f"timing.{way}.control", fewer, ask, (own, missing))
                found = result.figures["auc"]
                message = f"AUC {found:.3f}: own hits are not detected"
                budget.expect_enough(result, found >= CONTROL_AUC_MIN, message)
                yield result


def auc(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> float:
    """Return the probability that a sample of `one` exceeds one of `other`; ties count half."""
    ordered = np.sort(other)
    below = np.searchsorted(ordered, one, "left") + np.searchsorted(ordered, one, "right")
    return float(below.sum() / (2 * len(one) * len(other)))


def _pool(seed: int) -> list[Tokens]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 50_000, CONTEXT_BLOCKS * BLOCK_TOKENS) for _ in range(POOL_CONTEXTS)]


def _keys(contexts: Contexts, tokens: Tokens) -> list[bytes]:
    name = next(n for n in SECRETS if contexts.store.domain(n)[1] == contexts.namespace.domain)
    return keys_of(SECRETS[name], tokens)


def _by_cpu(contexts: Contexts) -> Ask:
    """Request from the store in this thread; CPU time does not depend on other processes."""

    def ask(tokens: Tokens) -> int:
        start = time.thread_time_ns()
        keys = _keys(contexts, tokens)
        contexts.store.cover(contexts.namespace, keys)
        fetched = contexts.store.fetch(contexts.namespace, keys, 1.0)
        contexts.store.release(fetched.lease)
        return time.thread_time_ns() - start

    return ask


def _by_clock(contexts: Contexts, target: TargetClient) -> Ask:
    """Request from a target over loopback TCP, as another node does, `REQUESTS` times."""
    into = [aligned_buffer(contexts.namespace.slot_bytes) for _ in range(CONTEXT_BLOCKS)]

    def elapsed_ns(keys: list[bytes]) -> int:
        start = time.perf_counter_ns()
        target.get(contexts.namespace, keys, into, 5.0)
        return time.perf_counter_ns() - start

    def ask(tokens: Tokens) -> int:
        keys = _keys(contexts, tokens)
        return min(elapsed_ns(keys) for _ in range(REQUESTS))

    return ask


def _samples(
    what: str, budget: CampaignBudget, ask: Ask, pools: tuple[list[Tokens], list[Tokens]]
) -> CampaignResult:
    """Request a context of each pool, in pairs of random order, and record the AUC.

    It is NaN if there is no sample. All samples have one verdict together. An unsaved context is
    requested before each sample, so that deferred work of the last sample, such as updated
    estimates, is not measured with the next.
    """
    result = CampaignResult(what, "samples")
    result.each_may_fail = False
    times: tuple[list[int], list[int]] = ([], [])
    before = _pool(len(SECRETS) * POOL_CONTEXTS)[0]
    for tokens in pools[0] + pools[1]:
        ask(tokens)  # the first request for a context may be slower
    for rng in budget.rounds(result):
        for which in rng.sample((0, 1), 2):
            ask(before)
            times[which].append(ask(rng.choice(pools[which])))
        result.tried += 2
    if not result.tried:
        result.figures["auc"] = math.nan
    else:
        one, other = (np.array(arm, np.float64) for arm in times)
        result.figures |= {
            "median_us": float(np.median(one)) / 1e3,
            "median_other_us": float(np.median(other)) / 1e3,
            "auc": auc(one, other),
        }
    return result


def _expect_chance(result: CampaignResult) -> None:
    """Count a failure unless the AUC is that of chance."""
    found = result.figures["auc"]
    chance = math.sqrt((result.tried + 1) / (12 * (result.tried / 2) ** 2)) if result.tried else 1.0
    within = max(AUC_WITHIN, _SIGMAS * chance)
    result.figures["within"] = within
    result.expect(abs(found - 0.5) <= within, f"AUC {found:.4f} is not 0.50 within {within:.3f}")
