"""Stores served over loopback TCP within this process: a target, and a pool tier of one target."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from holdfast.clock import ManualClock
from holdfast.keys.keyring import KeyRing
from holdfast.limits import MIB
from holdfast.membership.members import Member
from holdfast.membership.membership import MembershipOptions
from holdfast.node.remote.server import EntryRules, TargetServer, address_of, bind
from holdfast.node.remote.service import TargetService
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.tiers.breaker import BreakerOptions
from holdfast.tiers.pool.health import HealthOptions
from holdfast.tiers.pool.tier import PoolTier, PoolTierOptions
from holdfast.wire.remote.client import TargetClient
from holdfast_bench.campaigns.contexts import Contexts
from holdfast_bench.harness.pool import ManualMembers

HOST_BYTES = 8 * MIB
DEADLINE_S = 20.0
"""Long enough that a call on a busy machine does not count as a failure of the target."""

SECRET = {"default": b"s" * 32}
REMOTE_SECRET = {"default": b"f" * 32}

_NO_BREAKER = HealthOptions(
    breaker=BreakerOptions(stall_s=1e9, failures=1 << 30), samples=1 << 30, failure_share_max=1.0
)
"""Health options whose circuit breaker never opens: a target that is damaged in every round must
receive requests in the next. The pool's clock stands still, so an open breaker would stay open."""


class LocalAndRemote(NamedTuple):
    """The contexts of the store with the pool tier, and the store of its target."""

    local: Contexts
    remote: Store


@contextlib.contextmanager
def open_target(store: Store) -> Iterator[str]:
    """Serve a store to other nodes on a loopback address; return its `tcp://` address."""
    listener = bind("tcp://127.0.0.1:0")
    server = TargetServer(listener, TargetService(store), EntryRules())
    server.start()
    with contextlib.closing(server):
        yield address_of(listener)


@contextlib.contextmanager
def local_and_remote(
    raw_bytes: int,
    reroute: Callable[[str], str] = lambda address: address,
    ring: KeyRing | None = None,
    deadline_s: float = DEADLINE_S,
) -> Iterator[LocalAndRemote]:
    """Open both stores; they close with the context.

    `reroute` maps the target's address to the one that the pool uses, such as a proxy's. The local
    store seals with `ring` if given; the remote store has none of its keys.
    """
    options = PoolTierOptions(
        deadline_s=deadline_s, health=_NO_BREAKER, membership=MembershipOptions(ramp_s=0.0)
    )
    remote = Store(HOST_BYTES, [], REMOTE_SECRET, StoreOptions(serves_peers=True))
    with contextlib.ExitStack() as undo:
        undo.enter_context(remote).start()
        address = reroute(undo.enter_context(open_target(remote)))
        members = ManualMembers([Member(id="remote", address=address)])
        pool = PoolTier(members, lambda m: TargetClient(m.address), options, ManualClock())
        local = undo.enter_context(Store(HOST_BYTES, [pool], SECRET, StoreOptions(ring=ring)))
        local.start()
        yield LocalAndRemote(Contexts(local, raw_bytes), remote)
