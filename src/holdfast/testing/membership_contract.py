"""The contract of a membership source as tests: a subclass tests one source.

    class TestMySource(MembershipContract):
        def make_source(self): ...
        def publish(self, members): ...
        def spoil(self): ...

pytest collects the inherited tests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from holdfast.membership.members import Member, MemberState
from holdfast.membership.membership import MembershipSource

WITHIN_S = 60.0
"""Timeout of a change that the source must report."""

CLOSED_WITHIN_S = 60.0
"""Maximum duration of `close`, on a busy machine."""

Fact = tuple[str, str]


class ReportedViews:
    """The member lists that a source has reported; a test can wait for the next one."""

    def __init__(self) -> None:
        self.lists: list[tuple[Member, ...]] = []
        self.threads: set[int] = set()
        self._reported = threading.Condition()

    def __call__(self, members: Sequence[Member]) -> None:
        """Receive a list from the source."""
        with self._reported:
            self.lists.append(tuple(members))
            self.threads.add(threading.get_ident())
            self._reported.notify_all()

    def until(self, right: Callable[[tuple[Member, ...]], bool]) -> tuple[Member, ...]:
        """Wait until the latest list is `right`; return it. Fails after `WITHIN_S`."""
        with self._reported:
            arrived = self._reported.wait_for(
                lambda: self.lists and right(self.lists[-1]), WITHIN_S
            )
            assert arrived, f"after {WITHIN_S} s the last of {len(self.lists)} is {self.lists[-1:]}"
            return self.lists[-1]


def wait_for_trouble(source: MembershipSource, *, gone: bool = False) -> str:
    """Wait until the source reports trouble, or with `gone` until it reports none; return it."""
    pause = threading.Event()
    for _ in range(int(WITHIN_S / 0.02)):
        trouble = source.trouble()
        if bool(trouble) != gone:
            return trouble
        pause.wait(0.02)
    raise AssertionError(f"after {WITHIN_S} s the source's trouble is {source.trouble()!r}")


class MembershipContract:
    """The tests; a subclass makes the source and changes the list that it reads."""

    def make_source(self) -> MembershipSource:
        """Return a source of the list that `publish` writes; called after `publish` or `spoil`."""
        raise NotImplementedError

    def publish(self, members: Sequence[Member]) -> None:
        """Replace the list by these members, and undo `spoil`."""
        raise NotImplementedError

    def spoil(self) -> None:
        """Make the list unreadable, or remove it."""
        raise NotImplementedError

    def member(self, number: int) -> Member:
        """Return a member that the source can represent, distinct for each number."""
        return Member(id=f"flash-{number}", address=f"tcp://10.0.0.{number}:7070")

    def facts(self, members: Sequence[Member]) -> set[Fact]:
        """Return the properties of members that the tests compare."""
        return {(m.id, m.address) for m in members if m.state is not MemberState.DEAD}

    def expect(self, heard: ReportedViews, *numbers: int) -> None:
        """Wait until the latest list has exactly these members."""
        right = self.facts([self.member(number) for number in numbers])
        heard.until(lambda members: self.facts(members) == right)

    @pytest.fixture
    def heard(self) -> ReportedViews:
        """The lists that the source under test has reported."""
        return ReportedViews()

    @pytest.fixture
    def source(self, heard: ReportedViews) -> Iterator[MembershipSource]:
        """A source that watches members 1 and 2; closed at the end."""
        self.publish([self.member(1), self.member(2)])
        source = self.make_source()
        source.watch(heard)
        self.expect(heard, 1, 2)
        yield source
        source.close()

    def test_the_whole_list_is_told_at_first(
        self, source: MembershipSource, heard: ReportedViews
    ) -> None:
        first = heard.lists[0]
        assert self.facts(first) == self.facts([self.member(1), self.member(2)])
        assert len(first) == len({member.id for member in first})
        assert source.trouble() == ""

    def test_a_change_is_told_as_the_whole_list(
        self, source: MembershipSource, heard: ReportedViews
    ) -> None:
        self.publish([self.member(number) for number in (1, 2, 3)])
        self.expect(heard, 1, 2, 3)
        self.publish([self.member(3)])
        self.expect(heard, 3)
        assert source.trouble() == ""

    def test_all_lists_come_from_one_thread_of_the_sources_own(
        self, source: MembershipSource, heard: ReportedViews
    ) -> None:
        self.publish([self.member(3)])
        self.expect(heard, 3)
        assert len(heard.threads) == 1
        assert threading.get_ident() not in heard.threads
        assert source.trouble() == ""

    def test_trouble_tells_nothing_and_passes(
        self, source: MembershipSource, heard: ReportedViews
    ) -> None:
        self.spoil()
        wait_for_trouble(source)
        assert self.facts(heard.lists[-1]) == self.facts([self.member(1), self.member(2)])
        self.publish([self.member(2), self.member(3)])
        self.expect(heard, 2, 3)
        assert wait_for_trouble(source, gone=True) == ""

    def test_a_source_that_starts_in_trouble_recovers(self, heard: ReportedViews) -> None:
        self.spoil()
        source = self.make_source()
        source.watch(heard)
        wait_for_trouble(source)
        assert heard.lists == []
        self.publish([self.member(1)])
        self.expect(heard, 1)
        source.close()

    def test_nothing_is_told_after_close(
        self, source: MembershipSource, heard: ReportedViews
    ) -> None:
        self.publish([self.member(2)])
        self.expect(heard, 2)
        began_s = time.monotonic()
        source.close()
        assert time.monotonic() - began_s < CLOSED_WITHIN_S
        told = len(heard.lists)
        assert heard.threads.isdisjoint(thread.ident for thread in threading.enumerate())
        self.publish([self.member(3)])
        assert len(heard.lists) == told

    def test_close_ends_a_source_that_was_never_watched(self) -> None:
        self.publish([self.member(1)])
        source = self.make_source()
        source.close()
        assert source.trouble() == ""
