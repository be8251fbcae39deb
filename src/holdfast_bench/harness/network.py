"""A network of simulated hosts on this machine, each with an address of its own.

As root, each host is a network namespace, connected to the others by a veth pair and a bridge in
another namespace; this machine's own network is neither visible nor changed. The namespaces are
unnamed: a process holds each of them, so that they end with this process in any case. Without
root, each host is a port of the loopback interface.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, TypeAlias

from holdfast.errors import HoldfastError
from holdfast.probe import free_port
from holdfast_bench.harness.process import ChildProcess, wait_until

PORT = 7441
LOOPBACK = "127.0.0.1"

_SUBNET, _BITS = "10.77.0", 24
_PROGRAMS = ("ip", "nsenter", "unshare")
_HOLD_READY_S = 30.0


class Host(NamedTuple):
    """A host: its address, and the command prefix that runs a program on it."""

    address: str
    inside: Sequence[str] = ()


class LoopbackNetwork:
    """Hosts that are ports of the loopback interface."""

    kind = "loopback ports"
    """Description of the hosts, for messages."""

    cuts = False
    """Whether hosts can be disconnected."""

    limits = False
    """Whether the rate of a host's link can be limited."""

    def host(self, bits_per_s: int = 0) -> Host:
        """Return a new host; it exists as long as the network.

        `bits_per_s`: rate of its link, each way; 0: no limit. Raises HoldfastError for another
        number if `limits` is false.
        """
        if bits_per_s:
            raise HoldfastError(f"a loopback port has no link of {bits_per_s} bit/s; run as root")
        return Host(f"tcp://{LOOPBACK}:{free_port()}")

    def cut(self, address: str) -> None:
        """Drop every packet to and from a host; raise HoldfastError if `cuts` is false."""
        raise HoldfastError(f"{address} is a loopback port and cannot be cut off; run as root")

    def mend(self, address: str) -> None:
        """Undo `cut`."""


class NamespaceNetwork:
    """Hosts in network namespaces, with the methods of `LoopbackNetwork`; needs root."""

    kind = "network namespaces"
    cuts = True
    limits = shutil.which("tc") is not None

    def __init__(self, stack: ExitStack, log: Path) -> None:
        """Create the bridge; `stack` ends all namespaces. Raises HoldfastError if refused."""
        self._stack = stack
        self._log = log
        self._hosts = 0
        self._cables: dict[str, str] = {}
        self._switch = self._hold("the switch")
        self._in(self._switch, "link", "add", "bridge", "type", "bridge")
        self._in(self._switch, "link", "set", "bridge", "up")

    def host(self, bits_per_s: int = 0) -> Host:
        self._hosts += 1
        name, address = f"host{self._hosts}", f"{_SUBNET}.{self._hosts}"
        held = self._hold(name)
        cable = ("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns")
        self._in(self._switch, *cable, str(held.pid))
        self._in(self._switch, "link", "set", name, "master", "bridge", "up")
        self._in(held, "addr", "add", f"{address}/{_BITS}", "dev", "eth0")
        for device in ("lo", "eth0"):
            self._in(held, "link", "set", device, "up")
        if bits_per_s:
            self._limit(held, "eth0", bits_per_s)
            self._limit(self._switch, name, bits_per_s)
        host = Host(f"tcp://{address}:{PORT}", _inside(held))
        self._cables[host.address] = name
        return host

    def cut(self, address: str) -> None:
        self._in(self._switch, "link", "set", self._cables[address], "down")

    def mend(self, address: str) -> None:
        self._in(self._switch, "link", "set", self._cables[address], "up")

    def _hold(self, name: str) -> ChildProcess:
        """Start the process that keeps a new namespace alive."""
        held = ChildProcess(name, ["unshare", "--net", "sleep", "infinity"], self._log, {})
        self._stack.callback(held.kill)
        ours = Path("/proc/self/ns/net").readlink()
        theirs = Path(f"/proc/{held.pid}/ns/net")

        def separated() -> bool:
            return theirs.exists() and theirs.readlink() != ours

        wait_until(held, separated, _HOLD_READY_S, "in a network of its own")
        return held

    def _limit(self, held: ChildProcess, device: str, bits_per_s: int) -> None:
        """Limit what leaves through a device."""
        bucket = ("tbf", "rate", f"{bits_per_s}bit", "burst", "256kb", "latency", "20ms")
        self._run(held, "tc", "qdisc", "add", "dev", device, "root", *bucket)

    def _in(self, held: ChildProcess, *words: str) -> None:
        self._run(held, "ip", *words)

    def _run(self, held: ChildProcess, *argv: str) -> None:
        done = subprocess.run([*_inside(held), *argv], capture_output=True, text=True, check=False)
        if done.returncode:
            raise HoldfastError(f"{' '.join(argv)}: {done.stderr.strip() or done.returncode}")


Network: TypeAlias = LoopbackNetwork | NamespaceNetwork
"""Creates hosts that reach one another."""


@contextmanager
def open_network(log: Path) -> Iterator[Network]:
    """Open a network of namespaces if this machine allows it, else one of loopback ports."""
    with ExitStack() as stack:
        network: Network = LoopbackNetwork()
        if os.geteuid() == 0 and all(map(shutil.which, _PROGRAMS)):
            try:
                spaces = NamespaceNetwork(stack, log)
                spaces.host()  # a kernel may allow a bridge and refuse a veth pair
                network = spaces
            except (HoldfastError, OSError):
                stack.close()
        yield network


def _inside(held: ChildProcess) -> list[str]:
    return ["nsenter", f"--net=/proc/{held.pid}/ns/net", "--"]
