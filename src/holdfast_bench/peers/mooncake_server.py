"""A Mooncake Store on the loopback interface: a master and a process that contributes memory."""

from __future__ import annotations

import itertools
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from holdfast.address import TCP
from holdfast.probe import free_port
from holdfast_bench.harness.process import ChildProcess, ServerProcesses, listens, wait_until

HOST = "127.0.0.1"
READY_S = 60.0
SEGMENT_BYTES = 1 << 30

_QUIET = {"GLOG_minloglevel": "1"}
_READY_LINE = "ready"
_CONTRIBUTE = f"""
import signal, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
if store.setup("{HOST}", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1]):
    sys.exit("no master at " + sys.argv[1])
print("{_READY_LINE}", flush=True)
signal.pause()
"""


def installed() -> bool:
    """Whether Mooncake's package is installed; its shared libraries may still be missing."""
    return find_spec("mooncake") is not None


def why_not() -> str:
    """Return why no Mooncake Store can run here, "" if one can. Imports it in a child process."""
    if not installed():
        return "Mooncake is not installed: pip install 'holdfast-kv[mooncake]'"
    argv = [sys.executable, "-c", "import mooncake.store"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if not done.returncode:
        return ""
    errors = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
    return f"Mooncake does not load ({errors[-1]}): apt install libibverbs1"


class MooncakeServers(ServerProcesses):
    """A master and a memory process, killed, stalled and restarted together on the same port."""

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        super().__init__()
        self._port = free_port()
        self._segment_bytes = segment_bytes
        self._folder = folder
        self._starts = itertools.count()

    @property
    def address(self) -> str:
        """The master's address in Holdfast's notation, `tcp://HOST:PORT`."""
        return f"{TCP}{self.master}"

    @property
    def master(self) -> str:
        """The master's address in Mooncake's notation, `HOST:PORT`."""
        return f"{HOST}:{self._port}"

    def start(self) -> None:
        start = next(self._starts)
        master = [str(Path(sys.executable).parent / "mooncake_master")]
        master += ["-rpc_address", HOST, "-rpc_port", str(self._port)]
        master += ["-metrics_port", str(free_port())]
        log = self._folder / f"master-{start}.log"
        self.processes = [ChildProcess("mooncake master", master, log, _QUIET)]
        wait_until(self.processes[0], lambda: listens(self._port), READY_S)
        memory = [sys.executable, "-c", _CONTRIBUTE, self.master, str(self._segment_bytes)]
        log = self._folder / f"memory-{start}.log"
        self.processes.append(ChildProcess("mooncake memory", memory, log, _QUIET))
        wait_until(self.processes[1], lambda: _READY_LINE in log.read_text().splitlines(), READY_S)

    restart = start
