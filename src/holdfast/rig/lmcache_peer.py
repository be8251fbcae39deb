"""LMCache's remote server (`lm://`), spoken to with its own messages: one more peer to measure.

Its client brings a record into memory of its own making; here it is received where it is wanted,
which is in its favour. A put is not answered, so the last of a batch is followed by a question.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.probe import free_port
from holdfast.rig.process import Process, wait_until
from holdfast.rig.server import HOST

READY_S = 60.0
WHY_NOT = "lmcache is not installed (its packages ask for CUDA; --no-deps and a dozen others do)"


def installed() -> bool:
    """Whether this Python has LMCache's server."""
    return find_spec("lmcache") is not None


class LMCachePeer:
    """See `holdfast.rig.peers.Peer`. Starts the server, and a fresh one when it is to be empty."""

    def __init__(self, folder: Path) -> None:
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.memory_management import MemoryFormat
        from lmcache.v1.protocol import (
            ClientCommand,
            ClientMetaMessage,
            ServerMetaMessage,
            ServerReturnCode,
        )
        from torch import Size, uint8

        self._folder = folder
        self._key, self._ask, self._answer = CacheEngineKey, ClientMetaMessage, ServerMetaMessage
        self._command, self._good = ClientCommand, ServerReturnCode.SUCCESS
        self._format, self._kind, self._shape = MemoryFormat(1), uint8, Size
        self._process: ExitStack = ExitStack()
        self._socket: Any = None
        self.clear()

    def put(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> None:
        """Send one after the other; ask for the last, so that all are there."""
        for key, record in zip(keys, records, strict=True):
            self._send(self._command.PUT, key, len(record))
            self._socket.sendall(record)
        if self.exist(keys[-1:]) != 1:
            raise HoldfastError("LMCache's server did not take a record")

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        """Ask for one after the other."""
        for key, place in zip(keys, into, strict=True):
            self._send(self._command.GET, key, 0)
            if not self._receive_code() or not self._fill(place):
                raise HoldfastError("LMCache's server did not bring a record")

    def exist(self, keys: Sequence[bytes]) -> int:
        """Ask for one after the other."""
        found = 0
        for key in keys:
            self._send(self._command.EXIST, key, 0)
            found += self._receive_code()
        return found

    def forget(self, keys: Sequence[bytes]) -> None:
        """Nothing: a record is set again as if it were new."""

    def clear(self) -> None:
        """Start a fresh server: it has no other way."""
        self.close()
        port = free_port()
        argv = [sys.executable, "-m", "lmcache.v1.server", HOST, str(port), "cpu"]
        env = {"LMCACHE_TRACK_USAGE": "false"}
        process = Process("lmcache", argv, self._folder / "lmcache.log", env)
        self._process.enter_context(process)
        wait_until(process, lambda: self._dial(port), READY_S)

    def close(self) -> None:
        """Close the connection and end the server."""
        if self._socket is not None:
            self._socket.close()
        self._process.close()

    def _dial(self, port: int) -> bool:
        try:
            self._socket = socket.create_connection((HOST, port))
        except ConnectionRefusedError:
            return False
        return True

    def _send(self, command: Any, key: bytes, nbytes: int) -> None:  # noqa: ANN401  # LMCache's
        name = self._key("holdfast", 1, 0, int.from_bytes(key, "little"), self._kind)
        shape = self._shape([nbytes, 0, 0, 0])
        ask = self._ask(command, name, nbytes, self._format, self._kind, shape)
        self._socket.sendall(ask.serialize())

    def _receive_code(self) -> bool:
        said = memoryview(bytearray(self._answer.packlength()))
        return self._fill(said) and self._answer.deserialize(bytes(said)).code == self._good

    def _fill(self, place: memoryview) -> bool:
        at = 0
        while at < len(place):
            nbytes: int = self._socket.recv_into(place[at:])
            if not nbytes:
                return False
            at += nbytes
        return True
