"""Which blocks were dropped, so that work which began before a drop does not publish them again.

A drop visits the rows of the index in short critical sections. A read, a save or a recovery that
runs beside it may hold blocks that the drop does not see. So each drop changes a number, the drop
generation of what it names, and older work is not published. The drops file names the drops that
the tiers may not have recorded yet; the next process applies them to what it recovers.

A drive may be away during a drop, and come back. So drops are numbered, and each medium has the
number of the last one that it has recorded: only later ones apply to what it still holds.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from holdfast.blocks.namespace import Namespace
from holdfast.regular_file import read_regular, remove_file, replace_file

EVERYTHING = "*"
"""Names every fingerprint."""

FILE_BYTES_MAX = 8 << 20
VERSION = 1

_log = logging.getLogger("holdfast.store")


class Drops:
    """Drop generations, by fingerprint in hex or `EVERYTHING`.

    State only: the store calls it under its lock.
    """

    def __init__(self) -> None:
        self._generations = Counter[str]()
        self._running = Counter[str]()
        self.last = 0
        """Number of the last drop that has begun or ended."""
        self._last_of: dict[str, int] = {}
        self._recorded: dict[bytes, int] = {}
        """By medium, the number of the last drop that it has recorded."""

    def begin(self, fingerprint: str) -> None:
        """Note that blocks are being dropped; until `end`, none of them is published."""
        self._number(fingerprint)
        self._running[fingerprint] += 1

    def end(self, fingerprint: str) -> None:
        """Note that a drop has visited every row. What began during it is not published either."""
        self._number(fingerprint)
        self._running[fingerprint] -= 1

    def generation(self, namespace: Namespace) -> int:
        """Return a number that changes when a drop of a namespace begins or ends; 0 without one."""
        generations = self._generations
        if not generations:
            return 0
        return generations[EVERYTHING] + generations[namespace.fingerprint.hex()]

    def is_running(self, namespace: Namespace | None = None) -> bool:
        """Return whether blocks of a namespace, or any blocks, are being dropped now."""
        if namespace is None:
            return self._running.total() > 0
        running = self._running
        return running[EVERYTHING] + running[namespace.fingerprint.hex()] > 0

    def note_recorded(self, medium: bytes, number: int) -> None:
        """Note that a medium has recorded which places the drops up to this number freed."""
        self._recorded[medium] = max(number, self._recorded.get(medium, 0))

    def applies(self, namespace: Namespace, medium: bytes) -> bool:
        """Return whether a record of a namespace that a medium still holds was dropped.

        Empty: a medium without a name, on which every drop of this process applies.
        """
        if not self._last_of:
            return False
        names = (EVERYTHING, namespace.fingerprint.hex())
        last = max(self._last_of.get(name, 0) for name in names)
        return last > self._recorded.get(medium, 0)

    def _number(self, fingerprint: str) -> None:
        self._generations[fingerprint] += 1
        self.last += 1
        self._last_of[fingerprint] = self.last


class DropsFile:
    """Drops that tiers may not have recorded yet, in memory and in a small file.

    `file` None: there is no disk tier, and nothing is saved. An entry is added before the blocks
    are forgotten, and removed when every tier has recorded that their places are free. If the
    process ends before that, its entries apply to what the next process recovers: blocks that were
    saved after the drop are lost with it. So until then they are not acknowledged as durable.
    Thread-safe.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._mutex = threading.Lock()
        self._finishing = threading.Lock()
        self._entries: list[str] = []
        self._batches: Sequence[int] = ()
        """By tier, how many write batches had begun when the last drop ended."""

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._entries)

    def names(self, namespace: Namespace) -> bool:
        """Return whether the next process may drop blocks of a namespace."""
        entries = self._entries
        if self._file is None or not entries:
            return False
        return EVERYTHING in entries or namespace.fingerprint.hex() in entries

    def load(self) -> list[str]:
        """Return the fingerprints that an earlier process left; they are entries of this one."""
        if self._file is None:
            return []
        try:
            data: Any = msgspec.json.decode(read_regular(self._file, FILE_BYTES_MAX))
            if not isinstance(data, dict) or data.get("version") != VERSION:
                raise ValueError(f"not version {VERSION}")
            found = msgspec.convert(data["fingerprints"], list[str])
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, RecursionError, msgspec.MsgspecError) as error:
            _log.warning(
                "%s: the list of drops is ignored, so dropped blocks may be held again: %s; drop "
                "them again if they must not be",
                self._file,
                error,
            )
            return []
        with self._mutex:
            self._entries += found
        return found

    def add(self, fingerprint: str) -> None:
        """Add a drop that begins."""
        with self._mutex:
            self._entries.append(fingerprint)
            self._save(self._entries)

    def ended(self, begun: Sequence[int]) -> None:
        """Note that a drop has visited every row; `begun`: write batches so far, by tier."""
        self._batches = begun

    def finish(self, done: Sequence[int], record: Callable[[], bool]) -> None:
        """Have the tiers record what was freed, then remove the entries; call while no drop runs.

        `done`: by tier, how many write batches have ended. A batch frees the places of dropped
        blocks at its end, so those that had begun must have ended. `record` returns whether the
        tiers recorded what was freed. While another call runs, this one does nothing.
        """
        if not self._finishing.acquire(blocking=False):
            return
        try:
            self._finish(done, record)
        finally:
            self._finishing.release()

    def _finish(self, done: Sequence[int], record: Callable[[], bool]) -> None:
        with self._mutex:
            over = list(self._entries)
        if not over or any(n > now for n, now in zip(self._batches, done, strict=False)):
            return
        if not record():
            return
        with self._mutex:
            left = list(self._entries)
            for fingerprint in over:
                left.remove(fingerprint)
            if self._save(left):  # entries apply as long as the file has them
                self._entries = left

    def _save(self, entries: Sequence[str]) -> bool:
        """Write entries to the file; return False after a failure, which is logged."""
        if self._file is None:
            return True
        names = list(dict.fromkeys(entries))
        try:
            if names:
                data = {"version": VERSION, "fingerprints": names}
                replace_file(self._file, msgspec.json.encode(data))
            else:
                remove_file(self._file)
        except OSError as error:
            _log.warning(
                "%s: the list of drops was not saved: %s; if this process is killed now, dropped "
                "blocks may be held again",
                self._file,
                error,
            )
            return False
        return True
