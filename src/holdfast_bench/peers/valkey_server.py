"""Start Valkey or Redis servers on the loopback interface: a single one or a cluster."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from holdfast.address import TCP, HostPort
from holdfast.errors import HoldfastError
from holdfast.probe import free_port
from holdfast.tiers.valkey.resp import Reply, RespLogin, command, log_in
from holdfast.wire.remote.credentials import TlsFiles
from holdfast.wire.remote.stream import Deadline
from holdfast_bench.harness.process import ChildProcess, ServerProcesses, wait_until

HOST = "127.0.0.1"
READY_S = 60.0
ASK_S = 20.0
SLOTS = 16_384
NODE_TIMEOUT_MS = 1_000
"""A cluster counts a node as failed that is silent for this long."""

PROGRAMS = ("valkey-server", "redis-server")


def program() -> str | None:
    """Return the path of a server program, None if none is installed."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class ValkeyServers(ServerProcesses):
    """One server, or the masters of a cluster, each with its own port and folder.

    `flags` are added to each command line. A restart keeps ports and folders.
    """

    def __init__(
        self, folder: Path, nodes: int = 1, flags: Sequence[str] = (), tls: TlsFiles | None = None
    ) -> None:
        super().__init__()
        found = program()
        if found is None:
            raise HoldfastError(f"none of {', '.join(PROGRAMS)} is installed; install one")
        self.endpoints = [HostPort(HOST, free_port()) for _ in range(nodes)]
        self._folders = [folder / str(endpoint.port) for endpoint in self.endpoints]
        self._lines = []
        self.login = RespLogin()
        """The login that this object uses; set it before `start` if the flags set a password."""
        for endpoint, own in zip(self.endpoints, self._folders, strict=True):
            own.mkdir(parents=True)
            line = [found, "--port", str(endpoint.port), "--bind", HOST, "--dir", str(own)]
            if tls is not None:
                line += ["--tls-port", str(endpoint.port), "--port", "0"]
                line += ["--tls-cert-file", tls.cert, "--tls-key-file", tls.key]
                line += ["--tls-ca-cert-file", tls.ca]
            line += ["--save", "", "--appendonly", "no", "--logfile", str(own / "log"), *flags]
            if nodes > 1:
                line += ["--cluster-enabled", "yes", "--cluster-port", str(free_port())]
                line += ["--cluster-node-timeout", str(NODE_TIMEOUT_MS)]
            self._lines.append(line)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of the servers, `tcp://HOST:PORT`."""
        return tuple(f"{TCP}{endpoint.host}:{endpoint.port}" for endpoint in self.endpoints)

    def start(self) -> None:
        """Start the servers, join several into a cluster, and wait until they serve."""
        self.restart()
        if len(self.endpoints) > 1:
            self._form_cluster()
        self._wait(serving=True)

    def restart(self) -> None:
        """Start the servers again; members of a cluster find each other by their saved state."""
        known = (self._folders[0] / "nodes.conf").exists()
        self.processes = [
            ChildProcess(f"server {endpoint.port}", line, own / "out", {})
            for endpoint, line, own in zip(self.endpoints, self._lines, self._folders, strict=True)
        ]
        self._wait(serving=known)

    def ask(self, endpoint: HostPort, *words: str) -> Reply:
        """Send one command to one server; return its reply. Raises OSError if it sends none."""
        deadline = Deadline.within(ASK_S)
        with closing(log_in(endpoint, self.login, deadline)) as connection:
            [reply] = connection.ask([command(*(word.encode() for word in words))], deadline)
        return reply

    def _form_cluster(self) -> None:
        first = self.endpoints[0]
        count = len(self.endpoints)
        for number, endpoint in enumerate(self.endpoints):
            low, high = SLOTS * number // count, SLOTS * (number + 1) // count - 1
            self.ask(endpoint, "CLUSTER", "ADDSLOTSRANGE", str(low), str(high))
            if endpoint != first:
                bus = self._lines[0][self._lines[0].index("--cluster-port") + 1]
                self.ask(endpoint, "CLUSTER", "MEET", first.host, str(first.port), bus)

    def _wait(self, *, serving: bool) -> None:
        """Wait until every server answers, or until it serves its part of the cluster."""
        for endpoint, process in zip(self.endpoints, self.processes, strict=True):
            wait_until(process, lambda at=endpoint: self._answers(at, serving=serving), READY_S)  # type: ignore[misc]

    def _answers(self, endpoint: HostPort, *, serving: bool) -> bool:
        try:
            if serving and len(self.endpoints) > 1:
                found = self.ask(endpoint, "CLUSTER", "INFO")
                return isinstance(found, bytes) and b"cluster_state:ok" in found
            return self.ask(endpoint, "PING") == b"PONG"
        except (OSError, HoldfastError):
            return False
