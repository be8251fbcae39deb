"""The upper bound for a network store: plain sockets between 1 GiB pools of two processes.

Run as a module, it is the remote end: on request it sends blocks from random slots of its pool, or
receives blocks into them. `PlainPeer` starts that process and is the local end.
"""

from __future__ import annotations

import argparse
import random
import socket
import ssl
import struct
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from holdfast.address import HostPort
from holdfast.buffers import aligned_buffer
from holdfast.errors import HoldfastError
from holdfast.limits import GIB, MIB
from holdfast.probe import free_port
from holdfast.wire.remote.credentials import TlsFiles, client_context, server_context
from holdfast.wire.remote.stream import tune
from holdfast_bench.harness.process import ChildProcess, wait_until

POOL_BYTES = 1 * GIB
HOST = "127.0.0.1"
GET, PUT = 1, 2
SEED = 20_26
READY_S = 30.0
ANSWER_S = 60.0

_REQUEST = struct.Struct("<BQQ")
_DONE = b"."
_PIECE_BYTES = 2 * MIB


class PlainPool:
    """Memory too large for any cache, every page of it touched."""

    def __init__(self) -> None:
        self.memory = aligned_buffer(POOL_BYTES)
        self.memory[:] = b"\1" * POOL_BYTES
        self._random = random.Random(SEED)  # noqa: S311  # an order, not a secret

    def pick(self, nbytes: int, count: int) -> list[memoryview]:
        """Return `count` random blocks of `nbytes` bytes each, all different."""
        slots = range(POOL_BYTES // nbytes)
        starts = (slot * nbytes for slot in self._random.sample(slots, k=count))
        return [self.memory[start : start + nbytes] for start in starts]


class PlainPeer(AbstractContextManager["PlainPeer"]):
    """The local end, and the process of the remote end; use it in a `with` block."""

    def __init__(self, folder: Path, pool: PlainPool, tls: TlsFiles | None = None) -> None:
        self._pool = pool
        endpoint = HostPort(HOST, free_port())
        argv = [sys.executable, "-m", "holdfast_bench.peers.plain_sockets", str(endpoint.port)]
        argv += [tls.cert, tls.key, tls.ca] if tls else []
        self.process = ChildProcess("the plain peer", argv, folder / "plain.log", {})
        try:
            wait_until(self.process, lambda: self._dial(endpoint, tls), READY_S)
        except BaseException:
            self.process.kill()
            raise

    def get(self, nbytes: int, count: int) -> None:
        """Receive `count` blocks of `nbytes` bytes each into random slots."""
        self._socket.sendall(_REQUEST.pack(GET, nbytes, count))
        _receive(self._socket, self._pool.pick(nbytes, count))

    def put(self, nbytes: int, count: int) -> None:
        """Send `count` blocks of `nbytes` bytes each; return when the remote end has them."""
        self._socket.sendall(_REQUEST.pack(PUT, nbytes, count))
        _send(self._socket, self._pool.pick(nbytes, count))
        if self._socket.recv(1) != _DONE:
            raise HoldfastError("the plain peer closed the connection")

    def _dial(self, endpoint: HostPort, tls: TlsFiles | None) -> bool:
        try:
            connected = socket.create_connection(endpoint, ANSWER_S)
        except ConnectionRefusedError:
            return False
        tune(connected, endpoint)
        connected.settimeout(None)
        if tls is not None:
            connected = client_context(tls).wrap_socket(connected, server_hostname=HOST)
        self._socket = connected
        return True

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self.process.stop()


def _send(connected: socket.socket, blocks: list[memoryview]) -> None:
    for block in blocks:
        connected.sendall(block)


def _receive(connected: socket.socket, blocks: list[memoryview]) -> None:
    for block in blocks:
        if not fill(connected, block):
            raise HoldfastError("the other end closed the connection")


def fill(connected: socket.socket, into: memoryview) -> bool:
    """Receive until `into` is full; return False if the connection ends before."""
    flags = 0 if isinstance(connected, ssl.SSLSocket) else socket.MSG_WAITALL
    at = 0
    while at < len(into):
        nbytes = connected.recv_into(into[at : at + _PIECE_BYTES], 0, flags)
        if not nbytes:
            return False
        at += nbytes
    return True


def _serve(connected: socket.socket) -> None:
    pool, request = PlainPool(), memoryview(bytearray(_REQUEST.size))
    while fill(connected, request):
        verb, block_bytes, count = _REQUEST.unpack(request)
        blocks = pool.pick(block_bytes, count)
        if verb == GET:
            _send(connected, blocks)
        else:
            _receive(connected, blocks)
            connected.sendall(_DONE)


def _main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("port", type=int)
    parser.add_argument("tls", nargs="*", help="certificate, key and authority, to use TLS")
    args = parser.parse_args()
    with socket.create_server((HOST, args.port)) as listener:
        tune(listener, HostPort(HOST, args.port))
        connected, _ = listener.accept()
    if args.tls:
        context = server_context(TlsFiles(*args.tls))
        connected = context.wrap_socket(connected, server_side=True)
    with connected:
        _serve(connected)


if __name__ == "__main__":
    _main()
