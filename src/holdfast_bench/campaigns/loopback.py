"""A store with a pool tier and the store of its only target, connected over loopback TCP."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from holdfast.clock import ManualClock
from holdfast.keys.keyring import KeyRing
from holdfast.limits import MIB
from holdfast.membership.members import Member
from holdfast.membership.membership import MembershipOptions
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.tiers.breaker import BreakerOptions
from holdfast.tiers.pool.health import HealthOptions
from holdfast.tiers.pool.tier import PoolTier, PoolTierOptions
from holdfast.wire.remote.client import TargetClient
from holdfast_bench.campaigns.campaign import OpenTarget
from holdfast_bench.campaigns.contexts import Contexts

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


class OneMember:
    """A membership source with one target."""

    def __init__(self, address: str) -> None:
        self._member = Member(id="remote", address=address)

    def watch(self, on_members: Callable[[Sequence[Member]], None]) -> None:
        """Call `on_members` once; the list never changes."""
        on_members([self._member])

    def trouble(self) -> str:
        """Return "": this member list has no errors."""
        return ""

    def close(self) -> None:
        """Do nothing: no thread runs."""


class LocalAndRemote:
    """The contexts of the store with the pool tier, and the store of its target."""

    def __init__(self, local: Store, remote: Store, payload_bytes: int) -> None:
        self.local = Contexts(local, payload_bytes)
        self.remote = remote


@contextlib.contextmanager
def local_and_remote(
    target: OpenTarget,
    payload_bytes: int,
    reroute: Callable[[str], str] = lambda address: address,
    ring: KeyRing | None = None,
    deadline_s: float = DEADLINE_S,
) -> Iterator[LocalAndRemote]:
    """Open both stores; they close with the context.

    `reroute` maps the target's address to the one that the pool uses, such as a proxy's. The local
    store seals with `ring` if given; the remote store has none of its keys.
    """
    remote = Store(HOST_BYTES, [], REMOTE_SECRET, StoreOptions(serves_peers=True))
    with contextlib.ExitStack() as undo:
        undo.callback(remote.close)
        remote.start()
        address = reroute(undo.enter_context(target(remote)))
        options = PoolTierOptions(
            deadline_s=deadline_s,
            health=_NO_BREAKER,
            membership=MembershipOptions(ramp_s=0.0),
        )
        pool = PoolTier(
            OneMember(address), lambda m: TargetClient(m.address), options, ManualClock()
        )
        local = Store(HOST_BYTES, [pool], SECRET, StoreOptions(ring=ring))
        undo.callback(local.close)
        local.start()
        yield LocalAndRemote(local, remote, payload_bytes)
