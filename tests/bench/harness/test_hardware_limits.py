"""The limits are measured with real bytes and leave nothing behind."""

import errno
import os
from pathlib import Path

import pytest

from holdfast.errors import HoldfastError
from holdfast.limits import KIB, MIB
from holdfast_bench.harness.hardware_limits import CopyLimit, DirectIoLimit


@pytest.mark.parametrize("threads", [1, 2])
def test_copying_really_moves_the_blocks(threads):
    limit = CopyLimit(8 * MIB, 64 * KIB, 4 * MIB, threads)
    assert (limit._pages == 2).all()
    assert limit.gb_per_s(1000) > 0
    assert (limit._pages == 1).any()


def test_direct_io_reads_and_writes_and_removes_its_file(tmp_path):
    with DirectIoLimit(tmp_path, 4 * MIB, 512 * KIB, 8) as limit:
        [file] = tmp_path.iterdir()
        assert file.stat().st_size == 4 * MIB
        written = file.read_bytes()
        assert any(written)
        assert limit.write_gb_per_s(8) > 0
        assert limit.read_gb_per_s(8) > 0
        blocks = {written[at : at + 512 * KIB] for at in range(0, 4 * MIB, 512 * KIB)}
        assert {bytes(buffer) for buffer in limit._buffers} <= blocks
    assert not list(tmp_path.iterdir())


def test_the_direct_io_limit_reads_every_block_into_its_own_buffer(tmp_path):
    untouched = b"\1" * 512 * KIB
    with DirectIoLimit(tmp_path, 4 * MIB, 512 * KIB, 8) as limit:
        for buffer in limit._buffers:
            buffer[:] = untouched
        limit.read_gb_per_s(7)
        assert [bytes(buffer) == untouched for buffer in limit._buffers] == [False] * 7 + [True]


def test_a_disk_without_space_leaves_no_file_and_no_descriptor(tmp_path, monkeypatch):
    opened = []

    def full(descriptor, *_):
        opened.append(descriptor)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(HoldfastError, match="No space left on device; name a folder on a disk"):
        DirectIoLimit(tmp_path, 4 * MIB, 512 * KIB, 4)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])
    assert not list(tmp_path.iterdir())


def test_a_folder_that_does_not_exist_is_named():
    with pytest.raises(HoldfastError, match=r"'/nowhere/at/all': No such file"):
        DirectIoLimit(Path("/nowhere/at/all"), 4 * MIB, 512 * KIB, 4)
