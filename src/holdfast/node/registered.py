"""What a registered target says of itself: joining, serving, and draining before it ends."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

from holdfast.store.store import Store
from holdfast.tiers.pool.members import State

_LOOK_S = 0.2


class Registration(Protocol):
    """This target's entry in the list of members."""

    def announce(self, state: State) -> None:
        """Make a state known soon."""
        ...


class Registered:
    """Keeps the entry's state true while the target runs; the entry itself is the caller's."""

    def __init__(self, store: Store, entry: Registration, drain_s: float) -> None:
        self._store = store
        self._entry = entry
        self._drain_s = drain_s

    async def until(self, over: asyncio.Event) -> None:
        """Return `drain_s` after `over`, or when that is set again: whoever repeats it has no time.

        In between the target serves on and gets nothing new.
        """
        joining = asyncio.get_running_loop().create_task(self._join())
        await over.wait()
        joining.cancel()
        self._entry.announce(State.DRAINING)
        over.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), self._drain_s)

    async def _join(self) -> None:
        """Say that it serves once all that was left on its disks is found again."""
        while not self._store.recovery.wait(0):  # noqa: ASYNC110  # a thread's end sets no event
            await asyncio.sleep(_LOOK_S)
        self._entry.announce(State.SERVING)
