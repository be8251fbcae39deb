"""Objects that a writer deletes from a medium, each at its time, also beside ones that it cannot.

A medium may refuse to delete single objects: a retention lock, a changed owner, a damaged folder. A
batch that fails is halved until the refused names are found. They are put off, so they do not keep
others, and the tier counts their bytes, because they still take room. A medium that refuses several
in a row is asked with one more object now and then, until it deletes one.
"""

from __future__ import annotations

import logging
import threading
from typing import NamedTuple

from holdfast.clock import Clock
from holdfast.errors import Outcome
from holdfast.tiers.segments.medium import SegmentMedium
from holdfast.wire.remote.stream import Deadline

DELETE_MAX = 1_000
"""Most names in one deletion."""

RETRY_S = 600.0
"""Time after which an object is tried again that could not be deleted, in seconds."""

REFUSED_MAX = 3
"""Number of new refused objects in a row after which a medium counts as one that refuses all."""

TRIAL_S = RETRY_S
"""Time after which one more object may be tried on a medium that seems to refuse all, in seconds.
It doubles with each one that is refused, because each can no longer be read."""

TRIAL_MAX_S = 86_400.0
"""Longest such time, in seconds."""

_HALVES_MAX = 64
"""Most calls that look for the refused names of one batch."""

_CALL_S = 20.0
"""Deadline of one batch, and of the search after it failed, in seconds."""

_SECOND_LOOK_S = 5.0
"""Deadline of the calls that tell a refusal from a fault of the network, in seconds."""

_log = logging.getLogger(__name__)


class _Deletion(NamedTuple):
    """When an object is deleted, by the process's clock; its length in bytes, 0 if not known."""

    due_s: float
    nbytes: int
    is_refused: bool = False


class DueDeletions:
    """The objects of one medium that are to be deleted, by path. Thread-safe."""

    def __init__(self, medium: SegmentMedium, clock: Clock) -> None:
        self._medium = medium
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[str, _Deletion] = {}
        self._refused_bytes = 0
        self._refused_in_row = 0
        """New refused objects since an object was deleted."""
        self._trial_s = TRIAL_S
        self._trial_at_s = 0.0
        """When one more object may be tried, if the medium seems to refuse all."""
        self._why = ""
        """Why the last deletion failed; empty once no refused object is left."""

    def add(self, path: str, after_s: float, nbytes: int = 0) -> None:
        """Delete an object `after_s` seconds from now, unless it waits already.

        `nbytes`: its length, if that is to count while it cannot be deleted.
        """
        with self._lock:
            self._waiting.setdefault(path, _Deletion(self._clock.now() + after_s, nbytes))

    def waiting(self) -> set[str]:
        """Return the paths of all objects that are not deleted yet."""
        with self._lock:
            return set(self._waiting)

    @property
    def refused_bytes(self) -> int:
        """Bytes of objects that could not be deleted and are still there, as far as known."""
        with self._lock:
            return self._refused_bytes

    @property
    def refuses_all(self) -> bool:
        """Whether the medium seems to refuse every deletion: more of them free no room."""
        with self._lock:
            return self._refuses_all()

    @property
    def is_trial_due(self) -> bool:
        """Whether to find out with one more object if the medium still refuses every deletion."""
        with self._lock:
            are_refused = all(each.is_refused for each in self._waiting.values())
            is_due = are_refused and self._clock.now() >= self._trial_at_s
            return self._refuses_all() and is_due

    def delete_due(self) -> list[str]:
        """Delete what is due; return the paths of objects that are gone. One thread calls it."""
        now_s = self._clock.now()
        with self._lock:
            due = sorted((each.due_s, path) for path, each in self._waiting.items())
        paths = [path for due_s, path in due[:DELETE_MAX] if due_s <= now_s]
        if not paths:
            return []
        answer = self._medium.delete(paths, Deadline.within(_CALL_S))
        if answer.outcome is Outcome.OK:
            self._note(paths, [])
            return paths
        deleted, refused = self._delete_apart(paths)
        self._note(deleted, refused)
        if refused and not self._why:
            _log.warning(
                "objects=%d cannot be deleted, such as %s: %s; they take room until the medium "
                "permits it, and are tried again every %g s",
                len(refused),
                refused[0],
                answer.why or answer.outcome.value,
                RETRY_S,
            )
            self._why = answer.why or answer.outcome.value
        return deleted

    def _delete_apart(self, paths: list[str]) -> tuple[list[str], list[str]]:
        """Halve a batch that failed; return the paths that were deleted and the ones refused.

        Paths in neither list are left for the next round, also if the medium answers late, or if a
        second look shows that the network failed.
        """
        deadline = Deadline.within(_CALL_S)
        deleted: list[str] = []
        refused: list[str] = []
        middle = len(paths) // 2
        batches = [paths[middle:], paths[:middle]]
        for _ in range(_HALVES_MAX):
            if not batches or deadline.over:
                break
            if not (batch := batches.pop()):
                continue
            outcome = self._medium.delete(batch, deadline).outcome
            if outcome is Outcome.OK:
                deleted += batch
            elif outcome is Outcome.LATE:
                break
            elif len(batch) == 1:
                refused += batch
            else:
                middle = len(batch) // 2
                batches += [batch[middle:], batch[:middle]]
        return deleted, refused if refused and self._is_refused(refused[0]) else []

    def _is_refused(self, path: str) -> bool:
        """Return whether the medium answers and does not delete an object."""
        deadline = Deadline.within(_SECOND_LOOK_S)
        if self._medium.list("probe", deadline).outcome is not Outcome.OK:
            return False
        return self._medium.delete([path], deadline).outcome is Outcome.GONE

    def _note(self, deleted: list[str], refused: list[str]) -> None:
        with self._lock:
            new = sum(not self._waiting[path].is_refused for path in refused)
            if new and self._refuses_all():
                self._trial_s = min(2 * self._trial_s, TRIAL_MAX_S)
            self._refused_in_row = 0 if deleted else self._refused_in_row + new
            if deleted:
                self._trial_s = TRIAL_S
            elif new:
                self._trial_at_s = self._clock.now() + self._trial_s
            for path in deleted:
                self._waiting.pop(path, None)
            for path in refused:
                nbytes = self._waiting[path].nbytes
                self._waiting[path] = _Deletion(self._clock.now() + RETRY_S, nbytes, True)
            left = [each for each in self._waiting.values() if each.is_refused]
            self._refused_bytes = sum(each.nbytes for each in left)
        if not left:
            self._why = ""

    def _refuses_all(self) -> bool:
        """As `refuses_all`. Call under the lock."""
        return self._refused_in_row >= REFUSED_MAX
