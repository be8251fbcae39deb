"""The background work of a segment tier: probe, learn from index objects, retire and delete.

One thread, never a request, lists index objects each `poll_s` and while the medium is away probes
it. Deletion is in three steps: a segment is *retired* by an index object, so that readers forget
it; then the thread waits until every reader has listed that and has ended its reads; then it
deletes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import NamedTuple

from holdfast.errors import Outcome
from holdfast.tiers.segments.bounds import SpaceLimits, responsible_writer, to_retire
from holdfast.tiers.segments.deletions import DueDeletions
from holdfast.tiers.segments.format import (
    AGE_CLASSES,
    INDEX,
    IndexName,
    IndexObject,
    SegmentName,
    parse_index_name,
    parse_segment_name,
)
from holdfast.tiers.segments.index import SegmentIndex, SegmentState
from holdfast.tiers.segments.index_log import IndexPublisher, IndexReader
from holdfast.tiers.segments.lost_objects import LostObjects
from holdfast.tiers.segments.medium import MediumAnswer, MediumProbe, SegmentMedium
from holdfast.tiers.segments.medium_health import MediumHealth
from holdfast.tiers.segments.retired import RetiredSegments
from holdfast.tiers.segments.writer import SegmentWriter
from holdfast.wire.remote.stream import Deadline

HEARTBEAT_S = 900.0
"""A writer publishes an index object at least this often, so that others know that it lives."""

DEAD_S = 3 * HEARTBEAT_S
"""A writer without a new index object for this long is dead, by the reader's own clock."""

SWEEP_S = 6 * 3600.0
"""Interval at which objects that no index object lists are looked for, in seconds."""

SWEEP_FIRST_S = 3600.0
"""Time from the start to the first sweep: a node that restarts every day sweeps, too."""

SWEEP_AGE_S = 3600.0
"""Such an object is deleted only if it is older than this, in seconds."""

_CALL_S = 20.0
"""Deadline of one call of the background thread, in seconds."""

_REFUSED_S = 60.0
"""Interval at which a medium that was refused is probed again, in seconds."""

_log = logging.getLogger(__name__)


class UpkeepLimits(NamedTuple):
    """`poll_s`: interval between two listings. `read_s`: the longest read of any reader."""

    poll_s: float
    read_s: float
    space: SpaceLimits


class SegmentUpkeep:
    """Owns the background thread of one tier, and what only it knows."""

    def __init__(
        self,
        medium: SegmentMedium,
        index: SegmentIndex,
        publisher: IndexPublisher,
        reads: MediumHealth,
        limits: UpkeepLimits,
        writer: SegmentWriter,
    ) -> None:
        self._medium = medium
        self._index = index
        self._publisher = publisher
        self._reads = reads
        self._limits = limits
        self._writer = writer.id
        self._clock = writer.clock
        self._wall_s = writer.wall_s
        self._condition = threading.Condition()
        self._is_started = self._closing = self._is_wanted = False
        """`_is_started`: the medium was probed and listed once. `_is_wanted`: a listing is
        waited for."""
        self._listings = 0
        """Listings that have begun."""
        self._ended = (0, False)
        """The listing that ended last, and whether the medium answered it."""
        self._thread: threading.Thread | None = None
        self._probe = MediumProbe(Outcome.LATE, why="not probed yet")
        self._lost_objects = LostObjects()
        self._heard_s: dict[str, float] = {}
        """By writer: when a new index object of it was found last, by this process's clock."""
        self._retired = RetiredSegments()
        self._removed: dict[SegmentName, bytes] = {}
        """Keys of deleted blocks of segments that no index object was found for yet."""
        self._deletions = DueDeletions(medium, writer.clock)
        """Segments that this writer has retired, and objects that no index object lists."""
        self._swept_s = writer.clock.now() - SWEEP_S + SWEEP_FIRST_S
        self.deleted = 0
        """Segments deleted since start."""

    # What the tier asks.

    def await_start(self, deadline: Deadline) -> bool:
        """Wait until the medium was listed once, or refused; return whether it was, in time.

        Ends with `close`, too.
        """
        with self._condition:
            self._condition.wait_for(
                lambda: self._is_started or self._probe.refusal or self._closing,
                max(0.0, deadline.at - time.monotonic()),
            )
            return self._is_started or bool(self._probe.refusal)

    @property
    def refusal(self) -> str:
        """Why the medium must not be used; empty if it may be."""
        return self._probe.refusal

    @property
    def read_only(self) -> str:
        """What the credentials do not permit; empty if they permit everything."""
        return self._probe.read_only

    @property
    def refused_bytes(self) -> int:
        """Bytes of segments that were retired here and could not be deleted."""
        return self._deletions.refused_bytes

    def wake(self) -> None:
        """Run a round of the thread now."""
        with self._condition:
            self._condition.notify_all()

    def refresh(self, deadline: Deadline) -> bool:
        """List index objects; return whether the medium answered in time.

        Waits for a listing that begins after the call. Concurrent calls share one.
        """
        with self._condition:
            wanted = self._listings + 1
            self._is_wanted = True
            self._condition.notify_all()
            self._condition.wait_for(
                lambda: self._closing or self._ended[0] >= wanted,
                max(0.0, deadline.at - time.monotonic()),
            )
            number, is_answered = self._ended
        return number >= wanted and is_answered

    def discard(self, name: SegmentName) -> None:
        """Delete an object later that may have been stored, although its put failed."""
        self._deletions.add(name.path, self._wait_s())

    # The thread.

    def start(self, threads: ThreadPoolExecutor, name: str) -> None:
        """Start the thread; `threads` read index objects in parallel."""
        reader = IndexReader(self._medium, threads)
        self._thread = threading.Thread(
            target=self._run, args=(reader,), name=f"holdfast-{name}-upkeep", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread; a call in progress ends by its deadline or with the medium."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self, reader: IndexReader) -> None:
        while not self._closing:
            wait_s = self._limits.poll_s
            with self._condition:
                self._is_wanted = False
            try:
                if not self._is_started or self._probe.refusal:
                    self._begin(reader)
                else:
                    self._round(reader)
                if self._probe.refusal:
                    wait_s = min(_REFUSED_S, wait_s)
                elif not self._is_started or not self._reads.is_closed():
                    wait_s = 0.1
            except Exception:  # noqa: BLE001  # the thread must go on
                _log.exception("the upkeep of a segment tier failed")
            with self._condition:
                if not self._closing:
                    self._condition.wait(0.0 if self._is_wanted else wait_s)

    def _begin(self, reader: IndexReader) -> None:
        """Probe the medium and list it for the first time."""
        if not self._reads.allows():
            return
        found: list[MediumProbe] = []

        def probe() -> MediumAnswer:
            found.append(self._medium.probe(Deadline.within(_CALL_S)))
            return MediumAnswer(found[0].outcome, why=found[0].why)

        answer = self._reads.call(probe)
        if answer.outcome is not Outcome.OK:
            return
        if found[0].refusal and found[0].refusal != self._probe.refusal:
            _log.error("the medium is not used: %s", found[0].refusal)
        with self._condition:
            self._probe = found[0]
            self._condition.notify_all()
        if not self._probe.refusal and self._poll(reader):
            with self._condition:
                self._is_started = True
                self._condition.notify_all()

    def _round(self, reader: IndexReader) -> None:
        """Do what is due, with listings that are waited for in between; stop if one fails."""
        if not self._reads.allows() or not self._poll(reader):
            return
        if self._probe.read_only:
            return
        now_s = self._clock.now()
        if time.monotonic() - self._publisher.published_s > HEARTBEAT_S:
            self._publisher.publish(IndexObject(), Deadline.within(_CALL_S))
        if not self._poll_if_wanted(reader):
            return
        states = {state.name: state for state in self._index.segments()}
        space = self._limits.space.without(self.refused_bytes)
        if self._deletions.refuses_all:  # retiring frees no room: keep what can be read
            space = space._replace(segments=int(self._deletions.is_trial_due))
        chosen = to_retire([*states.values()], self._is_mine, space, self._wall_s())
        if leaving := self._index.begin_leaving(chosen, self._wall_s()):
            try:
                self._retire([states[name] for name in leaving])
            finally:
                self._index.end_leaving(leaving)
        if not self._poll_if_wanted(reader):
            return
        self._delete_due()
        if not self._poll_if_wanted(reader):
            return
        for name in self._publisher.merge(self._existing, Deadline.within(_CALL_S)):
            self._deletions.add(name.path, self._wait_s())
        if not self._poll_if_wanted(reader):
            return
        if now_s - self._swept_s > SWEEP_S and not reader.unconfirmed:
            self._swept_s = now_s
            self._sweep()

    def _poll_if_wanted(self, reader: IndexReader) -> bool:
        """List now if a listing is waited for; return False if the medium did not answer."""
        with self._condition:
            is_wanted, self._is_wanted = self._is_wanted, False
        return not is_wanted or self._poll(reader)

    def _poll(self, reader: IndexReader) -> bool:
        """Learn from new index objects; return whether the medium answered."""
        with self._condition:
            self._listings += 1
            number = self._listings
        is_answered = False
        try:
            is_answered = self._list(reader)
        finally:
            with self._condition:
                self._ended = number, is_answered
                self._condition.notify_all()
        return is_answered

    def _list(self, reader: IndexReader) -> bool:
        deadline = Deadline.within(_CALL_S)
        found: list[tuple[IndexName, IndexObject]] = []
        listed: set[IndexName] = set()
        ended_s = self._ended_s()
        own = {name for name in self._publisher.current() if name.created_s >= ended_s}

        def poll() -> MediumAnswer:
            answer, new, names = reader.poll(self._publisher, deadline)
            found.extend(new)
            listed.update(names)
            return answer

        answer = self._reads.call(poll)
        now_s = self._clock.now()
        for name in listed:
            self._heard_s.setdefault(name.writer, now_s)
        self._heard_s.update((name.writer, now_s) for name, _ in found)
        self._learn([content for _, content in found])
        if answer.outcome is Outcome.OK:
            writers = {name.writer for name in listed}
            self._heard_s = {
                writer: at_s
                for writer, at_s in self._heard_s.items()
                if writer in writers or now_s - at_s <= DEAD_S
            }
            self._forget_lost(own, listed)
        return answer.outcome is Outcome.OK

    def _forget_lost(self, own: set[IndexName], listed: set[IndexName]) -> None:
        """Forget segments that left the medium without a word, if its index objects have, too."""
        names = [state.name for state in self._index.segments()]
        suspects = self._lost_objects.suspects(own, listed, names)
        if not suspects:
            return
        there: set[str] = set()
        for age_class in AGE_CLASSES:
            answer = self._medium.list(age_class, Deadline.within(_CALL_S))
            if answer.outcome is not Outcome.OK:
                return  # the next round looks again
            there.update(answer.names)
        lost = [name for name in suspects if name.path not in there]
        blocks = sum(map(self._index.forget_segment, lost))
        self._lost_objects.note_search()
        _log.warning(
            "index objects are gone though no node deleted them; so are segments=%d blocks=%d: "
            "does another program, or a lifecycle rule, delete here?",
            len(lost),
            blocks,
        )

    def _learn(self, contents: Sequence[IndexObject]) -> None:
        """Learn what left, then what is new: index objects come in any order.

        A deleted copy of a block never takes the place of one that was written after the deletion.
        """
        wall_s, now_s = self._wall_s(), self._clock.now()
        for removed in chain.from_iterable(content.removed for content in contents):
            if (name := parse_segment_name(removed.segment)) is not None:
                self._index.forget_blocks(name, removed.keys)
                self._removed[name] = self._removed.get(name, b"") + removed.keys
        retired = [path for content in contents for path in content.retired]
        self._retired.add(retired, wall_s)
        for path in retired:
            if (name := parse_segment_name(path)) is not None:
                self._index.forget_segment(name)
        durable = chain.from_iterable(content.durable for content in contents)
        self._index.keep([each for each in durable if each.path not in self._retired], wall_s)
        for segment in chain.from_iterable(content.segments for content in contents):
            name = segment.name
            if segment.path not in self._retired and name.expires_s() > wall_s:
                self._index.add(segment, now_s, self._removed.get(name, b""))
        known = {state.name for state in self._index.segments()} if self._removed else set()
        self._removed = {
            name: keys
            for name, keys in self._removed.items()
            if name not in known and name.path not in self._retired and name.expires_s() > wall_s
        }

    def _retire(self, states: Sequence[SegmentState]) -> None:
        """Publish that segments leave; delete them once no reader uses them."""
        paths = [state.name.path for state in states]
        answer = self._publisher.publish(IndexObject(retired=paths), Deadline.within(_CALL_S))
        if answer.outcome is not Outcome.OK:
            return
        self._retired.add(paths, self._wall_s())
        for state in states:
            self._index.forget_segment(state.name)
            self._deletions.add(state.name.path, self._wait_s(), state.nbytes)

    def _delete_due(self) -> None:
        deleted = self._deletions.delete_due()
        self.deleted += sum(parse_segment_name(path) is not None for path in deleted)
        names = (parse_index_name(path) for path in deleted)
        self._publisher.forget([name for name in names if name is not None])

    def _sweep(self) -> None:
        """Find segments that no index object lists, and index objects older than every segment.

        The writer of such a segment died before it published it.
        """
        known = {state.name for state in self._index.segments()}
        wall_s = self._wall_s()
        for age_class in AGE_CLASSES:
            answer = self._medium.list(age_class, Deadline.within(_CALL_S))
            if answer.outcome is not Outcome.OK:
                return
            for path in answer.names:
                name = parse_segment_name(path)
                if name is None or name in known or not self._is_mine(name):
                    continue
                if name.created_s < wall_s - SWEEP_AGE_S:
                    self._deletions.add(path, 0.0)
        ended_s = self._ended_s()
        for path in self._medium.list(INDEX, Deadline.within(_CALL_S)).names:
            listing = parse_index_name(path)
            if listing and listing.created_s < ended_s and self._is_mine(listing):
                self._deletions.add(path, 0.0)

    def _ended_s(self) -> float:
        """Return the time before which index objects list nothing that is left: they are swept."""
        return self._wall_s() - max(AGE_CLASSES.values()) - SWEEP_AGE_S

    def _existing(self, content: IndexObject) -> IndexObject:
        """Return what of an index object still says something about objects that exist.

        All that concerns a young segment is kept: a put may have listed the segment, and not added
        it to this store's index yet.
        """
        known = {state.name.path for state in self._index.segments()}
        leaving = self._deletions.waiting()
        young_s = self._wall_s() - SWEEP_AGE_S

        def is_young(path: str) -> bool:
            name = parse_segment_name(path)
            return name is not None and name.created_s >= young_s

        return IndexObject(
            [each for each in content.segments if each.path in known or is_young(each.path)],
            [each for each in content.removed if each.segment in known or is_young(each.segment)],
            [path for path in content.retired if path in leaving or is_young(path)],
            durable=[
                each
                for each in content.durable
                if each.until_s > self._wall_s() and (each.path in known or is_young(each.path))
            ],
        )

    def _live_writers(self) -> Iterable[str]:
        now_s = self._clock.now()
        heard = [writer for writer, at_s in self._heard_s.items() if now_s - at_s <= DEAD_S]
        return [*heard, self._writer]

    def _is_mine(self, name: SegmentName | IndexName) -> bool:
        """Return whether this writer deletes an object: its own, or one of a dead writer."""
        return responsible_writer(name.writer, self._live_writers()) == self._writer

    def _wait_s(self) -> float:
        """Return the time after which no reader uses what was retired: two listings and a read."""
        return 2 * self._limits.poll_s + self._limits.read_s
