"""Open stores of this process: closed at exit, and given up in a forked child.

The exit hook runs for `sys.exit`, an exception and the end of the main program, not for signals
that end the process at once, `os._exit` or SIGKILL.
"""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol


class OpenStore(Protocol):
    """The part of a store that this module needs."""

    def close(self) -> None:
        """Close it, within a bounded time."""
        ...

    def give_up_copy(self) -> None:
        """Close the copy of it that a forked child has, without waiting or writing."""
        ...


_stores: dict[int, weakref.ref[OpenStore]] = {}


def add(store: OpenStore) -> None:
    """Note that a store is open."""
    _stores[id(store)] = weakref.ref(store)


def discard(store: OpenStore) -> None:
    """Note that a store is closed."""
    _stores.pop(id(store), None)


def _open_stores() -> list[OpenStore]:
    return [store for known in list(_stores.values()) if (store := known()) is not None]


def _close_all() -> None:
    for store in _open_stores():
        store.close()


def _give_up_copies() -> None:
    for store in _open_stores():
        store.give_up_copy()
    _stores.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_give_up_copies)
