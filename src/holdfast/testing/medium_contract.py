"""The contract of `tiers.segments.medium.SegmentMedium` as tests: a subclass tests one medium.

    class TestMyMedium(MediumContract):
        def make_medium(self, folder):
            return MyMedium(folder)

pytest collects the inherited tests. `SharedTierContract` tests a tier on the medium, with servers
that die and stall.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import pytest

from holdfast.errors import Outcome
from holdfast.limits import KIB, MIB
from holdfast.tiers.segments.medium import SegmentMedium
from holdfast.wire.remote.stream import Deadline


def _data(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)  # noqa: S311  # a test replays


class MediumContract:
    """The tests; a subclass makes the medium, empty at first and the same for one `folder`.

    `deadline_s`: deadline of every call.
    """

    deadline_s: ClassVar[float] = 20.0

    def make_medium(self, folder: Path) -> SegmentMedium:
        """Return a new medium; those of one `folder` share their objects."""
        raise NotImplementedError

    def within(self) -> Deadline:
        """Return the deadline of one call."""
        return Deadline.within(self.deadline_s)

    @pytest.fixture
    def medium(self, tmp_path: Path) -> Iterator[SegmentMedium]:
        """A medium for one test."""
        with closing(self.make_medium(tmp_path)) as medium:
            yield medium

    def put(self, medium: SegmentMedium, name: str, data: bytes) -> Outcome:
        """Put an object that consists of one part."""
        return medium.put(name, [memoryview(data)], self.within()).outcome

    def test_it_is_a_medium(self, medium: SegmentMedium) -> None:
        assert isinstance(medium, SegmentMedium)
        assert medium.describe()

    @pytest.mark.parametrize("nbytes", [1, 4 * KIB, 700_001, 9 * MIB])
    def test_what_was_put_is_read(self, medium: SegmentMedium, nbytes: int) -> None:
        data = _data(nbytes)
        assert self.put(medium, "7d/0a/b", data) is Outcome.OK
        into = memoryview(bytearray(nbytes))
        answer = medium.read("7d/0a/b", 0, [into], self.within())
        assert answer[:2] == (Outcome.OK, nbytes)
        assert bytes(into) == data

    def test_parts_are_joined_and_a_range_is_scattered(self, medium: SegmentMedium) -> None:
        data = _data(3 * MIB)
        view = memoryview(data)
        cuts = [0, 4_096, 1_000_000, 1_000_001, len(data)]
        parts = [view[a:b] for a, b in pairwise(cuts)]
        assert medium.put("a/1", parts, self.within()).outcome is Outcome.OK
        into = [memoryview(bytearray(size)) for size in (5_000, 1, 70_000)]
        answer = medium.read("a/1", 999, into, self.within())
        assert answer[:2] == (Outcome.OK, 75_001)
        assert b"".join(into) == data[999 : 999 + 75_001]

    def test_parts_stay_the_callers(self, medium: SegmentMedium) -> None:
        part = memoryview(bytearray(_data(100_000)))
        before = bytes(part)
        assert medium.put("a/1", [part], self.within()).outcome is Outcome.OK
        assert bytes(part) == before
        part[:] = bytes(len(part))
        into = memoryview(bytearray(100_000))
        medium.read("a/1", 0, [into], self.within())
        assert bytes(into) == before

    def test_a_range_ends_at_the_end_of_the_object(self, medium: SegmentMedium) -> None:
        data = _data(10_000)
        self.put(medium, "a/1", data)
        into = [memoryview(bytearray(4_000)) for _ in range(2)]
        answer = medium.read("a/1", 9_000, into, self.within())
        assert answer[:2] == (Outcome.OK, 1_000)
        assert bytes(into[0][:1_000]) == data[9_000:]
        assert medium.read("a/1", 20_000, into, self.within())[:2] == (Outcome.OK, 0)

    def test_an_absent_object_is_a_miss(self, medium: SegmentMedium) -> None:
        into = [memoryview(bytearray(100))]
        assert medium.read("a/none", 0, into, self.within()).outcome is Outcome.MISS

    def test_the_same_bytes_may_be_put_again(self, medium: SegmentMedium) -> None:
        data = _data(10_000)
        for _ in range(3):
            assert self.put(medium, "a/1", data) is Outcome.OK
        into = memoryview(bytearray(10_000))
        assert medium.read("a/1", 0, [into], self.within()).outcome is Outcome.OK
        assert bytes(into) == data

    def test_names_below_a_prefix_are_listed(self, medium: SegmentMedium) -> None:
        names = [f"index/{writer}/{number:04x}" for writer in ("aa", "ab") for number in range(20)]
        for name in [*names, "indexes/1", "7d/00/1"]:
            assert self.put(medium, name, b"x") is Outcome.OK
        assert list(medium.list("index", self.within()).names) == names
        assert list(medium.list("index/ab", self.within()).names) == names[20:]
        assert sorted(medium.list("", self.within()).names) == sorted(
            [*names, "indexes/1", "7d/00/1"]
        )
        nothing = medium.list("30d", self.within())
        assert (nothing.outcome, list(nothing.names)) == (Outcome.OK, [])

    def test_deleted_objects_are_gone(self, medium: SegmentMedium) -> None:
        for number in range(4):
            self.put(medium, f"a/{number}", b"x")
        assert medium.delete(["a/1", "a/none", "a/3"], self.within()).outcome is Outcome.OK
        assert list(medium.list("a", self.within()).names) == ["a/0", "a/2"]
        into = [memoryview(bytearray(1))]
        assert medium.read("a/1", 0, into, self.within()).outcome is Outcome.MISS
        assert medium.delete([], self.within()).outcome is Outcome.OK

    def test_another_medium_sees_what_was_put(self, medium: SegmentMedium, tmp_path: Path) -> None:
        data = _data(50_000)
        self.put(medium, "a/1", data)
        with closing(self.make_medium(tmp_path)) as other:
            assert list(other.list("a", self.within()).names) == ["a/1"]
            into = memoryview(bytearray(50_000))
            assert other.read("a/1", 0, [into], self.within())[:2] == (Outcome.OK, 50_000)
            assert bytes(into) == data

    def test_a_call_after_its_deadline_is_late(self, medium: SegmentMedium) -> None:
        over = Deadline(time.monotonic() - 1.0)
        into = [memoryview(bytearray(10))]
        assert medium.put("a/1", [memoryview(b"x")], over).outcome is Outcome.LATE
        assert medium.read("a/1", 0, into, over).outcome is Outcome.LATE
        assert medium.list("a", over).outcome is Outcome.LATE
        assert medium.delete(["a/1"], over).outcome is Outcome.LATE

    def test_calls_run_in_parallel(self, medium: SegmentMedium) -> None:
        def visit(seed: int) -> None:
            for turn in range(4):
                name, data = f"a/{seed:x}-{turn}", _data(200_000, 10 * seed + turn)
                assert self.put(medium, name, data) is Outcome.OK
                into = memoryview(bytearray(len(data)))
                assert medium.read(name, 0, [into], self.within()).outcome is Outcome.OK
                assert bytes(into) == data

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(visit, range(8)))
        assert len(medium.list("a", self.within()).names) == 8 * 4

    def test_a_probe_of_a_good_medium_refuses_nothing_and_leaves_nothing(
        self, medium: SegmentMedium
    ) -> None:
        probe = medium.probe(self.within())
        assert (probe.outcome, probe.refusal) == (Outcome.OK, "")
        assert all(finding.ok is not False for finding in probe.findings)
        assert list(medium.list("", self.within()).names) == []

    def test_close_ends_the_calls_in_progress(self, tmp_path: Path) -> None:
        for _ in range(5):
            medium = self.make_medium(tmp_path)

            def list_until_closed(medium: SegmentMedium = medium) -> None:
                while medium.list("", Deadline.within(3_600.0)).outcome is Outcome.OK:
                    pass

            callers = [threading.Thread(target=list_until_closed, daemon=True) for _ in range(8)]
            for caller in callers:
                caller.start()
            self.put(medium, "a/1", b"x")
            medium.close()
            for caller in callers:
                caller.join(60.0)
            assert not any(caller.is_alive() for caller in callers)

    def test_after_close_every_call_is_gone(self, medium: SegmentMedium) -> None:
        medium.close()
        medium.close()
        into = [memoryview(bytearray(10))]
        assert medium.put("a/1", [memoryview(b"x")], self.within()).outcome is Outcome.GONE
        assert medium.read("a/1", 0, into, self.within()).outcome is Outcome.GONE
        assert medium.list("a", self.within()).outcome is Outcome.GONE
        assert medium.delete(["a/1"], self.within()).outcome is Outcome.GONE
        assert medium.probe(self.within()).outcome is Outcome.GONE
        assert medium.describe()
