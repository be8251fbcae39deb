"""Failpoints: named points in the code at which a test can end this process, as `kill -9` would.

    HOLDFAST_FAILPOINT=region_close:3 holdfast serve     the process ends at the third closed region

A disabled point costs one lookup in an empty dict. Nothing is flushed or closed, so the state on
disk is that of a crash at this line.
"""

from __future__ import annotations

import os
import signal

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
)
"""The names of all failpoints.

`disk_open`: the disk has a new incarnation. `region_header`: a region has a header and no record.
`extent_write`: before any write. `region_close`, `region_closed`: before and after a region's
footer. `snapshot`, `snapshot_written`: before and after a snapshot. `commit_packed`: records are
complete and not in the index; `commit_published`: they are in it. `write_behind_written`: a tier
has new copies that are not in the index. `promotion_read`: a promotion has read records into memory
and not verified them.
"""

_armed: dict[str, int] = {}


def arm(text: str) -> None:
    """Arm one point, `NAME` or `NAME:N` for its N-th pass; an empty text disarms all.

    Raises ValueError for an unknown name and for an N below 1.
    """
    name, _, number = text.partition(":")
    if text and name not in POINTS:
        raise ValueError(f"{name!r} is no failpoint; use one of: {', '.join(POINTS)}")
    passes = int(number) if number else 1
    if passes < 1:
        raise ValueError(f"{text!r}: a pass is counted from 1")
    _armed.clear()
    if text:
        _armed[name] = passes


def reach(name: str) -> None:
    """Pass a point; ends the process if it is armed and this is the pass."""
    if name in _armed:
        _armed[name] -= 1
        if not _armed[name]:
            os.kill(os.getpid(), signal.SIGKILL)
