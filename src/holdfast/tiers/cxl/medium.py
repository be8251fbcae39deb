"""CXL memory: a NUMA node without processors, a DAX device, or ordinary memory for trials.

Linux presents CXL memory in one of two ways. *System RAM*: a NUMA node that has memory and no
processors; `mbind(2)` places pages on it, called directly to avoid a dependency on libnuma.
*devdax*: a character device `/dev/daxX.Y` that is mapped as a whole. Source: Documentation/ABI
(sysfs-devices-node, sysfs-bus-dax) in the kernel's sources.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.buffers import c_library, keep_from_dumps, last_error
from holdfast.errors import ConfigError
from holdfast.limits import GIB
from holdfast.probe import kernel_text
from holdfast.tiers.arena import ArenaMemory, PrivateArena

if TYPE_CHECKING:
    from holdfast.tiers.cxl.kind import CxlOptions

SYS = Path("/sys")
_MBIND = {"x86_64": 237, "aarch64": 235}
"""Number of the system call `mbind`, by architecture."""

_MPOL_BIND = 2
_NODES_MAX = 1_024
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


class NodeArena(PrivateArena):
    """Memory on one NUMA node only: it is bound to the node before the first page is touched."""

    def __init__(self, nbytes: int, node: int) -> None:
        super().__init__(nbytes)
        _bind(self._memory.address, nbytes, node)


class DaxArena(ArenaMemory):
    """A mapped DAX device. Its pages exist from the start and are never returned."""

    def __init__(self, path: str, nbytes: int) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._memory = mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
        keep_from_dumps(self._memory)
        self.view = memoryview(self._memory)


def describe(options: CxlOptions, at: str, system: Path = SYS) -> str:
    """Return a description of the memory, without allocating it.

    `at` is the tier's key path in the configuration, for error messages. Raises ConfigError for a
    node or device that does not exist, is unsuitable or is too small.
    """
    if options.device:
        nbytes = _check_device(options, at, system)
        return f"{options.device} of {_gib(nbytes)}"
    if not isinstance(options.node, int):
        return "ordinary memory of any node: no faster and no larger than without it"
    total, free = _check_node(options, options.node, at, system)
    return f"node {options.node} of {_gib(total)}, {_gib(free)} free"


def open_arena(options: CxlOptions, at: str, system: Path = SYS) -> PrivateArena | DaxArena:
    """Allocate the memory, or raise ConfigError without allocating any."""
    describe(options, at, system)
    try:
        if options.device:
            return DaxArena(options.device, options.capacity)
        if isinstance(options.node, int):
            return NodeArena(options.capacity, options.node)
    except OSError as error:
        raise ConfigError(_refused(options, at, error)) from error
    return PrivateArena(options.capacity)


def _refused(options: CxlOptions, at: str, error: OSError) -> str:
    if options.device:
        return (
            f"{at}.device: {options.device!r} cannot be mapped: {error.strerror}; stop "
            "its other users, or give a capacity in multiples of its alignment"
        )
    remedy = "see dmesg"
    if error.errno == errno.EINVAL:
        remedy = "this process may not use the node: see cpuset.mems of its cgroup"
    if error.errno in (errno.EPERM, errno.ENOSYS):
        remedy = "permit mbind in the container's seccomp profile (Docker: --cap-add SYS_NICE)"
    return f"{at}.node: memory cannot be bound to node {options.node}: {error.strerror}; {remedy}"


def _check_node(options: CxlOptions, node: int, at: str, system: Path) -> tuple[int, int]:
    """Return the total and the free bytes of a node."""
    nodes = (system / "devices/system/node").glob("node[0-9]*")
    processors = {int(path.name[4:]): kernel_text(f"{path}/cpulist") for path in nodes}
    present = sorted(processors)
    memory_only = [number for number in present if not processors[number]]
    known = ", ".join(map(str, memory_only)) or "this machine has none"
    remedy = f"choose a node without processors ({known}), or any for ordinary memory"
    if node not in present:
        raise ConfigError(
            f"{at}.node: node {node} does not exist; this machine has the nodes "
            f"{', '.join(map(str, present)) or '(none)'}; {remedy}"
        )
    if node not in memory_only:
        raise ConfigError(
            f"{at}.node: node {node} has the processors {processors[node]}, so its memory "
            f"is ordinary host memory; {remedy}"
        )
    meminfo = f"{system}/devices/system/node/node{node}/meminfo"
    total, free = (
        1024 * int(kernel_text(meminfo, f"Node {node} {field}").removesuffix("kB") or 0)
        for field in ("MemTotal", "MemFree")
    )
    if options.capacity > free:
        raise ConfigError(
            f"{at}.capacity: {_gib(options.capacity)} requested, node "
            f"{node} has {_gib(free)} free of {_gib(total)}; lower it, or free the node"
        )
    return total, free


def _check_device(options: CxlOptions, at: str, system: Path) -> int:
    """Return the bytes of a device."""
    path = options.device
    try:
        mode = Path(path).stat().st_mode
    except OSError as error:
        raise ConfigError(
            f"{at}.device: {path!r} cannot be found: {error.strerror}; daxctl list shows the DAX "
            "devices"
        ) from error
    facts = system / "bus/dax/devices" / Path(path).name
    size, align = kernel_text(f"{facts}/size"), kernel_text(f"{facts}/align")
    if not stat.S_ISCHR(mode) or not size.isdigit():
        raise ConfigError(
            f"{at}.device: {path!r} is not a DAX device; name a /dev/daxX.Y, as shown by daxctl "
            "list"
        )
    if not os.access(path, os.R_OK | os.W_OK):
        raise ConfigError(
            f"{at}.device: {path!r} is not readable and writable for user {os.geteuid()}; chown it"
        )
    nbytes = int(size)
    if options.capacity > nbytes:
        raise ConfigError(
            f"{at}.capacity: {_gib(options.capacity)} requested, {path!r} has "
            f"{_gib(nbytes)}; lower it"
        )
    if align.isdigit() and int(align) and options.capacity % int(align):
        raise ConfigError(
            f"{at}.capacity: {int(options.capacity)} bytes is not a multiple of the "
            f"alignment of {path!r}, {align} bytes; "
            f"lower it by {options.capacity % int(align)}"
        )
    return nbytes


def _bind(address: int, nbytes: int, node: int) -> None:
    """Bind every page of a mapping to one node; raise OSError if that is not permitted."""
    call = _MBIND.get(platform.machine())
    if call is None:
        raise OSError(errno.ENOSYS, f"number of mbind unknown on {platform.machine()}")
    mask = (ctypes.c_ulong * (_NODES_MAX // _WORD_BITS))()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    start, length = ctypes.c_void_p(address), ctypes.c_ulong(nbytes)
    most = ctypes.c_ulong(_NODES_MAX + 1)
    if c_library().syscall(call, start, length, _MPOL_BIND, mask, most, 0):
        raise last_error()


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.4g} GiB"
