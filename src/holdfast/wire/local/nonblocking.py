"""Short socket calls that hold the GIL, because reacquiring it takes longer than the calls.

Python releases the GIL around every socket call. If another thread computes, reacquiring the GIL
takes up to the switch interval, 5 ms, for a send of 5 us. These calls block at most for the given
time, about a millisecond, and hold the GIL for that time.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket

_libc = ctypes.PyDLL(None, use_errno=True)
_libc.send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_libc.send.restype = ctypes.c_ssize_t
_NOW = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


def send_now(fd: int, data: bytes) -> int:
    """Send as many bytes as the socket buffer takes; return their number. Raises OSError."""
    sent: int = _libc.send(fd, data, len(data), _NOW)
    if sent >= 0:
        return sent
    code = ctypes.get_errno()
    if code in (errno.EAGAIN, errno.EINTR):
        return 0
    raise OSError(code, os.strerror(code))


def readable_within(fd: int, milliseconds: int) -> bool:
    """Wait up to `milliseconds` for data to receive; return whether there is any."""
    watched = _PollFd(fd, select.POLLIN, 0)
    found: int = _libc.poll(ctypes.byref(watched), 1, milliseconds)
    return found > 0
