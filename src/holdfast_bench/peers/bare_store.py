"""A bare HTTP target in place of an object store: it keeps objects in memory, and checks nothing.

A put to a real store mostly measures the store. This one spends little time beside the sockets: it
receives a body into memory, and answers ranges from there. Run as a module, it is the server.
"""

from __future__ import annotations

import argparse
import re
import socket
import sys
import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.address import HostPort
from holdfast.buffers import aligned_buffer
from holdfast.limits import GIB, KIB, MIB
from holdfast.probe import free_port
from holdfast.wire.remote.stream import tune
from holdfast_bench.harness.process import ChildProcess, ServerProcesses, listens, wait_until
from holdfast_bench.peers.seaweed_server import BUCKET, s3_client, write_credentials

if TYPE_CHECKING:
    from obstore.store import S3Store

HOST = "127.0.0.1"
READY_S = 30.0
KEPT_BYTES = 2 * GIB
"""Bytes of large objects that are kept; the oldest ones leave."""

SMALL_BYTES = 1 * MIB
"""Objects up to this size are always kept: index objects."""

_HEAD_BYTES_MAX = 64 * KIB
_LISTING = (
    b'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult><Name>b</Name><Prefix></Prefix>'
    b"<KeyCount>0</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>"
    b"</ListBucketResult>"
)
_DATE = b"Last-Modified: Fri, 27 Nov 2026 00:00:00 GMT\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_RANGE = re.compile(rb"\r\nrange: *bytes=(\d+)-(\d+)", re.IGNORECASE)


class BareStore(ServerProcesses):
    """The process of the target, seen by its clients as an S3 store with one empty bucket."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._port = free_port()
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def endpoint(self) -> str:
        """The URL of the target."""
        return f"http://{HOST}:{self._port}"

    def store(self, bucket: str = BUCKET) -> S3Store:
        """Return a client of a bucket."""
        return s3_client(self.endpoint, bucket)

    def start(self) -> None:
        """Start the process; return when it listens."""
        argv = [sys.executable, "-m", "holdfast_bench.peers.bare_store", str(self._port)]
        process = ChildProcess("the bare target", argv, self._folder / "log", {})
        self.processes = [process]
        wait_until(process, lambda: listens(self._port), READY_S)

    def write_credentials(self, path: Path) -> Path:
        """Write keys, which the target does not check, into a credentials file; return its path."""
        return write_credentials(path)


class _Objects:
    """Objects by path, in the order of their puts; memory of those that leave is used again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: OrderedDict[bytes, memoryview] = OrderedDict()
        self._spare: list[memoryview] = []
        self._bytes = 0

    def memory(self, nbytes: int) -> memoryview:
        """Return memory for an object, used before if possible."""
        with self._lock:
            for at, spare in enumerate(self._spare):
                if len(spare) >= nbytes:
                    return self._spare.pop(at)
        return aligned_buffer(max(nbytes, 1))

    def put(self, path: bytes, memory: memoryview, nbytes: int) -> None:
        with self._lock:
            if path in self._objects:
                self._remove(path)
            self._objects[path] = memory[:nbytes]
            self._bytes += nbytes if nbytes > SMALL_BYTES else 0
            for oldest in list(self._objects):
                if self._bytes <= KEPT_BYTES:
                    break
                if len(self._objects[oldest]) > SMALL_BYTES:
                    self._remove(oldest)

    def get(self, path: bytes) -> memoryview | None:
        with self._lock:
            return self._objects.get(path)

    def _remove(self, path: bytes) -> None:
        gone = self._objects.pop(path)
        if len(gone) > SMALL_BYTES:
            self._bytes -= len(gone)
            self._spare.append(gone)


def _serve(connected: socket.socket, objects: _Objects) -> None:
    """Answer the requests of one connection until it ends."""
    received = bytearray()
    with connected:
        while True:
            while (end := received.find(b"\r\n\r\n")) < 0:
                piece = connected.recv(_HEAD_BYTES_MAX)
                if not piece:
                    return
                received += piece
            head, received = bytes(received[: end + 2]), received[end + 4 :]
            verb, target = head.split(b" ", 2)[:2]
            path, _, query = target.partition(b"?")
            length = _LENGTH.search(head)
            nbytes = int(length[1]) if length else 0
            body = objects.memory(nbytes)[:nbytes]
            body[: len(received)] = received
            done = len(received)
            received = bytearray()
            while done < nbytes:
                moved = connected.recv_into(body[done:], 0, socket.MSG_WAITALL)
                if not moved:
                    return
                done += moved
            _answer(connected, objects, (verb, path, query, head), body)


def _answer(
    connected: socket.socket,
    objects: _Objects,
    request: tuple[bytes, bytes, bytes, bytes],
    body: memoryview,
) -> None:
    verb, path, query, head = request
    if verb == b"PUT":
        objects.put(path, body, len(body))
        connected.sendall(b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: 0\r\n\r\n')
    elif verb != b"GET":
        connected.sendall(b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n")
    elif b"list-type" in query:
        lines = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(_LISTING)
        connected.sendall(lines + _LISTING)
    elif (found := objects.get(path)) is None:
        connected.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
    else:
        wanted = _RANGE.search(head)
        start, end = (int(wanted[1]), int(wanted[2]) + 1) if wanted else (0, len(found))
        part = found[start:end]
        span = b"bytes %d-%d/%d" % (start, start + len(part) - 1, len(found))
        status = b"206 Partial Content\r\nContent-Range: " + span if wanted else b"200 OK"
        lines = b'HTTP/1.1 %s\r\nETag: "1"\r\n%sContent-Length: %d\r\n\r\n'
        connected.sendall(lines % (status, _DATE, len(part)))
        connected.sendall(part)


def main() -> None:
    """Serve on the port that is given, until the process is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    port = parser.parse_args().port
    objects = _Objects()
    with socket.create_server((HOST, port)) as listener:
        while True:
            connected, _ = listener.accept()
            tune(connected, HostPort(HOST, port))
            threading.Thread(target=_serve, args=(connected, objects), daemon=True).start()


if __name__ == "__main__":
    main()
