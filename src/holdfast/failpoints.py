"""Failpoints: named points in the code at which a test can end this process, as `kill -9` would.

    HOLDFAST_FAILPOINT=region_close:3 holdfast serve     the process ends at the third closed region

A disabled point costs one lookup in an empty dict. Nothing is flushed or closed, so the state on
disk is that of a crash at this line.
"""

from __future__ import annotations

import os
import signal
import threading

POINTS = (
    "disk_open",
    "region_header",
    "extent_write",
    "region_close",
    "region_closed",
    "snapshot",
    "snapshot_written",
    "commit_packed",
    "commit_published",
    "write_behind_written",
    "promotion_read",
    "move_read",
)
"""The names of all failpoints.

`disk_open`: the disk has a new incarnation. `region_header`: a region has a header, and no record
that was reported. `extent_write`: before any write. `region_close`, `region_closed`: before and
after a region's footer. `snapshot`, `snapshot_written`: before and after a snapshot.
`commit_packed`: records are complete and not in the index; `commit_published`: they are in it.
`write_behind_written`: a tier has new copies that are not in the index. `promotion_read`: a
promotion has read records into memory and not verified them. `move_read`: a move has read records
of one lower tier and not written them to another.
"""

_armed: dict[str, int] = {}
_lock = threading.Lock()


def arm(text: str) -> None:
    """Arm one point, `NAME` or `NAME:N` for its N-th pass; an empty text disarms all.

    Raises ValueError for an unknown name, and for an N that is not a number from 1.
    """
    name, _, number = text.partition(":")
    if text and name not in POINTS:
        raise ValueError(f"{name!r} is no failpoint; use one of: {', '.join(POINTS)}")
    if number and not (number.isdecimal() and int(number)):
        raise ValueError(f"{text!r}: a pass is counted from 1; use {name}:1 for the first")
    with _lock:
        _armed.clear()
        if text:
            _armed[name] = int(number or 1)


def reach(name: str) -> None:
    """Pass a point; ends the process if it is armed and this is the pass."""
    if name in _armed:
        with _lock:
            left = _armed.get(name, 0) - 1  # -1 if another thread has just disarmed it
            if left > 0:
                _armed[name] = left
            elif left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
