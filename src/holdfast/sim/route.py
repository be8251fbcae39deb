"""Which worker gets a request: simple routers over the same fleet."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
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
    return _to(fleet, ask, _longest(fleet, ask, range(len(fleet.workers))))


def two_choices(draw: int = 0) -> Router:
    """Draw two workers and choose as `longest_prefix` does: load is spread, and locality half kept.

    After Mitzenmacher, "The power of two choices in randomized load balancing" (2001). What is
    drawn is a hash of `draw` and the request's place in line, so a run repeats itself.
    """

    def route(fleet: Fleet, ask: Ask) -> Routed:
        place = (draw << 32 | ask.number).to_bytes(8, "little")
        digest = hashlib.blake2b(place, digest_size=8).digest()
        count = len(fleet.workers)
        first = int.from_bytes(digest[:4], "little") % count
        second = (first + 1 + int.from_bytes(digest[4:], "little") % max(1, count - 1)) % count
        return _to(fleet, ask, _longest(fleet, ask, (first, second)))

    return route


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
    "two_choices": two_choices(),
    "soonest": soonest,
}


def router(name: str) -> Router:
    """Return the router of this name. Raises ConfigError."""
    if name not in ROUTERS:
        raise ConfigError(f"--router: {name!r} is not known; use one of: {', '.join(ROUTERS)}")
    return ROUTERS[name]


def _longest(fleet: Fleet, ask: Ask, among: Iterable[int]) -> int:
    def merit(number: int) -> tuple[int, float, int]:
        worker = fleet.workers[number]
        return -len(worker.memory.cover(ask.keys).tiers), worker.engine.queue_s, number

    return min(among, key=merit)


def _to(fleet: Fleet, ask: Ask, worker: int) -> Routed:
    return Routed(worker, fleet.cover(fleet.workers[worker], ask.keys))
