"""Named points in the code where a test may end this process, as `kill -9` would.

    HOLDFAST_FAILPOINT=region_seal:3 holdfast serve     ends at the third region that is sealed

Off, a point costs one call that looks at an empty dict. Nothing is flushed, closed or told: what a
crash at that very line leaves behind is what is left.
"""

from __future__ import annotations

import os
import signal

POINTS = (
    "disk_open",
    "region_header",
    "extent_write",
    "region_seal",
    "region_sealed",
    "snapshot",
    "snapshot_written",
    "commit_packed",
    "commit_published",
    "descent_written",
    "climb_read",
)
"""Every point there is.

`disk_open`: a new incarnation is on the disk. `region_header`: a region has one, and no record yet.
`extent_write`: before any write. `region_seal`, `region_sealed`, `snapshot`, `snapshot_written`:
before and after a footer and a snapshot. `commit_packed`: records are whole and not in the index;
`commit_published`: they are. `descent_written`: copies lie below, and the index does not know.
`climb_read`: records lie in memory, not verified yet.
"""

_armed: dict[str, int] = {}


def arm(text: str) -> None:
    """Arm one point, `NAME` or `NAME:N` for its N-th pass; the empty text disarms all.

    Raises ValueError for a name or a number that there is not.
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
