"""A batch between nodes, cut into lanes, each over a connection of its own, and into messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeAlias, TypeVar

from holdfast.limits import MIB

SPLIT_BYTES = 8 * MIB
"""From here on a batch goes over several connections at once."""

R = TypeVar("R")
Lane: TypeAlias = list[slice]
"""Messages that follow each other, as spans of the batch."""


def lanes_of(sizes: Sequence[int], ways: int, message_bytes: int) -> list[Lane]:
    """Cut records of these sizes into up to `ways` lanes of about equal bytes.

    A message has at most `message_bytes`, or one record.
    """
    total = max(sum(sizes), 1)
    if total < min(SPLIT_BYTES, message_bytes):
        return [[slice(0, len(sizes))]] if sizes else []
    lanes: list[Lane] = [[] for _ in range(ways if total >= SPLIT_BYTES else 1)]
    start = lane = seen = message = 0
    for end, size in enumerate(sizes):
        own = min(seen * len(lanes) // total, len(lanes) - 1)
        if end > start and (own != lane or message + size > message_bytes):
            lanes[lane].append(slice(start, end))
            start, message = end, 0
        lane, seen, message = own, seen + size, message + size
    lanes[lane].append(slice(start, len(sizes)))
    return [lane for lane in lanes if lane] if sizes else []


def is_one_message(lanes: Sequence[Lane]) -> bool:
    """Return whether all of a batch is one message."""
    return len(lanes) == 1 and len(lanes[0]) == 1


def abreast(
    work: Callable[[Lane], R], lanes: Sequence[Lane], beside: ThreadPoolExecutor | None
) -> list[R]:
    """Work on all lanes at once, on the first in this thread; return when all have ended."""
    if beside is None:
        return [work(lane) for lane in lanes]
    others = [(lane, beside.submit(work, lane)) for lane in lanes[1:]]
    try:
        done = [work(lane) for lane in lanes[:1]]
        return done + [
            work(lane) if future.cancel() else future.result() for lane, future in others
        ]
    finally:
        wait([future for _, future in others if not future.cancel()])
