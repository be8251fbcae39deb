"""A stand-in for a GPU that locks memory: io_uring's fixed buffers, which pin pages as drivers do.

Copies go through the pages that were pinned at registration, also after the mapping has others. So
a store that returns locked memory to the kernel loses bytes here as it does with a GPU. The kernel
counts pinned memory against RLIMIT_MEMLOCK, often 8 MiB. Calls and structures: io_uring_setup(2),
io_uring_register(2), io_uring_enter(2).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import threading

from holdfast.buffers import c_library

_SETUP, _ENTER, _REGISTER = 425, 426, 427
"""Numbers of the system calls, equal on all architectures."""

_REGISTER_BUFFERS, _GET_EVENTS = 0, 1
_READ_FIXED, _WRITE_FIXED = 4, 5
_ENTRIES, _ENTRY_BYTES = 4, 64
_SUBMISSIONS_AT = 0x10000000
_SHARED = mmap.MAP_SHARED | mmap.MAP_POPULATE


class PinnedDevice:
    """Pins memory, and copies between it and memory of its own; a `Registrar`. Thread-safe.

    Raises OSError where io_uring is forbidden, and for memory beyond RLIMIT_MEMLOCK.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pinned: dict[int, tuple[int, _Ring]] = {}
        self._memory = os.memfd_create("device")
        _Ring().close()

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are pinned now."""
        with self._lock:
            return sum(nbytes for nbytes, _ in self._pinned.values())

    def register(self, address: int, nbytes: int) -> None:
        """Pin memory of this process."""
        ring = _Ring()
        try:
            ring.pin(address, nbytes)
        except OSError:
            ring.close()
            raise
        with self._lock:
            self._pinned[address] = nbytes, ring

    def unregister(self, address: int) -> None:
        """Unpin the memory that was pinned at an address."""
        with self._lock:
            _, ring = self._pinned.pop(address)
            ring.close()

    def save(self, address: int, content: bytes) -> None:
        """Copy bytes of the device into pinned memory, through the pinned pages."""
        with self._lock:
            os.pwrite(self._memory, content, 0)
            self._copy(_READ_FIXED, address, len(content))

    def load(self, address: int, nbytes: int) -> bytes:
        """Return the bytes of pinned memory as the device reads them, from the pinned pages."""
        with self._lock:
            self._copy(_WRITE_FIXED, address, nbytes)
            return os.pread(self._memory, nbytes, 0)

    def close(self) -> None:
        """Unpin all memory."""
        for address in list(self._pinned):
            self.unregister(address)
        os.close(self._memory)

    def _copy(self, operation: int, address: int, nbytes: int) -> None:
        """Copy from or to the start of the device's memory; a copy crosses no registration."""
        done = 0
        while done < nbytes:
            at = address + done
            start, (size, ring) = next(
                (start, pinned)
                for start, pinned in self._pinned.items()
                if start <= at < start + pinned[0]
            )
            part = min(nbytes - done, start + size - at)
            done += ring.copy(operation, self._memory, at, part, done)


class _Ring:
    """One io_uring with at most one fixed buffer."""

    def __init__(self) -> None:
        parameters = ctypes.create_string_buffer(120)
        self._fd = _call(_SETUP, _ENTRIES, ctypes.addressof(parameters))
        entries, completions = struct.unpack_from("<2I", parameters, 0)
        _, self._tail, *_, self._array = struct.unpack_from("<7I", parameters, 40)
        self._head, _, _, _, _, self._completed, *_ = struct.unpack_from("<7I", parameters, 80)
        nbytes = max(self._array + 4 * entries, self._completed + 16 * completions)
        try:
            self._memory = mmap.mmap(self._fd, nbytes, flags=_SHARED)
            self._entries = mmap.mmap(
                self._fd, entries * _ENTRY_BYTES, flags=_SHARED, offset=_SUBMISSIONS_AT
            )
        except OSError:
            os.close(self._fd)
            raise
        self._mask, self._completion_mask = entries - 1, completions - 1

    def pin(self, address: int, nbytes: int) -> None:
        """Pin a range; until `close`."""
        span = (ctypes.c_uint64 * 2)(address, nbytes)
        _call(_REGISTER, self._fd, _REGISTER_BUFFERS, ctypes.addressof(span), 1)

    def copy(self, operation: int, fd: int, address: int, nbytes: int, offset: int) -> int:
        """Copy between pinned memory and a file; return the bytes copied. Raises OSError."""
        tail = struct.unpack_from("<I", self._memory, self._tail)[0]
        slot = tail & self._mask
        entry = struct.pack("<BxxxiQQI", operation, fd, offset, address, nbytes)
        at = slot * _ENTRY_BYTES
        self._entries[at : at + _ENTRY_BYTES] = entry.ljust(_ENTRY_BYTES, b"\0")
        struct.pack_into("<I", self._memory, self._array + 4 * slot, slot)
        struct.pack_into("<I", self._memory, self._tail, tail + 1)
        _call(_ENTER, self._fd, 1, 1, _GET_EVENTS, 0, 0)
        head = struct.unpack_from("<I", self._memory, self._head)[0]
        at = self._completed + 16 * (head & self._completion_mask)
        _, result, _ = struct.unpack_from("<QiI", self._memory, at)
        struct.pack_into("<I", self._memory, self._head, head + 1)
        if result <= 0:
            raise OSError(-result, os.strerror(-result))
        return int(result)

    def close(self) -> None:
        """End the ring, which unpins its buffer."""
        self._memory.close()
        self._entries.close()
        os.close(self._fd)


def _call(number: int, *arguments: int) -> int:
    longs = [ctypes.c_long(each) for each in (number, *arguments)]
    result: int = c_library().syscall(*longs)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
