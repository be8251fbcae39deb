"""Chaos campaign: targets of a pool fail in many ways while users write and read.

Each target is a process behind a proxy. The users check every byte. After each fault the pool must
recover by itself, and circuit breakers must open for members that do not answer.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import NamedTuple

from holdfast.limits import TOKEN_S_MAX
from holdfast.tiers.pool.hedged_read import HEDGE_PERCENT, HEDGES_SAVED_MAX
from holdfast_bench.campaigns.campaign import CampaignBudget, CampaignResult
from holdfast_bench.campaigns.chaos_pool import SLACK_S, ChaosPool, ChaosUsers
from holdfast_bench.campaigns.chaos_proxy import Mood
from holdfast_bench.harness.pause import pause, resume

TARGETS = 4
BREAKER_S = 2.0
RECOVERED = 0.99
"""Share of freshly saved blocks that must be read back for a pool to count as recovered."""

RECOVERY_S = 60.0
"""Maximum seconds until a pool recovers; long, because other work may stall this machine."""

FAULT_S = (1.0, 2.5)
WRONG_ANSWERS_PROVEN_AT = 5
"""After so many faults with wrong answers, at least one answer must have been refused."""

FLAPS = 3
FLAPS_LONG = 120
"""Flaps in every tenth flapping of a run: two minutes."""

_POLL_S = 0.02


class ChaosFault(NamedTuple):
    """One kind of fault.

    `silent`: the members hit do not answer, so their circuit breakers must open. `answers_wrongly`:
    answers are altered, so records may fail their check.
    """

    name: str
    begin: Callable[[ChaosPool, str], None]
    heal: Callable[[ChaosPool, str], None]
    silent: bool = False
    answers_wrongly: bool = False


def _flap(pool: ChaosPool, name: str) -> None:
    pool.flapped += 1
    for _ in range(FLAPS if pool.flapped % 10 else FLAPS_LONG):
        pool.list_all(without=name)
        time.sleep(0.5)
        pool.list_all()
        time.sleep(0.5)


def _split(pool: ChaosPool, name: str) -> None:
    """Drop all bytes to and from one half of the targets, without closing a connection."""
    others = sorted(each for each in pool.targets if each != name)
    pool.mood([name, *others[: TARGETS // 2 - 1]], "mute")


def _expire(pool: ChaosPool, name: str) -> None:
    pool.renew_token(age_s=2 * TOKEN_S_MAX)
    pool.targets[name].proxy.cut()


def _moody(mood: Mood, *, silent: bool = False, answers_wrongly: bool = False) -> ChaosFault:
    """Return the fault that puts one target's proxy into a mood."""
    return ChaosFault(mood, lambda p, n: p.mood([n], mood), _mend, silent, answers_wrongly)


def _mend(pool: ChaosPool, _: str) -> None:
    pool.mood([*pool.targets], "well")


FAULTS = (
    ChaosFault("kill", lambda p, n: p.targets[n].kill(), lambda p, n: p.targets[n].start(), True),
    ChaosFault(
        "stop",
        lambda p, n: pause(p.targets[n].process.pid),
        lambda p, n: resume(p.targets[n].process.pid),
        silent=True,
    ),
    _moody("late"),
    _moody("slow"),
    _moody("dribble", silent=True),
    _moody("mute", silent=True),
    _moody("half open", silent=True),
    _moody("cut", silent=True),
    _moody("garbage", answers_wrongly=True),
    _moody("stale", answers_wrongly=True),
    _moody("other", silent=True),
    ChaosFault("all mute", lambda p, _: p.mood([*p.targets], "mute"), _mend),
    ChaosFault("split", _split, _mend, silent=True),
    ChaosFault("expired token", _expire, lambda p, _: p.renew_token(), silent=True),
    ChaosFault(
        "unauthenticated", lambda p, n: p.send_invalid(n), lambda p, _: p.close_unauthenticated()
    ),
    ChaosFault("drain", lambda p, n: p.list_all(draining=n), lambda p, _: p.list_all()),
    ChaosFault("leave and join", lambda p, n: p.list_all(without=n), lambda p, _: p.list_all()),
    ChaosFault("flap", _flap, lambda p, _: p.list_all()),
)


def run(budget: CampaignBudget) -> Iterator[CampaignResult]:
    """Inject the faults in shuffled order, each equally often, while users write and read."""
    faults, calls = CampaignResult("chaos.faults", "faults"), CampaignResult("chaos.calls", "calls")
    blocks = CampaignResult("chaos.blocks", "blocks read")
    budget = budget._replace(part="")  # the three results come from the same rounds
    queue: list[ChaosFault] = []
    with (
        closing(ChaosPool(budget.folder / "chaos", TARGETS)) as pool,
        closing(ChaosUsers(pool, calls, blocks, budget.seed)) as users,
    ):
        for rng in budget.rounds(faults):
            queue = queue or rng.sample(FAULTS, len(FAULTS))
            _one_fault(pool, users, queue.pop(), rng, faults)
            faults.tried += 1
    hedging = pool.tier.hedged_reads.hedging
    calls.figures["hedges"] = hedging.hedges
    calls.figures["stalls"] = len(pool.stalls)
    most = hedging.requests * HEDGE_PERCENT / 100 + HEDGES_SAVED_MAX
    calls.expect(hedging.hedges <= most, f"{hedging.hedges} hedges of {hedging.requests} reads")
    budget.expect_enough(blocks, blocks.tried, "nothing was read")
    wrong_answers = sum(faults.counts[fault.name] for fault in FAULTS if fault.answers_wrongly)
    if wrong_answers >= WRONG_ANSWERS_PROVEN_AT:
        message = "no wrong answer was refused: the faults are too mild"
        budget.expect_enough(blocks, blocks.counts["refused"], message)
    yield from (faults, calls, blocks)


def _one_fault(
    pool: ChaosPool,
    users: ChaosUsers,
    fault: ChaosFault,
    rng: random.Random,
    result: CampaignResult,
) -> None:
    name = rng.choice(sorted(pool.targets))
    pool.renew_token()
    until_s = time.monotonic() + rng.uniform(*FAULT_S)
    users.answers_altered = fault.answers_wrongly
    fault.begin(pool, name)
    if fault.silent:
        # Wait until users send no more requests to the member.
        begun_s = time.monotonic()
        while name in pool.trusted() and time.monotonic() < begun_s + 2 * BREAKER_S + SLACK_S:
            time.sleep(_POLL_S)
        ended_s = time.monotonic()
        took_s = ended_s - begun_s
        if took_s > BREAKER_S + SLACK_S:
            took_s -= pool.stalls.within(begun_s, ended_s)
        result.longest("breaker", took_s)
        message = f"{took_s:.1f} s until requests to {name} ended: {fault.name}"
        result.expect(took_s <= BREAKER_S + SLACK_S, message)
    time.sleep(max(0.0, until_s - time.monotonic()))
    fault.heal(pool, name)
    begun_s = time.monotonic()
    while (share := users.share()) < RECOVERED:
        if time.monotonic() > begun_s + RECOVERY_S:
            what = f"{share:.0%} of the saved blocks read back"
            result.fail(f"{what} {RECOVERY_S:.0f} s after {fault.name}")
            break
    result.longest("recovery", time.monotonic() - begun_s)
    result.counts[fault.name] += 1
