"""Which worker gets a request: four simple routers over the same fleet."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from holdfast.errors import ConfigError
from holdfast.sim.fleet import Covered, Fleet


class Routed(NamedTuple):
    """The number of a worker, and what it can get of the chain."""

    worker: int
    covered: Covered


class Ask(NamedTuple):
    """What a router knows of a request: its place in line, its chain, the tokens of its prompt."""

    number: int
    keys: list[bytes]
    tokens: int


Router = Callable[[Fleet, Ask], Routed]


def round_robin(fleet: Fleet, ask: Ask) -> Routed:
    """Give every worker its turn."""
    return _to(fleet, ask, ask.number % len(fleet.workers))


def least_queue(fleet: Fleet, ask: Ask) -> Routed:
    """Choose the worker with the least prefill work before it; the fewest requests where equal."""
    queues = [(w.engine.queue_s, w.requests, i) for i, w in enumerate(fleet.workers)]
    return _to(fleet, ask, min(queues)[2])


def longest_prefix(fleet: Fleet, ask: Ask) -> Routed:
    """Choose the worker whose own tiers hold most of the chain; the least queue where equal."""
    held = [len(w.memory.cover(ask.keys).tiers) for w in fleet.workers]
    choice = min(range(len(held)), key=lambda i: (-held[i], fleet.workers[i].engine.queue_s, i))
    return _to(fleet, ask, choice)


def soonest(fleet: Fleet, ask: Ask) -> Routed:
    """Choose the worker that would be done first: its queue, then what it has to compute."""
    prefill, block = fleet.hardware.prefill, fleet.hardware.world.block_tokens
    best: tuple[float, int, Covered] | None = None
    for number, worker in enumerate(fleet.workers):
        covered = fleet.cover(worker, ask.keys)
        held = min(covered.blocks * block, ask.tokens - 1)
        done = worker.engine.queue_s + prefill.seconds(ask.tokens - held, held)
        if best is None or done < best[0]:
            best = done, number, covered
    return Routed(best[1], best[2]) if best else _to(fleet, ask, 0)


ROUTERS: dict[str, Router] = {
    "round_robin": round_robin,
    "least_queue": least_queue,
    "longest_prefix": longest_prefix,
    "soonest": soonest,
}


def router(name: str) -> Router:
    """Return the router of this name. Raises ConfigError."""
    if name not in ROUTERS:
        raise ConfigError(f"--router: {name!r} is not known; use one of: {', '.join(ROUTERS)}")
    return ROUTERS[name]


def _to(fleet: Fleet, ask: Ask, worker: int) -> Routed:
    return Routed(worker, fleet.cover(fleet.workers[worker], ask.keys))
