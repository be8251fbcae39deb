"""Routers: functions that choose the worker of a request."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

from holdfast.errors import ConfigError
from holdfast.sim.fleet import Fleet, FleetCoverage


class RouteQuestion(NamedTuple):
    """A request as a router sees it: its sequence number, chain and prompt tokens."""

    number: int
    keys: list[bytes]
    tokens: int


Routed: TypeAlias = tuple[int, FleetCoverage]
"""The number of the chosen worker, and its coverage of the chain."""

Router = Callable[[Fleet, RouteQuestion], Routed]


def round_robin(fleet: Fleet, ask: RouteQuestion) -> Routed:
    """Choose the workers in turn."""
    return _to(fleet, ask, ask.number % len(fleet.workers))


def least_queue(fleet: Fleet, ask: RouteQuestion) -> Routed:
    """Choose the worker with the least queued prefill; if equal, with the fewest requests."""
    queues = [(w.engine.queue_s, w.requests, i) for i, w in enumerate(fleet.workers)]
    return _to(fleet, ask, min(queues)[2])


def longest_prefix(fleet: Fleet, ask: RouteQuestion) -> Routed:
    """Choose the worker whose own tiers hold most of the chain; if equal, the shortest queue."""
    return _to(fleet, ask, _longest(fleet, ask, range(len(fleet.workers))))


def two_choices(draw: int = 0) -> Router:
    """Draw two workers at random and choose between them as `longest_prefix` does.

    This spreads load and keeps part of the locality (Mitzenmacher, "The power of two choices in
    randomized load balancing", 2001). The draw is a hash of the seed `draw` and the request's
    sequence number, so a run is reproducible.
    """

    def route(fleet: Fleet, ask: RouteQuestion) -> Routed:
        place = (draw << 32 | ask.number).to_bytes(8, "little")
        digest = hashlib.blake2b(place, digest_size=8).digest()
        count = len(fleet.workers)
        first = int.from_bytes(digest[:4], "little") % count
        second = (first + 1 + int.from_bytes(digest[4:], "little") % max(1, count - 1)) % count
        return _to(fleet, ask, _longest(fleet, ask, (first, second)))

    return route


def soonest(fleet: Fleet, ask: RouteQuestion) -> Routed:
    """Choose the worker with the earliest first token: its queued prefill plus the request's."""
    prefill, block = fleet.hardware.prefill, fleet.hardware.namespace.block_tokens
    choices = []
    for number, worker in enumerate(fleet.workers):
        covered = fleet.cover(worker, ask.keys)
        held = min(len(covered.tiers) * block, ask.tokens - 1)
        done = worker.engine.queue_s + prefill.seconds(ask.tokens - held, held)
        choices.append((done, number, covered))
    return min(choices)[1:]


ROUTERS: dict[str, Router] = {
    "round_robin": round_robin,
    "least_queue": least_queue,
    "longest_prefix": longest_prefix,
    "two_choices": two_choices(),
    "soonest": soonest,
}


def router(name: str) -> Router:
    """Return the router of a name. Raises ConfigError for an unknown one."""
    if name not in ROUTERS:
        raise ConfigError(f"--router: {name!r} is not known; use one of: {', '.join(ROUTERS)}")
    return ROUTERS[name]


def _longest(fleet: Fleet, ask: RouteQuestion, among: Iterable[int]) -> int:
    def rank(number: int) -> tuple[int, float, int]:
        worker = fleet.workers[number]
        return -len(worker.memory.cover(ask.keys).tiers), worker.engine.queue_s, number

    return min(among, key=rank)


def _to(fleet: Fleet, ask: RouteQuestion, worker: int) -> Routed:
    return worker, fleet.cover(fleet.workers[worker], ask.keys)
