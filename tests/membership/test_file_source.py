"""The members file: watched, replaced, half-written and wrong."""

import errno
import json
import logging
import os
import re
import threading
import time
from pathlib import Path

import pytest

from holdfast.clock import ManualClock
from holdfast.errors import MembershipError
from holdfast.membership.file_source import FILE_BYTES_MAX, FileSource
from holdfast.membership.member_list import as_data
from holdfast.membership.members import Member, MemberState
from holdfast.membership.membership import Membership
from holdfast.testing.membership_contract import (
    MembershipContract,
    ReportedViews,
    wait_for_trouble,
)

LOOK_S = 0.02

FULL = """
members:
  - {id: flash-1, address: "tcp://10.0.0.1:7070", weight: 4, zone: a}
  - {id: flash-2, address: "tcp://[fd00::2]:7070", state: draining}
  - {id: flash-3, address: "tcp://flash-3.example:7070", incarnation: "7"}
"""
"""Each kind of address and each field."""


def replace(path, text):
    beside = path.with_suffix(".new")
    beside.write_text(text)
    beside.rename(path)


class TestMemberFileAsSource(MembershipContract):
    @pytest.fixture(autouse=True)
    def _path(self, tmp_path):
        self.path = tmp_path / "members.yaml"

    def make_source(self):
        return FileSource(str(self.path), LOOK_S)

    def publish(self, members):
        replace(self.path, json.dumps({"members": [as_data(member) for member in members]}))

    def spoil(self):
        replace(self.path, "members: [{id: flash-1, addr")


class TestMemberFileAsSourceThatVanishes(TestMemberFileAsSource):
    def spoil(self):
        self.path.unlink(missing_ok=True)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "members.yaml"


def test_every_field_is_read(path):
    path.write_text(FULL)
    assert FileSource(str(path)).read() == (
        Member(id="flash-1", address="tcp://10.0.0.1:7070", weight=4.0, zone="a"),
        Member(id="flash-2", address="tcp://[fd00::2]:7070", state=MemberState.DRAINING),
        Member(id="flash-3", address="tcp://flash-3.example:7070", incarnation="7"),
    )


def test_a_file_truncated_anywhere_removes_no_member_early(path):
    """Written in place, byte by byte, and read at each: the view does not move."""
    clock = ManualClock()
    membership = Membership(clock)
    path.write_text(FULL)
    source = FileSource(str(path))
    membership.observe(source.read())
    whole = membership.views().current.view
    for length in range(len(FULL)):
        path.write_text(FULL[:length])
        try:
            membership.observe(source.read())
        except MembershipError as error:
            assert str(path) in str(error)  # noqa: PT017  # most lengths fail, not all
        clock.advance(0.01)
    path.write_text(FULL)
    membership.observe(source.read())
    clock.advance(3600)
    view = membership.views().current.view
    assert [m.id for m in view.members] == [m.id for m in whole.members]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("members: " + "[" * 2000, "line 1, column 74: brackets nested more than 64 deep"),
        ("members: []\nmembers: []\n", "line 2: 'members' is there twice; remove one"),
    ],
)
def test_an_invalid_member_file_is_refused_with_the_place_of_the_error(path, text, words):
    path.write_text(text)
    with pytest.raises(MembershipError, match=re.escape(f"{path}: ")) as caught:
        FileSource(str(path)).read()
    assert words in str(caught.value)


def test_a_half_written_file_keeps_the_view_with_one_log_line(path, caplog):
    caplog.set_level(logging.INFO, logger="holdfast")
    replace(path, FULL)
    heard = ReportedViews()
    source = FileSource(str(path), LOOK_S)
    source.watch(heard)
    heard.until(lambda members: len(members) == 3)
    looks = count_looks(source)
    replace(path, FULL[:100])
    trouble = wait_for_trouble(source)
    assert str(path) in trouble
    while looks() < 20:
        time.sleep(LOOK_S / 4)
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert trouble in warnings[0]
    replace(path, FULL.replace("4", "5"))
    heard.until(lambda members: members[0].weight == 5)
    assert wait_for_trouble(source, gone=True) == ""
    source.close()
    assert len(heard.lists) == 2


def count_looks(source):
    """Count the rounds of a source from here on."""
    looks = 0
    look = source._one_round

    def counted():
        nonlocal looks
        looks += 1
        look()

    source._one_round = counted
    return lambda: looks


def test_an_unchanged_file_is_not_reported_again(path):
    replace(path, FULL)
    heard = ReportedViews()
    source = FileSource(str(path), LOOK_S)
    looks = count_looks(source)
    source.watch(heard)
    while looks() < 10:
        time.sleep(LOOK_S / 4)
    source.close()
    assert len(heard.lists) == 1


def test_a_change_that_could_not_be_read_at_first_is_read_later(path, monkeypatch):
    replace(path, FULL)
    heard = ReportedViews()
    source = FileSource(str(path), LOOK_S)
    source.watch(heard)
    heard.until(lambda members: len(members) == 3)
    opened = Path.open

    def exhausted(self, *args, **options):
        if self == path:
            raise OSError(errno.EMFILE, "Too many open files")
        return opened(self, *args, **options)

    with monkeypatch.context() as scarce:
        scarce.setattr(Path, "open", exhausted)
        replace(path, FULL.replace("4", "5"))
        assert "cannot be read: Too many open files" in wait_for_trouble(source)
    heard.until(lambda members: members[0].weight == 5)
    assert wait_for_trouble(source, gone=True) == ""
    source.close()


def test_a_list_whose_receiver_failed_is_passed_on_again(path):
    replace(path, FULL)
    heard, calls = ReportedViews(), []

    def fails_once(members):
        calls.append(members)
        if len(calls) == 1:
            raise ValueError("a mistake of the receiver")
        heard(members)

    source = FileSource(str(path), LOOK_S)
    source.watch(fails_once)
    heard.until(lambda members: len(members) == 3)
    source.close()


def test_a_file_that_is_too_large_is_refused(path):
    path.write_text("# " + "x" * FILE_BYTES_MAX)
    with pytest.raises(MembershipError, match=f"more than {FILE_BYTES_MAX} bytes"):
        FileSource(str(path)).read()


@pytest.mark.parametrize(
    "text",
    [
        "[" * 20_000,
        "members: 2024-99-99",
        "a: &a [*a",
        "!!python/object/apply:os.getpid []",
        "\x00",
        "members: \udcff",
    ],
    ids=["deep", "date", "alias", "object", "nul", "bytes"],
)
def test_arbitrary_text_is_refused_with_the_name_of_the_file(path, text):
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(MembershipError, match=r"members\.yaml: "):
        FileSource(str(path)).read()


@pytest.mark.parametrize("kind", ["folder", "fifo", "device"])
def test_a_path_that_is_no_regular_file_keeps_the_list_and_delays_no_close(kind, path):
    replace(path, FULL)
    heard, source = ReportedViews(), FileSource(str(path), LOOK_S)
    source.watch(heard)
    heard.until(lambda members: len(members) == 3)
    path.unlink()
    wait_for_trouble(source)
    match kind:
        case "folder":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
    until_s = time.monotonic() + 60
    while "not a regular file" not in source.trouble():
        assert time.monotonic() < until_s, source.trouble()
        time.sleep(LOOK_S)
    closing = threading.Thread(target=source.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    assert len(heard.lists) == 1
