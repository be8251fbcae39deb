"""Socket calls that keep the interpreter, because they are over sooner than getting it back takes.

Python gives the interpreter up around every socket call. With a busy thread beside, taking it back
costs up to the switch interval, 5 ms, for a send of 5 us. These calls never sleep for longer than
they are told, at most about a millisecond, and hold the interpreter meanwhile.
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
    """Send what fits right now; return how many bytes did, 0 if none. Raises OSError."""
    sent: int = _libc.send(fd, data, len(data), _NOW)
    if sent >= 0:
        return sent
    code = ctypes.get_errno()
    if code in (errno.EAGAIN, errno.EINTR):
        return 0
    raise OSError(code, os.strerror(code))


def readable_within(fd: int, milliseconds: int) -> bool:
    """Return whether there is something to receive, waiting that long at most."""
    watched = _PollFd(fd, select.POLLIN, 0)
    found: int = _libc.poll(ctypes.byref(watched), 1, milliseconds)
    return found > 0
