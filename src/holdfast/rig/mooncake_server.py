"""A real Mooncake Store on the loopback interface: its master, and a process that lends memory."""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from holdfast.probe import free_port
from holdfast.rig.process import Process, Servers, wait_until
from holdfast.wire.address import TCP

HOST = "127.0.0.1"
READY_S = 60.0
SEGMENT_BYTES = 1 << 30

_QUIET = {"GLOG_minloglevel": "1"}
_LENT = "lent"
_LEND = f"""
import signal, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
if store.setup("{HOST}", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1]):
    sys.exit("no master at " + sys.argv[1])
print("{_LENT}", flush=True)
signal.pause()
"""


def installed() -> bool:
    """Whether Mooncake's package is there; its libraries may still be missing."""
    return find_spec("mooncake") is not None


def why_not() -> str:
    """Return why no Mooncake Store can run here, "" where one can; it is loaded to find out."""
    if not installed():
        return "Mooncake is not installed: pip install 'holdfast[mooncake]'"
    argv = [sys.executable, "-c", "import mooncake.store"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
    return (
        f"Mooncake does not load ({said[-1]}): apt install libibverbs1" if done.returncode else ""
    )


class MooncakeServers(Servers):
    """Master and lender. Killed, stalled and restarted together, where they were."""

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        super().__init__()
        self._port = free_port()
        self._segment_bytes = segment_bytes
        self._folder = folder
        self._turns = itertools.count()

    @property
    def address(self) -> str:
        """Where the master listens, as Holdfast writes it."""
        return f"{TCP}{self.master}"

    @property
    def master(self) -> str:
        """Where the master listens, as Mooncake writes it."""
        return f"{HOST}:{self._port}"

    def start(self) -> None:
        """Start master and lender, and wait until both are ready."""
        turn = next(self._turns)
        master = [str(Path(sys.executable).parent / "mooncake_master")]
        master += ["-rpc_address", HOST, "-rpc_port", str(self._port)]
        master += ["-metrics_port", str(free_port())]
        log = self._folder / f"master-{turn}.log"
        self.processes = [Process("mooncake master", master, log, _QUIET)]
        wait_until(self.processes[0], self._listens, READY_S)
        lender = [sys.executable, "-c", _LEND, self.master, str(self._segment_bytes)]
        log = self._folder / f"lender-{turn}.log"
        self.processes.append(Process("mooncake lender", lender, log, _QUIET))
        wait_until(self.processes[1], lambda: _LENT in log.read_text(), READY_S)

    def restart(self) -> None:
        """Start them again, empty."""
        self.start()

    def _listens(self) -> bool:
        try:
            socket.create_connection((HOST, self._port), timeout=1.0).close()
        except OSError:
            return False
        return True
