"""Chaos in a pool: targets killed, stopped, slow, mute, cut, drained and flapping under load.

Real targets in processes of their own, each behind a proxy; users write and read all the time and
check every byte. After each fault the pool has to come back by itself.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from holdfast.testing.campaign import Order, Tally
from holdfast.testing.chaos_pool import SLACK_S, ChaosPool, Users
from holdfast.tiers.pool.hedge import HEDGE_PERCENT, HEDGES_SAVED_MAX

TARGETS = 4
BREAKER_S = 2.0
RECOVERED = 0.99
RECOVERY_S = 15.0
FAULT_S = (1.0, 2.5)
FLAPS = 3
_LOOK_S = 0.02


class Fault(NamedTuple):
    """One kind of trouble. `silent`: the members hit say nothing, so their breakers must open."""

    name: str
    begin: Callable[[ChaosPool, str], None]
    heal: Callable[[ChaosPool, str], None]
    silent: bool = False


def _kill(pool: ChaosPool, name: str) -> None:
    pool.targets[name].send(signal.SIGKILL)


def _restart(pool: ChaosPool, name: str) -> None:
    pool.targets[name].start()
    pool.targets[name].wait()


def _stop(pool: ChaosPool, name: str) -> None:
    pool.targets[name].send(signal.SIGSTOP)


def _go_on(pool: ChaosPool, name: str) -> None:
    pool.targets[name].send(signal.SIGCONT)


def _flap(pool: ChaosPool, name: str) -> None:
    for _ in range(FLAPS):
        pool.list_all(without=name)
        time.sleep(0.5)
        pool.list_all()
        time.sleep(0.5)


FAULTS = (
    Fault("kill", _kill, _restart, silent=True),
    Fault("stop", _stop, _go_on, silent=True),
    Fault("slow", lambda p, n: p.mood([n], "slow"), lambda p, n: p.mood([n], "well")),
    Fault("mute", lambda p, n: p.mood([n], "mute"), lambda p, n: p.mood([n], "well"), silent=True),
    Fault("cut", lambda p, n: p.mood([n], "cut"), lambda p, n: p.mood([n], "well"), silent=True),
    Fault("all mute", lambda p, _: p.mood([*p.targets], "mute"),
          lambda p, _: p.mood([*p.targets], "well")),
    Fault("drain", lambda p, n: p.list_all(draining=n), lambda p, _: p.list_all()),
    Fault("leave and join", lambda p, n: p.list_all(without=n), lambda p, _: p.list_all()),
    Fault("flap", _flap, lambda p, _: p.list_all()),
)  # fmt: skip


def run(order: Order) -> Iterator[Tally]:
    """Do faults in a shuffled order, each as often as the others; check users throughout."""
    faults, calls = Tally("chaos.faults", "faults"), Tally("chaos.calls", "calls")
    blocks = Tally("chaos.blocks", "blocks read")
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
    hedging = pool.tier.hedging
    calls.figures["hedges"] = hedging.hedges
    most = hedging.requests * HEDGE_PERCENT / 100 + HEDGES_SAVED_MAX
    calls.expect(hedging.hedges <= most, f"{hedging.hedges} hedges of {hedging.requests} reads")
    blocks.expect(blocks.tried > 0, "nothing was read")
    yield from (faults, calls, blocks)


def _one_fault(
    pool: ChaosPool, users: Users, fault: Fault, dice: random.Random, tally: Tally
) -> None:
    name = dice.choice(sorted(pool.targets))
    until_s = time.monotonic() + dice.uniform(*FAULT_S)
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
    took_s = time.monotonic() - begun_s
    key = "breaker_longest_s"
    tally.figures[key] = max(tally.figures.get(key, 0.0), took_s)
    tally.expect(
        took_s <= BREAKER_S + SLACK_S, f"{took_s:.1f} s until {name} was left alone: {fault.name}"
    )
