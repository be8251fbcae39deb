"""LMCache's servers: one for a vLLM engine, and the remote one (`lm://`) with a client of ours.

The client uses LMCache's messages. LMCache's own client receives a record into a buffer that it
allocates; the client here receives it into the caller's buffer, which favours LMCache. The server
does not answer a put, so a batch of puts ends with a query for its last key.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import holdfast
from holdfast.errors import HoldfastError
from holdfast.probe import free_port
from holdfast_bench.harness.process import ChildProcess, listens, wait_until
from holdfast_bench.harness.server import HOST
from holdfast_bench.peers import lmcache_environment
from holdfast_bench.peers.plain_sockets import fill

READY_S = 60.0
MEMORY_GB = 2
CHUNK_TOKENS = 256
"""LMCache's default."""

WHY_NOT = "LMCache is not installed; `make lmcache` installs it in {folder} (60 MB)"


def installed() -> bool:
    """Whether LMCache is in `lmcache_environment`, or among the packages of this Python."""
    return lmcache_environment.installed() or find_spec("lmcache") is not None


def why_not() -> str:
    """Return why LMCache is not measured, and the command that installs it."""
    return WHY_NOT.format(folder=lmcache_environment.folder())


def variables(*modules: Path) -> dict[str, str]:
    """Return variables of a process that imports LMCache and the packages of this process.

    `modules`: folders from which it imports, too.
    """
    own = lmcache_environment.installed()
    if not own and not modules:
        return dict(lmcache_environment.VARIABLES)
    packages = [Path(str(holdfast.__file__)).parent.parent] if own else []
    return lmcache_environment.variables(*packages, *modules)


class LMCacheServer:
    """LMCache's multi-process server for one vLLM engine, which needs `variables`, too.

    Transfers use shared memory, LMCache's fastest transport on a CPU. The server ends with `stack`.
    `adapter`: an L2 adapter of the server; `modules`: folders from which it imports the adapter, if
    that is in none of the packages.
    """

    def __init__(
        self,
        stack: ExitStack,
        folder: Path,
        adapter: Mapping[str, object] | None = None,
        modules: Sequence[Path] = (),
    ) -> None:
        self._port, self._http_port = free_port(), free_port()
        argv = [
            *(sys.executable, "-m", "lmcache.cli.main", "server"),
            *("--host", HOST, "--port", str(self._port), "--http-port", str(self._http_port)),
            *("--l1-size-gb", str(MEMORY_GB), "--chunk-size", str(CHUNK_TOKENS)),
            *("--eviction-policy", "LRU", "--supported-transfer-mode", "auto"),
            *("--shm-name", f"holdfast-bench-{os.getpid()}"),
        ]
        if adapter is not None:
            argv += ["--l2-adapter", json.dumps(adapter)]
        if lmcache_environment.installed():
            argv.append("--disable-observability")  # it needs packages that the folder lacks
        log = folder / "lmcache.log"
        self._process = ChildProcess("lmcache", argv, log, variables(*modules))
        stack.enter_context(self._process)
        wait_until(self._process, lambda: listens(self._port), READY_S)

    def kv_transfer(self) -> dict[str, object]:
        """Return the engine's `--kv-transfer-config`."""
        address = {"lmcache.mp.host": f"tcp://{HOST}", "lmcache.mp.port": self._port}
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": address,
        }

    def held_bytes(self) -> int:
        """Return the bytes of KV state in the server's memory."""
        with closing(http.client.HTTPConnection(HOST, self._http_port, timeout=30.0)) as connection:
            connection.request("GET", "/status")
            status = json.loads(connection.getresponse().read())
        return int(status["storage_manager"]["l1_manager"]["memory_used_bytes"])


class LMCachePeer:
    """A server process and one connection to it; see `peers.MeasuredPeer`."""

    def __init__(self, folder: Path) -> None:
        lmcache_environment.make_importable()
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
        self._key, self._request, self._reply = CacheEngineKey, ClientMetaMessage, ServerMetaMessage
        self._command, self._good = ClientCommand, ServerReturnCode.SUCCESS
        self._format, self._dtype, self._shape = MemoryFormat(1), uint8, Size
        self._process: ExitStack = ExitStack()
        self._socket: Any = None
        self.clear()

    def put(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> None:
        """Send one record after the other; then query the last key, which waits for all."""
        for key, record in zip(keys, records, strict=True):
            self._send(self._command.PUT, key, len(record))
            self._socket.sendall(record)
        if self.exist(keys[-1:]) != 1:
            raise HoldfastError("LMCache's server did not store a record")

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        for key, place in zip(keys, into, strict=True):
            self._send(self._command.GET, key, 0)
            if not self._receive_code() or not fill(self._socket, place):
                raise HoldfastError("LMCache's server did not return a record")

    def exist(self, keys: Sequence[bytes]) -> int:
        found = 0
        for key in keys:
            self._send(self._command.EXIST, key, 0)
            found += self._receive_code()
        return found

    def forget(self, keys: Sequence[bytes]) -> None:
        """Do nothing: the server overwrites a record that it holds."""

    def clear(self) -> None:
        """Start a new server: its protocol has no command to empty it."""
        self.close()
        port = free_port()
        argv = [sys.executable, "-m", "lmcache.v1.server", HOST, str(port), "cpu"]
        process = ChildProcess("lmcache", argv, self._folder / "lmcache.log", variables())
        self._process.enter_context(process)
        wait_until(process, lambda: self._dial(port), READY_S)

    def close(self) -> None:
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
        name = self._key("holdfast", 1, 0, int.from_bytes(key, "little"), self._dtype)
        shape = self._shape([nbytes, 0, 0, 0])
        request = self._request(command, name, nbytes, self._format, self._dtype, shape)
        self._socket.sendall(request.serialize())

    def _receive_code(self) -> bool:
        reply = memoryview(bytearray(self._reply.packlength()))
        return (
            fill(self._socket, reply) and self._reply.deserialize(bytes(reply)).code == self._good
        )
