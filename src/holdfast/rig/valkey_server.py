"""Real Valkey or Redis servers on the loopback interface, one or a cluster, for tests and rows."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.probe import free_port
from holdfast.rig.process import Process, Servers, wait_until
from holdfast.wire.address import TCP, HostPort
from holdfast.wire.credentials import TlsFiles
from holdfast.wire.resp import Login, Reply, command, log_in
from holdfast.wire.stream import Deadline

HOST = "127.0.0.1"
READY_S = 60.0
ASK_S = 20.0
SLOTS = 16_384
NODE_TIMEOUT_MS = 1_000
"""How long a cluster's node may be silent before the others mind."""

PROGRAMS = ("valkey-server", "redis-server")


def program() -> str | None:
    """Return the path of a server; None where neither is installed."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class ValkeyServers(Servers):
    """One server, or the masters of a cluster, each with a port and folder of its own.

    `flags` are added to each command line. They can be restarted where they were.
    """

    def __init__(
        self,
        folder: Path,
        nodes: int = 1,
        flags: Sequence[str] = (),
        tls: TlsFiles | None = None,
    ) -> None:
        super().__init__()
        found = program()
        if found is None:
            raise HoldfastError(f"none of {', '.join(PROGRAMS)} is installed; install one")
        self.endpoints = [HostPort(HOST, free_port()) for _ in range(nodes)]
        self._folders = [folder / str(endpoint.port) for endpoint in self.endpoints]
        self._lines = []
        self.login = Login()
        """How the rig itself gets in; set it, before `start`, if the flags ask for a password."""
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
        """Where they listen."""
        return tuple(f"{TCP}{endpoint.host}:{endpoint.port}" for endpoint in self.endpoints)

    def start(self) -> None:
        """Start them, make them a cluster if they are several, and wait until they serve."""
        self.restart()
        if len(self.endpoints) > 1:
            self._meet()
        self._await("well")

    def restart(self) -> None:
        """Start them where they were; members of a cluster still know one another."""
        known = (self._folders[0] / "nodes.conf").exists()
        self.processes = [
            Process(f"server {endpoint.port}", line, own / "out", {})
            for endpoint, line, own in zip(self.endpoints, self._lines, self._folders, strict=True)
        ]
        self._await("well" if known else "there")

    def ask(self, endpoint: HostPort, *words: str) -> Reply:
        """Send one command to one server; raises OSError where it does not answer."""
        deadline = Deadline.within(ASK_S)
        connection = log_in(endpoint, self.login, deadline)
        try:
            [reply] = connection.ask([command(*(word.encode() for word in words))], deadline)
        finally:
            connection.close()
        return reply

    def _meet(self) -> None:
        first = self.endpoints[0]
        count = len(self.endpoints)
        for number, endpoint in enumerate(self.endpoints):
            low, high = SLOTS * number // count, SLOTS * (number + 1) // count - 1
            self.ask(endpoint, "CLUSTER", "ADDSLOTSRANGE", str(low), str(high))
            if endpoint != first:
                bus = self._lines[0][self._lines[0].index("--cluster-port") + 1]
                self.ask(endpoint, "CLUSTER", "MEET", first.host, str(first.port), bus)

    def _await(self, state: str) -> None:
        for endpoint, process in zip(self.endpoints, self.processes, strict=True):
            wait_until(process, lambda at=endpoint: self._is(at, state), READY_S)  # type: ignore[misc]

    def _is(self, endpoint: HostPort, state: str) -> bool:
        try:
            if state == "well" and len(self.endpoints) > 1:
                found = self.ask(endpoint, "CLUSTER", "INFO")
                return isinstance(found, bytes) and b"cluster_state:ok" in found
            return self.ask(endpoint, "PING") == b"PONG"
        except (OSError, HoldfastError):
            return False
