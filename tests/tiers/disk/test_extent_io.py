"""Extents of a file: joined and split calls, direct I/O and its fallback, the folder's lock."""

import errno
import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.buffers import aligned_buffer
from holdfast.errors import BusyError, ConfigError
from holdfast.limits import MIB
from holdfast.tiers.disk import extent_io
from holdfast.tiers.disk.extent_io import ByteSpan, FileExtents, call_bytes_for, pieces, transfer
from holdfast.workers import workers


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(4 * MIB))
    extents = FileExtents(path, extent_io.lock_folder(tmp_path))
    yield extents
    extents.close()


def random_bytes(nbytes):
    buffer = aligned_buffer(nbytes)
    buffer[:] = os.urandom(nbytes)
    return buffer


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20)), max_size=30), st.integers(1, 8))
def test_pieces_cover_every_byte_once_and_no_more(shapes, call_sectors):
    """Each shape says whether a gap precedes the span, and how many sectors the span has."""
    spans, at = [], 0
    for owner, (gap, sectors) in enumerate(shapes):
        at += 4096 * gap
        spans.append(ByteSpan(at, memoryview(bytearray(sectors * 4096)), owner))
        at += sectors * 4096
    made = pieces(list(reversed(spans)), call_sectors * 4096)
    covered = []
    for piece in made:
        assert sum(len(span.view) for span in piece) <= call_sectors * 4096
        at = piece[0].offset
        for span in piece:
            assert span.offset == at
            at += len(span.view)
            covered += [(span.owner, sector) for sector in range(span.offset, at, 4096)]
    assert covered == [
        (span.owner, sector)
        for span in spans
        for sector in range(span.offset, span.offset + len(span.view), 4096)
    ]


def test_pieces_respect_the_limit_of_buffers_per_call():
    spans = [ByteSpan(4096 * n, memoryview(bytearray(4096)), n) for n in range(1_500)]
    made = pieces(spans, 1 << 40)
    assert max(map(len, made)) <= extent_io.VECTORS_MAX


def test_calls_are_large_but_enough_for_every_thread():
    assert call_bytes_for(64 * MIB, 4) == 4 * MIB
    assert call_bytes_for(16 * MIB, 4) == 2 * MIB
    assert call_bytes_for(100, 4) == 2 * MIB
    assert call_bytes_for(2 * MIB, 1) == 2 * MIB, "a single thread shares with no other"
    assert call_bytes_for(64 * MIB, 1) == 4 * MIB


def test_reads_return_the_written_bytes(file):
    written = [random_bytes(4096), random_bytes(8192), random_bytes(65_536)]
    file.write(12_288, written)
    found = [aligned_buffer(len(view)) for view in written]
    file.read(12_288, found)
    assert [bytes(view) for view in found] == [bytes(view) for view in written]
    assert file.size == 4 * MIB


def test_unaligned_memory_is_copied_through_an_aligned_buffer(file):
    odd = memoryview(bytearray(os.urandom(8193)))[1:]
    file.write(0, [odd[:4096], odd[4096:]])
    found = memoryview(bytearray(8199))[7:]
    file.read(0, [found[:4096], found[4096:]])
    assert found == odd


def test_a_read_past_the_end_is_an_error(file):
    with pytest.raises(OSError, match="4096 of 8192 bytes"):
        file.read(4 * MIB - 4096, [aligned_buffer(8192)])


def test_a_short_write_is_an_error(file, monkeypatch):
    monkeypatch.setattr(os, "pwritev", lambda fd, views, offset: 4096)
    with pytest.raises(OSError, match="4096 of 8192 bytes"):
        file.write(0, [aligned_buffer(8192)])


@pytest.mark.parametrize("at", ["open", "preadv"])
def test_refused_direct_io_falls_back_with_a_warning(tmp_path, monkeypatch, caplog, at):
    path = tmp_path / "file"
    path.write_bytes(bytes(MIB))
    real = getattr(os, at)

    def refuse(first, second, *rest):
        if at == "preadv" or second & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(first, second, *rest)

    lock = extent_io.lock_folder(tmp_path)
    monkeypatch.setattr(os, at, refuse)
    with caplog.at_level(logging.WARNING):
        extents = FileExtents(path, lock)
    monkeypatch.undo()
    assert not extents.direct
    assert "uses the page cache: direct" in caplog.text
    assert "refused" in caplog.text
    assert str(path) in caplog.text
    view = random_bytes(4096)
    extents.write(0, [view])
    found = aligned_buffer(4096)
    extents.read(0, [found])
    assert found == view
    extents.close()


def test_a_bad_first_sector_does_not_disable_direct_io(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(bytes(MIB))
    lock = extent_io.lock_folder(tmp_path)
    before = FileExtents(path, os.dup(lock))

    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    after = FileExtents(path, lock)
    assert after.direct is before.direct
    before.close()
    after.close()


def test_a_closed_folder_is_free_although_a_child_still_has_the_descriptor(tmp_path):
    path, lock = tmp_path / "data", extent_io.lock_folder(tmp_path)
    path.write_bytes(bytes(MIB))
    with os.fdopen(os.dup(lock)):  # what fork leaves, until the child closes it
        FileExtents(path, lock).close()
        os.close(extent_io.lock_folder(tmp_path))


# Python 3.12 and later warn of a fork beside other threads, which a test runner may have.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")
def test_a_child_that_closes_its_copy_leaves_the_lock(tmp_path):
    path, lock = tmp_path / "data", extent_io.lock_folder(tmp_path)
    path.write_bytes(bytes(MIB))
    extents = FileExtents(path, lock)
    child = os.fork()
    if not child:
        extents.close()
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(BusyError):
        extent_io.lock_folder(tmp_path)
    extents.close()


def test_a_folder_on_a_full_disk_can_be_locked(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    fd = extent_io.lock_folder(tmp_path)
    with pytest.raises(BusyError, match="process unknown"):
        extent_io.lock_folder(tmp_path)
    os.close(fd)


def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(ConfigError, match="cannot be locked: No locks available"):
        extent_io.lock_folder(tmp_path)


def test_no_thread_starts_while_buffers_are_in_flight(monkeypatch):
    pool = workers(3, "test")

    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    seen = []
    spans = [ByteSpan(i * MIB, memoryview(bytearray(MIB)), i) for i in range(16)]
    for _ in range(20):
        assert transfer(pool, 4, spans, lambda offset, _: seen.append(offset)) == {}
    pool.shutdown()
    assert len(seen) == 20 * len(pieces(spans, call_bytes_for(16 * MIB, 4)))


def test_one_bad_sector_fails_one_record():
    bad = 5 * 4096
    done = []

    def call(offset, views):
        nbytes = sum(len(view) for view in views)
        if offset <= bad < offset + nbytes:
            raise OSError(errno.EIO, "bad sector")
        done.append((offset, nbytes))

    spans = [ByteSpan(4096 * n, memoryview(bytearray(4096)), n) for n in range(16)]
    with ThreadPoolExecutor(3) as pool:
        failed = transfer(pool, 4, spans, call)
    assert list(failed) == [5]
    assert sum(nbytes for _, nbytes in done) == 15 * 4096


def test_a_batch_does_not_wait_for_threads_busy_with_another_batch():
    busy, done = threading.Event(), []
    spans = [ByteSpan(8192 * n, memoryview(bytearray(4096)), n) for n in range(16)]
    with ThreadPoolExecutor(1) as pool:
        pool.submit(busy.wait)
        try:
            assert transfer(pool, 4, spans, lambda offset, views: done.append(offset)) == {}
        finally:
            busy.set()
    assert sorted(done) == [span.offset for span in spans]


def test_a_thread_is_used_for_two_calls_at_least():
    spans = [ByteSpan(8192 * n, memoryview(bytearray(4096)), n) for n in range(2)]
    threads = list[threading.Thread]()
    with ThreadPoolExecutor(1) as pool:
        transfer(pool, 4, spans, lambda *_: threads.append(threading.current_thread()))
    assert threads == [threading.main_thread()] * 2


def test_threads_that_may_not_help_make_no_call():
    spans = [ByteSpan(8192 * n, memoryview(bytearray(4096)), n) for n in range(16)]
    threads = list[threading.Thread]()
    with ThreadPoolExecutor(3) as pool:
        call = lambda *_: threads.append(threading.current_thread())  # noqa: E731
        assert transfer(pool, 4, spans, call, helps=lambda: False) == {}
    assert threads == [threading.main_thread()] * 16


def test_an_unexpected_error_waits_for_threads_that_use_the_buffers():
    begun, under_way = threading.Barrier(2), []

    def call(offset, views):
        under_way.append(offset)
        if offset < spans[2].offset:
            begun.wait(60)
        if threading.current_thread() is threading.main_thread():
            raise ZeroDivisionError
        under_way.remove(offset)

    spans = [ByteSpan(8192 * n, memoryview(bytearray(4096)), n) for n in range(3)]
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(ZeroDivisionError):
            transfer(pool, 2, spans, call)
        assert len(under_way) == 1, "only the call that failed on this thread"


def test_a_long_record_fails_once_if_any_part_does():
    def call(offset, views):
        if offset >= 4 * MIB:
            raise OSError(errno.EIO, "bad half")

    with ThreadPoolExecutor(3) as pool:
        failed = transfer(pool, 4, [ByteSpan(0, memoryview(bytearray(8 * MIB)), 7)], call)
    assert list(failed) == [7]


def test_a_second_node_on_one_folder_is_refused_by_name(tmp_path):
    script = (
        "import sys, pathlib; from holdfast.tiers.disk.extent_io import lock_folder;"
        "fd = lock_folder(pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(BusyError, match=f"process {holder.pid}") as caught:
            extent_io.lock_folder(tmp_path)
        assert str(tmp_path) in str(caught.value)
    finally:
        holder.kill()
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()
    os.close(extent_io.lock_folder(tmp_path))


def test_a_folder_that_cannot_be_created_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConfigError, match="file"):
        extent_io.lock_folder(tmp_path / "file" / "below")


def test_a_full_device_is_reported_before_and_during_allocation(tmp_path, monkeypatch):
    path = tmp_path / "blocks"
    with pytest.raises(ConfigError, match=r"tiers\.1\.capacity: .* GiB requested, .* GiB free"):
        extent_io.preallocate(path, 1 << 50, "tiers.1", b"")

    def full(fd, offset, nbytes):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"tiers\.1\.capacity"):
        extent_io.preallocate(path, 1 << 20, "tiers.1", b"")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_format_leaves_no_file(tmp_path, monkeypatch):
    path = tmp_path / "blocks"

    def die(fd):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", die)
    with pytest.raises(KeyboardInterrupt):
        extent_io.preallocate(path, 1 << 20, "disk", b"first")
    assert not path.exists()
    monkeypatch.undo()
    extent_io.preallocate(path, 1 << 20, "disk", b"first")
    assert path.stat().st_size == 1 << 20
    assert path.read_bytes()[:5] == b"first"
    assert [p.name for p in tmp_path.iterdir()] == ["blocks"]


def test_tmpfs_works_with_or_without_direct_io():
    shm = Path("/dev/shm")
    if not shm.is_dir():
        pytest.skip("no tmpfs here")
    folder = shm / f"holdfast-test-{os.getpid()}"
    lock = extent_io.lock_folder(folder)
    path = folder / "file"
    try:
        extent_io.preallocate(path, MIB, "disk", b"")
        extents = FileExtents(path, lock)
        view = random_bytes(8192)
        extents.write(4096, [view])
        found = aligned_buffer(8192)
        extents.read(4096, [found])
        assert found == view
        extents.close()
    finally:
        for left in folder.iterdir():
            left.unlink()
        folder.rmdir()
