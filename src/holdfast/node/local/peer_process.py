"""Watch the process of a connection by pidfd, so that a reused process id does not mislead."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select


class PeerProcess:
    """The process with this id. Id 0, or a process in another pid namespace, never ends."""

    def __init__(self, pid: int) -> None:
        self._fd = -1
        with contextlib.suppress(OSError):
            self._fd = os.pidfd_open(pid) if pid else -1

    async def gone(self, within_s: float) -> bool:
        """Return whether it ends within this time; False if it cannot be watched."""
        if self._fd < 0:
            return False
        loop = asyncio.get_running_loop()
        end_s = loop.time() + within_s
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        while not poll.poll(0):
            if loop.time() >= end_s:
                return False
            await asyncio.sleep(0.02)
        return True

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
