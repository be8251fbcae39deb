"""Announce a registered target's state: joining, serving, and draining before it ends."""

from __future__ import annotations

import asyncio
import contextlib

from holdfast.membership.etcd_source import EtcdRegistration
from holdfast.membership.members import MemberState
from holdfast.store.store import Store

_POLL_S = 0.2


class RegisteredTarget:
    """Keeps the state of a list entry current while its target runs. The caller owns the entry."""

    def __init__(self, store: Store, entry: EtcdRegistration, drain_s: float) -> None:
        self._store = store
        self._entry = entry
        self._drain_s = drain_s

    async def until(self, over: asyncio.Event) -> None:
        """Wait for `over`, announce draining, and return `drain_s` later or if `over` is set again.

        While it drains, the target still serves, and clients place no new segments on it.
        """

        async def join() -> None:
            while not self._store.recovery.wait(0):  # noqa: ASYNC110  # a thread's end sets no event
                await asyncio.sleep(_POLL_S)
            self._entry.announce(MemberState.SERVING)

        joining = asyncio.get_running_loop().create_task(join())
        await over.wait()
        joining.cancel()
        self._entry.announce(MemberState.DRAINING)
        over.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), self._drain_s)
