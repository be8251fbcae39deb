"""Chaos in a pool: targets killed, stopped, late, mute, cut off, lying and flapping under load.

Real targets in processes of their own, each behind a proxy; users write and read all the time and
check every byte. After each fault the pool has to come back by itself.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from holdfast.limits import TOKEN_S_MAX
from holdfast.testing.campaign import Order, Tally
from holdfast.testing.chaos_pool import SLACK_S, ChaosPool, Users
from holdfast.testing.chaos_proxy import Mood
from holdfast.tiers.pool.hedge import HEDGE_PERCENT, HEDGES_SAVED_MAX

TARGETS = 4
BREAKER_S = 2.0
RECOVERED = 0.99
RECOVERY_S = 15.0
FAULT_S = (1.0, 2.5)
LIES_ENOUGH = 5
FLAPS = 3
FLAPS_LONG = 120
"""Two minutes: so long is every tenth flapping of a run."""

_LOOK_S = 0.02


class Fault(NamedTuple):
    """One kind of trouble. `silent`: the members hit say nothing, so their breakers must open.

    `lies`: answers are other than the target's, so records may come that fail their check.
    """

    name: str
    begin: Callable[[ChaosPool, str], None]
    heal: Callable[[ChaosPool, str], None]
    silent: bool = False
    lies: bool = False


def _kill(pool: ChaosPool, name: str) -> None:
    pool.targets[name].kill()


def _restart(pool: ChaosPool, name: str) -> None:
    pool.targets[name].start()
    pool.targets[name].wait()


def _stop(pool: ChaosPool, name: str) -> None:
    pool.targets[name].pause()


def _go_on(pool: ChaosPool, name: str) -> None:
    pool.targets[name].resume()


def _flap(pool: ChaosPool, name: str) -> None:
    pool.flapped += 1
    for _ in range(FLAPS if pool.flapped % 10 else FLAPS_LONG):
        pool.list_all(without=name)
        time.sleep(0.5)
        pool.list_all()
        time.sleep(0.5)


def _split(pool: ChaosPool, name: str) -> None:
    """Lose one half of the targets: everything to them is lost, and nothing refused."""
    others = sorted(each for each in pool.targets if each != name)
    pool.mood([name, *others[: TARGETS // 2 - 1]], "mute")


def _expire(pool: ChaosPool, name: str) -> None:
    pool.renew_token(age_s=2 * TOKEN_S_MAX)
    pool.targets[name].proxy.cut()


def _moody(mood: Mood, *, silent: bool = False, lies: bool = False) -> Fault:
    """Return the fault that is a mood of the network before one target."""
    return Fault(mood, lambda p, n: p.mood([n], mood), _mend, silent, lies)


def _mend(pool: ChaosPool, _: str) -> None:
    pool.mood([*pool.targets], "well")


FAULTS = (
    Fault("kill", _kill, _restart, silent=True),
    Fault("stop", _stop, _go_on, silent=True),
    _moody("late"),
    _moody("slow"),
    _moody("dribble", silent=True),
    _moody("mute", silent=True),
    _moody("half open", silent=True),
    _moody("cut", silent=True),
    _moody("garbage", lies=True),
    _moody("stale", lies=True),
    _moody("other", silent=True),
    Fault("all mute", lambda p, _: p.mood([*p.targets], "mute"), _mend),
    Fault("split", _split, _mend, silent=True),
    Fault("expired token", _expire, lambda p, _: p.renew_token(), silent=True),
    Fault("strangers", lambda p, n: p.pester(n), lambda p, _: p.send_strangers_away()),
    Fault("drain", lambda p, n: p.list_all(draining=n), lambda p, _: p.list_all()),
    Fault("leave and join", lambda p, n: p.list_all(without=n), lambda p, _: p.list_all()),
    Fault("flap", _flap, lambda p, _: p.list_all()),
)


def run(order: Order) -> Iterator[Tally]:
    """Do faults in a shuffled order, each as often as the others; check users throughout."""
    faults, calls = Tally("chaos.faults", "faults"), Tally("chaos.calls", "calls")
    blocks = Tally("chaos.blocks", "blocks read")
    if any(order.wants(tally.what) for tally in (faults, calls, blocks)):
        order = order._replace(part="")  # one of them is all of them, counted another way
    pool = ChaosPool(order.folder / "chaos", TARGETS)
    users = Users(pool, calls, blocks, order.seed)
    try:
        queue: list[Fault] = []
        for dice in order.rounds(faults):
            queue = queue or dice.sample(FAULTS, len(FAULTS))
            _one_fault(pool, users, queue.pop(), dice, faults)
            faults.tried += 1
    finally:
        users.close()
        pool.end()
    hedging = pool.tier.races.hedging
    calls.figures["hedges"] = hedging.hedges
    calls.figures["standstills"] = len(pool.standstills)
    most = hedging.requests * HEDGE_PERCENT / 100 + HEDGES_SAVED_MAX
    calls.expect(hedging.hedges <= most, f"{hedging.hedges} hedges of {hedging.requests} reads")
    order.expect_enough(blocks, blocks.tried, "nothing was read")
    lies = sum(faults.counts[fault.name] for fault in FAULTS if fault.lies)
    if lies >= LIES_ENOUGH:
        heard = blocks.counts["refused"]
        order.expect_enough(blocks, heard, "no lie was heard: they are too tame")
    yield from (faults, calls, blocks)


def _one_fault(
    pool: ChaosPool, users: Users, fault: Fault, dice: random.Random, tally: Tally
) -> None:
    name = dice.choice(sorted(pool.targets))
    pool.renew_token()
    until_s = time.monotonic() + dice.uniform(*FAULT_S)
    users.lied_to = fault.lies
    fault.begin(pool, name)
    if fault.silent:
        _await_open(pool, name, fault, tally)
    time.sleep(max(0.0, until_s - time.monotonic()))
    fault.heal(pool, name)
    begun_s = time.monotonic()
    while (share := users.share()) < RECOVERED:
        if time.monotonic() > begun_s + RECOVERY_S:
            tally.fail(
                f"{share:.0%} of what was saved came back, {RECOVERY_S:.0f} s after {fault.name}"
            )
            break
    took_s = time.monotonic() - begun_s
    tally.counts[fault.name] += 1
    tally.figures["recovery_longest_s"] = max(tally.figures.get("recovery_longest_s", 0.0), took_s)


def _await_open(pool: ChaosPool, name: str, fault: Fault, tally: Tally) -> None:
    """Wait until users' requests leave a silent member alone."""
    begun_s = time.monotonic()
    while name in pool.closed() and time.monotonic() < begun_s + 2 * BREAKER_S + SLACK_S:
        time.sleep(_LOOK_S)
    ended_s = time.monotonic()
    took_s = ended_s - begun_s
    if took_s > BREAKER_S + SLACK_S:
        took_s -= pool.standstills.within(begun_s, ended_s)
    key = "breaker_longest_s"
    tally.figures[key] = max(tally.figures.get(key, 0.0), took_s)
    tally.expect(
        took_s <= BREAKER_S + SLACK_S, f"{took_s:.1f} s until {name} was left alone: {fault.name}"
    )
