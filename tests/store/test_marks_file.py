"""The file of durable marks returns what was saved, whatever a crash left of its last record."""

import errno
import logging
import os
import tracemalloc

import pytest

from holdfast.blocks.namespace import Namespace
from holdfast.store.durable_marks import MarkedBlocks
from holdfast.store.marks_file import MarksFile

ONE = Namespace(b"f" * 16, b"d" * 16, 4096, 16)


def run_of(number, until_s=2e9):
    return MarkedBlocks(ONE, until_s, number.to_bytes(16, "big"))


def nothing_more():
    return []


@pytest.fixture
def path(tmp_path):
    return tmp_path / "durable.log"


def test_what_was_saved_is_loaded_in_order(path):
    file = MarksFile(path)
    assert file.save([run_of(1)], lambda: [run_of(1)])
    assert file.save([run_of(2)], nothing_more)
    assert file.save([run_of(1, 0.0)], nothing_more)
    assert MarksFile(path).load() == [run_of(1), run_of(2), run_of(1, 0.0)]


def test_a_later_process_appends(path):
    MarksFile(path).save([run_of(1)], lambda: [run_of(1)])
    file = MarksFile(path)
    file.load()
    file.save([run_of(2)], nothing_more)
    assert MarksFile(path).load() == [run_of(1), run_of(2)]


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_record_that_was_cut_off_is_ignored_and_the_file_is_written_again(path, cut, caplog):
    MarksFile(path).save([run_of(1)], lambda: [run_of(1), run_of(2)])
    path.write_bytes(path.read_bytes()[:-cut])
    file = MarksFile(path)
    with caplog.at_level(logging.WARNING):
        assert file.load() == [run_of(1)]
    assert "are damaged" in caplog.text
    file.save([run_of(3)], lambda: [run_of(1), run_of(3)])
    assert MarksFile(path).load() == [run_of(1), run_of(3)]


def test_a_flipped_bit_ends_the_list(path, caplog):
    MarksFile(path).save([run_of(1)], lambda: [run_of(1), run_of(2)])
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert MarksFile(path).load() == [run_of(1)]
    assert "are damaged" in caplog.text


def test_a_file_of_another_kind_has_no_marks(path, caplog):
    path.write_bytes(b"something else")
    with caplog.at_level(logging.WARNING):
        assert MarksFile(path).load() == []
    assert "are damaged" in caplog.text


def test_a_change_that_cannot_be_written_is_written_later(tmp_path, caplog):
    folder = tmp_path / "away"
    file = MarksFile(folder / "durable.log")
    with caplog.at_level(logging.WARNING):
        assert not file.save([run_of(1)], lambda: [run_of(1)])
    assert "durable marks were not saved" in caplog.text
    folder.mkdir()
    assert file.save([], lambda: [run_of(1)])
    assert MarksFile(folder / "durable.log").load() == [run_of(1)]


def test_changes_that_cannot_be_written_for_long_take_little_memory(path, monkeypatch):
    file = MarksFile(path)
    assert file.save([run_of(1)], lambda: [run_of(1)])

    def fail(*_):
        raise OSError(errno.ENOSPC, "injected")

    monkeypatch.setattr(os, "pwrite", fail)
    monkeypatch.setattr("holdfast.store.marks_file.replacing", fail)
    tracemalloc.start()
    try:
        for _ in range(100):
            assert not file.save([MarkedBlocks(ONE, 2e9, os.urandom(16 * 4_096))], nothing_more)
        nbytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert nbytes < 3 << 20
    monkeypatch.undo()
    assert file.save([], lambda: [run_of(1), run_of(2)])
    assert MarksFile(path).load() == [run_of(1), run_of(2)]
    assert file.save([run_of(3)], nothing_more)
    assert MarksFile(path).load() == [run_of(1), run_of(2), run_of(3)]


def test_a_file_that_has_grown_is_rewritten_with_what_counts(path):
    file = MarksFile(path)
    many = MarkedBlocks(ONE, 2e9, bytes(16 * 4_096))
    for _ in range(40):
        assert file.save([many], lambda: [run_of(1)])
    assert path.stat().st_size < 20 * 16 * 4_096


def test_a_file_with_wrong_marks_is_written_again_at_the_next_save(path):
    file = MarksFile(path)
    file.save([run_of(1)], lambda: [run_of(1)])
    file.rewrite()
    assert file.save([], lambda: [run_of(1, 3e9)])
    assert MarksFile(path).load() == [run_of(1, 3e9)]
    assert file.save([run_of(2)], nothing_more)
    assert MarksFile(path).load() == [run_of(1, 3e9), run_of(2)]


def test_without_a_path_nothing_is_kept():
    file = MarksFile(None)
    assert file.save([run_of(1)], nothing_more)
    assert file.load() == []


def test_a_change_that_was_written_in_part_is_written_again(path, monkeypatch, caplog):
    file, pwrite = MarksFile(path), os.pwrite
    file.save([run_of(1)], lambda: [run_of(1)])
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:5], at))
    with caplog.at_level(logging.WARNING):
        assert not file.save([run_of(2)], nothing_more)
    assert "No space left" in caplog.text
    monkeypatch.undo()
    assert file.save([], lambda: [run_of(1), run_of(2)])
    assert MarksFile(path).load() == [run_of(1), run_of(2)]


def test_a_change_whose_flush_failed_is_written_to_a_new_file(path, monkeypatch, caplog):
    """A second flush of the same file might not tell."""
    file, before = MarksFile(path), None
    file.save([run_of(1)], lambda: [run_of(1)])
    before = path.stat().st_ino

    def fail(_fd):
        raise OSError(errno.EIO, "injected")

    monkeypatch.setattr(os, "fsync", fail)
    with caplog.at_level(logging.WARNING):
        assert not file.save([run_of(2)], nothing_more)
    monkeypatch.undo()
    assert file.save([], lambda: [run_of(1), run_of(2)])
    assert path.stat().st_ino != before
    assert MarksFile(path).load() == [run_of(1), run_of(2)]
