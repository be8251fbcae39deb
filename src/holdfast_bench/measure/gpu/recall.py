"""How soon a domain gets memory that the engine of another domain has page-locked.

The node is real, and io_uring pins the memory in place of a GPU: the figure has the node's work and
the engine's thread in it, but not the time that a GPU's driver takes to unlock. Each round has a
node of its own, because memory that was asked back is not locked again for some seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from statistics import median

from holdfast.errors import HoldfastError
from holdfast.limits import MIB
from holdfast.report import Row, at_most, not_measured
from holdfast.testing.locking_engine import LockingEngine
from holdfast.testing.payloads import key_of
from holdfast.testing.pinned_device import PinnedDevice
from holdfast.wire.local.messages import Fetch, Fetched, Release, Released
from holdfast_bench.harness.node import NodeUnderTest, call
from holdfast_bench.measure.gpu.setting import Setting

HOST_BYTES = 16 * MIB
LOCKED_BYTES = 6 * MIB
"""Memory that a domain locks: RLIMIT_MEMLOCK, which bounds what io_uring pins, is often 8 MiB."""

PAYLOAD_BYTES = 120_000
CONTEXT_BLOCKS = 32
CONTEXTS = 4
"""Contexts of a domain: with `CONTEXT_BLOCKS` each, nearly all of the node's memory."""

SHARE = 1000.0
"""The second domain may have this many times as much memory as the first, so it takes it."""

ROUNDS, TOY_ROUNDS = 9, 1
GOAL_S = 0.3
WORST_S = 17.0
"""Longest wait: a node asks for 5 s, then waits 10 s for the engine's device, and for its threads.
"""

ROUND_S = 6.0
WAIT_S = 20.0
_RETRY_S = 0.001


def rows(setting: Setting) -> Iterator[Row]:
    """Yield the time from a reservation that got too little to the next that got more."""
    try:
        PinnedDevice().close()
    except OSError as error:
        yield not_measured("gpu.recall", f"io_uring cannot be used here: {error.strerror}")
        return
    waits_s: list[float] = []
    for number in range(TOY_ROUNDS if setting.rehearse else ROUNDS):
        if waits_s and setting.left_s() < ROUND_S:
            break
        waits_s.append(_wait_s(setting, number))
    yield at_most("gpu.recall", median(waits_s), "s", GOAL_S, rounds=len(waits_s))
    yield at_most("gpu.recall.worst", max(waits_s), "s", WORST_S, rounds=len(waits_s))


def _wait_s(setting: Setting, number: int) -> float:
    """Let one domain lock memory, and another one take it; return how long that one waited."""
    folder = setting.folder / f"recall-{number}"
    with (
        NodeUnderTest(folder, settings=_settings(setting)) as node,
        closing(LockingEngine(node.address, "first", PAYLOAD_BYTES)) as first,
        closing(LockingEngine(node.address, "second", PAYLOAD_BYTES)) as second,
    ):
        _fill(first, 1)
        first.memory.lock_at_start(WAIT_S)
        locked = first.memory.locked_bytes
        if locked < LOCKED_BYTES:
            why = first.memory.failure or "the node granted less"
            raise HoldfastError(f"only {locked} bytes could be locked: {why}")
        first.memory.start()
        wait_s = _fill(second, 2)
        if first.memory.locked_bytes == locked:
            raise HoldfastError(f"no memory was asked back: {locked} bytes are still locked")
        return wait_s


def _fill(engine: LockingEngine, domain: int) -> float:
    """Save contexts; return the longest time in which the node had no place for any block.

    The engine leases what it has saved, so that the node does not evict it for the next context.
    """
    longest_s, until_s, client = 0.0, time.monotonic() + WAIT_S, engine.client
    leases = list[int]()
    for number in range(CONTEXTS):
        keys = [key_of(at, 1000 * domain + number) for at in range(CONTEXT_BLOCKS)]
        saved = engine.save(keys)
        short_s = time.monotonic()
        while saved < CONTEXT_BLOCKS:
            if time.monotonic() > until_s:
                raise HoldfastError(f"{saved} blocks of context {number} found no room")
            time.sleep(_RETRY_S)
            if more := engine.save(keys):
                longest_s = max(longest_s, time.monotonic() - short_s)
                saved, short_s = saved + more, time.monotonic()
        leases.append(call(client, Fetch(b"".join(keys), WAIT_S), Fetched).lease)
    for lease in leases:
        call(client, Release(lease), Released)
    return longest_s


def _settings(setting: Setting) -> dict[str, object]:
    """Return a node's settings: memory only, and two domains."""
    domains = {}
    for number, name in enumerate(("first", "second")):
        key = setting.folder / f"{name}.key"
        key.write_text(f"{number:064x}")
        key.chmod(0o600)
        domains[name] = {"key_file": str(key), "share": SHARE**number}
    host = {"kind": "host", "capacity": HOST_BYTES, "lock": LOCKED_BYTES}
    return {"domains": domains, "tiers": [host]}
