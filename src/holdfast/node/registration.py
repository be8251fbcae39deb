"""Announce a registered target's state: joining, serving, and draining before it ends."""

from __future__ import annotations

import asyncio
import contextlib

from holdfast.membership.etcd_source import EtcdRegistration
from holdfast.membership.members import MemberState
from holdfast.store.store import Store

_POLL_S = 0.2


async def until_drained(
    over: asyncio.Event, store: Store, entry: EtcdRegistration, drain_s: float
) -> None:
    """Keep the state of a target's list entry current, which the caller owns, until it may end.

    Waits for `over`, announces draining, and returns `drain_s` later or if `over` is set again.
    While it drains, the target still serves, and clients place no new segments on it.
    """

    async def join() -> None:
        while not store.recovery.wait(0):  # noqa: ASYNC110  # a thread's end sets no event
            await asyncio.sleep(_POLL_S)
        entry.announce(MemberState.SERVING)

    joining = asyncio.get_running_loop().create_task(join())
    await over.wait()
    joining.cancel()
    entry.announce(MemberState.DRAINING)
    over.clear()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(over.wait(), drain_s)
