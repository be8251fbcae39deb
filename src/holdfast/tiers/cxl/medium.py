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
from typing import NamedTuple

from holdfast.buffers import keep_from_dumps
from holdfast.errors import ConfigError
from holdfast.limits import GIB
from holdfast.probe import kernel_text
from holdfast.tiers.host import ArenaMemory, PrivateArena

SYS = Path("/sys")
ANY_NODE = -1
"""Memory on any node that the kernel chooses, as fast as the host's; for trials of the tier."""

_MBIND = {"x86_64": 237, "aarch64": 235}
"""Number of the system call `mbind`, by architecture."""

_MPOL_BIND = 2
_NODES_MAX = 1_024
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


class CxlConfig(NamedTuple):
    """Location and size of a tier's memory: `device` if it is given, else `node`.

    `setting` is the tier's key path in the configuration, for error messages.
    """

    capacity_bytes: int
    node: int = ANY_NODE
    device: str = ""
    setting: str = "tiers.1"
    name: str = "cxl"


class NodeArena(PrivateArena):
    """Memory on one NUMA node only: it is bound to the node before the first page is touched."""

    def __init__(self, nbytes: int, node: int) -> None:
        super().__init__(nbytes)
        _bind(self._memory, node)


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


def describe(config: CxlConfig, system: Path = SYS) -> str:
    """Return a description of the memory, without allocating it.

    Raises ConfigError for a node or device that does not exist, is unsuitable or is too small.
    """
    if config.device:
        nbytes = _check_device(config, system)
        return f"{config.device} of {_gib(nbytes)}"
    if config.node == ANY_NODE:
        return "ordinary memory of any node: no faster and no larger than without it"
    total, free = _check_node(config, system)
    return f"node {config.node} of {_gib(total)}, {_gib(free)} free"


def open_arena(config: CxlConfig, system: Path = SYS) -> PrivateArena | DaxArena:
    """Allocate the memory, or raise ConfigError without allocating any."""
    describe(config, system)
    if config.node == ANY_NODE and not config.device:
        return PrivateArena(config.capacity_bytes)
    try:
        if config.device:
            return DaxArena(config.device, config.capacity_bytes)
        return NodeArena(config.capacity_bytes, config.node)
    except OSError as error:
        raise ConfigError(_refused(config, error)) from error


def _refused(config: CxlConfig, error: OSError) -> str:
    if config.device:
        return (
            f"{config.setting}.device: {config.device!r} cannot be mapped: {error.strerror}; stop "
            "its other users, or give a capacity in multiples of its alignment"
        )
    remedy = "see dmesg"
    if error.errno == errno.EINVAL:
        remedy = "this process may not use the node: see cpuset.mems of its cgroup"
    if error.errno in (errno.EPERM, errno.ENOSYS):
        remedy = "permit mbind in the container's seccomp profile (Docker: --cap-add SYS_NICE)"
    return (
        f"{config.setting}.node: memory cannot be bound to node {config.node}: "
        f"{error.strerror}; {remedy}"
    )


def _check_node(config: CxlConfig, system: Path) -> tuple[int, int]:
    """Return the total and the free bytes of a node."""
    at = f"{config.setting}.node"
    nodes = (system / "devices/system/node").glob("node[0-9]*")
    processors = {int(node.name[4:]): kernel_text(f"{node}/cpulist") for node in nodes}
    present = sorted(processors)
    memory_only = [node for node in present if not processors[node]]
    known = ", ".join(map(str, memory_only)) or "this machine has none"
    remedy = f"choose a node without processors ({known}), or any for ordinary memory"
    if config.node not in present:
        raise ConfigError(
            f"{at}: node {config.node} does not exist; this machine has the nodes "
            f"{', '.join(map(str, present)) or '(none)'}; {remedy}"
        )
    if config.node not in memory_only:
        raise ConfigError(
            f"{at}: node {config.node} has the processors {processors[config.node]}, so its memory "
            f"is ordinary host memory; {remedy}"
        )
    meminfo = f"{system}/devices/system/node/node{config.node}/meminfo"
    total, free = (
        1024 * int(kernel_text(meminfo, f"Node {config.node} {field}").removesuffix("kB") or 0)
        for field in ("MemTotal", "MemFree")
    )
    if config.capacity_bytes > free:
        raise ConfigError(
            f"{config.setting}.capacity: {_gib(config.capacity_bytes)} requested, node "
            f"{config.node} has {_gib(free)} free of {_gib(total)}; lower it, or free the node"
        )
    return total, free


def _check_device(config: CxlConfig, system: Path) -> int:
    """Return the bytes of a device."""
    at, path = f"{config.setting}.device", config.device
    try:
        mode = Path(path).stat().st_mode
    except OSError as error:
        raise ConfigError(
            f"{at}: {path!r} cannot be found: {error.strerror}; daxctl list shows the DAX devices"
        ) from error
    facts = system / "bus/dax/devices" / Path(path).name
    size, align = kernel_text(f"{facts}/size"), kernel_text(f"{facts}/align")
    if not stat.S_ISCHR(mode) or not size.isdigit():
        raise ConfigError(
            f"{at}: {path!r} is not a DAX device; name a /dev/daxX.Y, as shown by daxctl list"
        )
    if not os.access(path, os.R_OK | os.W_OK):
        raise ConfigError(
            f"{at}: {path!r} is not readable and writable for user {os.geteuid()}; chown it"
        )
    nbytes = int(size)
    if config.capacity_bytes > nbytes:
        raise ConfigError(
            f"{config.setting}.capacity: {_gib(config.capacity_bytes)} requested, {path!r} has "
            f"{_gib(nbytes)}; lower it"
        )
    if align.isdigit() and int(align) and config.capacity_bytes % int(align):
        raise ConfigError(
            f"{config.setting}.capacity: {config.capacity_bytes} bytes is not a multiple of the "
            f"alignment of {path!r}, {align} bytes; "
            f"lower it by {config.capacity_bytes % int(align)}"
        )
    return nbytes


def _bind(memory: mmap.mmap, node: int) -> None:
    """Bind every page of a mapping to one node; raise OSError if that is not permitted."""
    call = _MBIND.get(platform.machine())
    if call is None:
        raise OSError(errno.ENOSYS, f"number of mbind unknown on {platform.machine()}")
    mask = (ctypes.c_ulong * (_NODES_MAX // _WORD_BITS))()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    start = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    length, most = ctypes.c_ulong(len(memory)), ctypes.c_ulong(_NODES_MAX + 1)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(call, start, length, _MPOL_BIND, mask, most, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.4g} GiB"
