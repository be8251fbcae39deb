"""Shared files of memory are mapped where huge pages can lie, and for as long as they are seen."""

import ctypes
import gc
import os
import re
from pathlib import Path

import pytest

from holdfast.buffers import (
    HUGE_PAGE,
    PrivateMapping,
    SharedMapping,
    aligned_buffer,
    c_library,
    populate,
)


@pytest.fixture
def fd():
    made = os.memfd_create("holdfast-test-buffers")
    os.ftruncate(made, 3 * HUGE_PAGE)
    yield made
    os.close(made)


def mappings() -> int:
    return len(re.findall("memfd:holdfast-test-buffers", Path("/proc/self/maps").read_text()))


def mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def test_a_mapping_is_aligned_to_huge_pages(fd):
    mapped = SharedMapping(fd, 2 * HUGE_PAGE + 5)
    assert mapped.address % HUGE_PAGE == 0
    assert len(mapped.view) == 2 * HUGE_PAGE + 5
    mapped.view[-5:] = b"bytes"
    assert os.pread(fd, 5, 2 * HUGE_PAGE) == b"bytes"


def test_a_mapping_lives_until_its_last_view_is_gone(fd):
    mapped = SharedMapping(fd, HUGE_PAGE)
    part = mapped.view[4096:8192]
    del mapped
    gc.collect()
    part[:4] = b"here"
    assert mappings() == 1
    del part
    gc.collect()
    assert mappings() == 0


@pytest.mark.parametrize("nbytes", [0, -1, 3 * HUGE_PAGE + 1, 1 << 62])
def test_a_length_that_does_not_fit_the_file_is_refused(fd, nbytes):
    with pytest.raises(ValueError, match=f"{nbytes} bytes of a file of {3 * HUGE_PAGE} bytes"):
        SharedMapping(fd, nbytes)
    assert mappings() == 0


def test_a_failed_mapping_leaks_no_address_space(fd):
    before, tries = mapped_bytes(), 500
    read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    for _ in range(tries):
        with pytest.raises(PermissionError):
            SharedMapping(read_only, HUGE_PAGE)
    os.close(read_only)
    assert mappings() == 0
    assert mapped_bytes() - before < tries * HUGE_PAGE // 2


def test_populated_memory_keeps_its_bytes(fd):
    os.pwrite(fd, b"first", 0)
    os.pwrite(fd, b"last", 3 * HUGE_PAGE - 4)
    mapped = SharedMapping(fd, 3 * HUGE_PAGE)
    populate(mapped, 4096, 3 * HUGE_PAGE - 4096)
    assert os.fstat(fd).st_blocks * 512 == 3 * HUGE_PAGE
    assert bytes(mapped.view[:5]) == b"first"
    assert bytes(mapped.view[-4:]) == b"last"


def test_private_memory_is_populated_by_calls_that_release_the_gil(monkeypatch):
    """`mmap.madvise` keeps it while the kernel clears pages; a call of the C library does not."""
    mapped, advised = PrivateMapping(2 * HUGE_PAGE), []
    real = c_library()

    class Library:
        def madvise(self, address, nbytes, option):
            advised.append((address - mapped.address, nbytes))
            return real.madvise(address, nbytes, option)

    monkeypatch.setattr("holdfast.buffers.c_library", Library)
    populate(mapped, 0, 2 * HUGE_PAGE)
    assert advised[-1] == (0, 2 * HUGE_PAGE)
    assert not isinstance(real, ctypes.PyDLL)


def test_memory_is_populated_with_small_pages_if_huge_pages_fail(fd, monkeypatch):
    monkeypatch.setattr("holdfast.buffers._MADV_COLLAPSE", 9_999)
    mapped = SharedMapping(fd, 2 * HUGE_PAGE)
    assert not populate(mapped, 0, 2 * HUGE_PAGE)
    assert os.fstat(fd).st_blocks * 512 == 2 * HUGE_PAGE


def address(view):
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


@pytest.mark.parametrize("nbytes", [1, 4096, HUGE_PAGE - 1])
def test_a_small_buffer_is_aligned_to_a_page(nbytes):
    view = aligned_buffer(nbytes)
    assert address(view) % 4096 == 0
    assert bytes(view) == bytes(nbytes)


@pytest.mark.parametrize("nbytes", [HUGE_PAGE, HUGE_PAGE + 4096, 3 * HUGE_PAGE - 1])
def test_a_large_buffer_is_aligned_to_a_huge_page(nbytes):
    for view in [aligned_buffer(nbytes) for _ in range(3)]:
        assert address(view) % HUGE_PAGE == 0
        assert bytes(view) == bytes(nbytes)


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages"
)
def test_the_rest_of_a_buffer_after_its_last_huge_page_uses_small_pages():
    view = aligned_buffer(HUGE_PAGE + 4096)
    view[:: len(view) - 1] = b"ab"
    at = f"{address(view) + HUGE_PAGE:x}-"
    _, behind = Path("/proc/self/smaps").read_text().split(at)
    flags = re.search(r"VmFlags:(.*)", behind)[1].split()
    assert "hg" not in flags
