"""A store with a pool tier, and the store of the one target behind it, over loopback TCP."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from holdfast.clock import ManualClock
from holdfast.limits import MIB
from holdfast.store.keyring import KeyRing
from holdfast.store.store import Store
from holdfast.testing.campaign import OpenTarget
from holdfast.testing.contexts import Contexts
from holdfast.tiers.pool.breaker import BreakerOptions
from holdfast.tiers.pool.health import HealthOptions
from holdfast.tiers.pool.members import Member
from holdfast.tiers.pool.membership import MembershipOptions
from holdfast.tiers.pool.tier import PoolOptions, PoolTier
from holdfast.wire.target import Target

HOST_BYTES = 8 * MIB
DEADLINE_S = 20.0
"""So long a busy machine may take, before what it does counts as what a target did."""

SECRET = {"default": b"s" * 32}
FAR_SECRET = {"default": b"f" * 32}

_NEVER_JUDGED = HealthOptions(
    breaker=BreakerOptions(stall_s=1e9, failures=1 << 30), samples=1 << 30, failure_share_max=1.0
)
"""A target that is damaged all the time must be asked again all the same, however often it was
late on a busy machine: the pool's clock stands still, so no pause would ever end."""


class OneMember:
    """A membership source that knows one target."""

    def __init__(self, address: str) -> None:
        self._member = Member(id="far", address=address)

    def watch(self, told: Callable[[Sequence[Member]], None]) -> None:
        """Tell at once; nothing ever changes."""
        told([self._member])

    def trouble(self) -> str:
        """Nothing is ever wrong."""
        return ""

    def close(self) -> None:
        """Nothing runs."""


class NearAndFar:
    """The store beside an engine, and the store of its target."""

    def __init__(self, near: Store, far: Store, payload_bytes: int) -> None:
        self.near = Contexts(near, payload_bytes)
        self.far = far


@contextlib.contextmanager
def near_and_far(
    target: OpenTarget,
    payload_bytes: int,
    between: Callable[[str], str] = lambda address: address,
    ring: KeyRing | None = None,
    deadline_s: float = DEADLINE_S,
) -> Iterator[NearAndFar]:
    """Open both; `between` may put something in front of the target's address.

    The near one seals with `ring`, if it is given; the far one knows no key of the near one's.
    """
    far = Store(HOST_BYTES, [], FAR_SECRET)
    with contextlib.ExitStack() as undo:
        undo.callback(far.close)
        far.take_foreign()
        far.start()
        address = between(undo.enter_context(target(far)))
        options = PoolOptions(
            deadline_s=deadline_s,
            health=_NEVER_JUDGED,
            membership=MembershipOptions(ramp_s=0.0),
        )
        pool = PoolTier(OneMember(address), lambda m: Target(m.address), options, ManualClock())
        near = Store(HOST_BYTES, [pool], SECRET)
        undo.callback(near.close)
        if ring:
            near.seal_with(ring)
        near.start()
        yield NearAndFar(near, far, payload_bytes)
