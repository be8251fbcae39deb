"""Find the user of the other end of a TCP connection within this machine, from the kernel.

A Unix socket tells (SO_PEERCRED); for TCP the kernel is asked for the peer's socket, which is a
socket of this network namespace too. NETLINK_SOCK_DIAG finds it by its addresses; if there is none,
as in some sandboxes, /proc/net/tcp lists all. Only an established socket that a process has open
counts: the kernel reports user 0 for sockets that were closed, or not accepted yet.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import struct
import sys
from pathlib import Path
from typing import NamedTuple

from holdfast.address import HostPort
from holdfast.errors import RefusedError
from holdfast.wire.local.peer_check import ROOT, is_unmapped

_ALL_STATES = (1 << 32) - 1

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLMSG_ERROR, _NLM_F_REQUEST = 4, 20, 2, 1
_ESTABLISHED = 1
_ANY_COOKIE = b"\xff" * 8
_ANSWER_S = 1.0
_ANSWER_BYTES = 8192
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI2s2s16s16sI8s")
"""family, protocol, extensions, padding, states; ports, addresses, interface, cookie"""
_FOUND = struct.Struct("=BBBB2s2s16s16sI8sIIIII")
"""family, state, timer, retransmissions; ports, addresses, interface, cookie; then
expires, queues, user, inode"""


class _Pair(NamedTuple):
    """The two ends of a connection, as the peer's socket has them: its own end first."""

    family: int
    own: HostPort
    other: HostPort


def is_loopback(connected: socket.socket) -> bool:
    """Return whether the other end of a TCP connection has a loopback address."""
    peer = connected.getpeername()
    return isinstance(peer, tuple) and ipaddress.ip_address(_plain(peer[0])).is_loopback


def peer_user(connected: socket.socket) -> int | None:
    """Return the user whose process has the other end of a TCP connection.

    None if that is not known: the peer has gone, or is not in this network namespace, or its user
    has no number in this user namespace.
    """
    try:
        pair = _pair(connected)
    except OSError:
        return None
    try:
        user = _from_netlink(pair)
    except OSError:
        user = _from_proc(pair)
    try:
        return None if user is None or is_unmapped(user) else user
    except OSError:
        return None


def check_peer(connected: socket.socket, what: str, remedy: str) -> None:
    """Raise RefusedError unless the peer's user is this process's or root; `what` names the peer.

    Call it after the peer's first message, because the kernel knows the user of a socket only once
    the other side has accepted the connection.
    """
    user, allowed = peer_user(connected), {os.geteuid(), ROOT}
    if user in allowed:
        return
    names = " and ".join(f"user {each}" for each in sorted(allowed))
    found = (
        f"user {user}" if user is not None else "a user that this machine's kernel does not tell"
    )
    raise RefusedError(
        f"{what} belongs to {found}; over loopback TCP without TLS and tokens only {names} "
        f"may be there; {remedy}"
    )


def _pair(connected: socket.socket) -> _Pair:
    ours, theirs = connected.getsockname()[:2], connected.getpeername()[:2]
    own, other = (HostPort(_plain(host), port) for host, port in (theirs, ours))
    family = socket.AF_INET6 if ":" in own.host else socket.AF_INET
    return _Pair(family, own, other)


def _plain(host: str) -> str:
    """Return an address without its zone, and as IPv4 if it is a mapped one."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _from_netlink(pair: _Pair) -> int | None:
    """Ask for one socket. Raises OSError if there is none, or the kernel has no such interface."""
    wanted = _REQUEST.pack(
        *(pair.family, socket.IPPROTO_TCP, 0, 0, _ALL_STATES),
        *(pair.own.port.to_bytes(2, "big"), pair.other.port.to_bytes(2, "big")),
        *(
            socket.inet_pton(pair.family, pair.own.host),
            socket.inet_pton(pair.family, pair.other.host),
        ),
        *(0, _ANY_COOKIE),
    )
    header = _HEADER.pack(_HEADER.size + len(wanted), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0)
    kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
    with socket.socket(socket.AF_NETLINK, kind, _NETLINK_SOCK_DIAG) as asking:
        asking.settimeout(_ANSWER_S)
        asking.sendto(header + wanted, (0, 0))
        answer = asking.recv(_ANSWER_BYTES)
    kind = _HEADER.unpack_from(answer)[1]
    if kind == _NLMSG_ERROR:
        (code,) = struct.unpack_from("=i", answer, _HEADER.size)
        raise OSError(-code, os.strerror(-code))
    if kind != _SOCK_DIAG_BY_FAMILY or len(answer) < _HEADER.size + _FOUND.size:
        raise OSError(errno.EPROTO, os.strerror(errno.EPROTO))
    _, state, _, _, own, other, *_, user, inode = _FOUND.unpack_from(answer, _HEADER.size)
    ports = int.from_bytes(own, "big"), int.from_bytes(other, "big")
    open_there = state == _ESTABLISHED and inode and ports == (pair.own.port, pair.other.port)
    return user if open_there else None


def _from_proc(pair: _Pair) -> int | None:
    """Look for one socket in the lists of all: a mapped IPv4 connection may be in either."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            lines = Path("/proc/thread-self/net", name).read_text("ascii").splitlines()[1:]
            for line in lines:
                _, own, other, state, _, _, _, user, _, inode, *_ = line.split()
                is_open = int(state, 16) == _ESTABLISHED and int(inode)
                if is_open and (_end(own), _end(other)) == (pair.own, pair.other):
                    return int(user)
    return None


def _end(text: str) -> HostPort:
    """Return an end as /proc shows it: words of the address in the processor's byte order."""
    address, port = text.split(":")
    words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
    raw = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
    return HostPort(_plain(str(ipaddress.ip_address(raw))), int(port, 16))
