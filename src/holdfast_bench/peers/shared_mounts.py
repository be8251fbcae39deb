"""Shared file systems on this machine: JuiceFS and SeaweedFS, each mounted twice by FUSE.

Two mounts with a process each see one another as two hosts do, through their own caches.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast_bench.harness.pause import pause, resume
from holdfast_bench.harness.process import ChildProcess, listens, wait_until
from holdfast_bench.peers.seaweed_ports import free_seaweed_port

HOST = "127.0.0.1"
READY_S = 60.0
MOUNTS = ("a", "b")

_FUSE = Path("/dev/fuse")


def find_installed_program(name: str) -> str:
    """Return the path of a program from a package of this environment; empty if there is none."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name) or ""


def why_not(program: str, package: str) -> str:
    """Return why its file system cannot be mounted here; empty if it can."""
    if not find_installed_program(program):
        return f"{program} is not installed: pip install {package}"
    if os.geteuid() or not os.access(_FUSE, os.W_OK):
        return f"{_FUSE} cannot be used: it takes root, and a kernel with FUSE"
    return ""


class SharedMounts:
    """One file system that is mounted twice, at `paths`; a subclass starts its processes.

    Implements `holdfast.testing.shared_tier_contract.RemoteSide` for a folder on the first mount.
    """

    filesystem: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths = [folder / name for name in MOUNTS]
        self.mounts: dict[Path, ChildProcess] = {}
        self.servers: list[ChildProcess] = []

    def mount_command(self, path: Path) -> Sequence[str]:
        """Return the command that mounts the file system, and runs until it is unmounted."""
        raise NotImplementedError

    def start(self) -> None:
        """Mount it wherever it is not mounted."""
        for path in self.paths:
            if path in self.mounts:
                continue
            path.mkdir(parents=True, exist_ok=True)
            log = self.folder / f"{path.name}.log"
            argv = self.mount_command(path)
            process = self.mounts[path] = ChildProcess(f"mount of {path}", argv, log, {})
            wait_until(process, lambda: str(path) in mounted(), READY_S)  # noqa: B023  # called now

    def stall(self) -> None:
        """Stop the processes behind all mounts: calls on them block."""
        for process in self.mounts.values():
            pause(process.pid)

    def wake(self) -> None:
        for process in self.mounts.values():
            resume(process.pid)

    def kill(self) -> None:
        """Kill the processes behind all mounts: calls on them fail with ENOTCONN."""
        for process in self.mounts.values():
            process.kill()

    def restart(self) -> None:
        """Unmount what was killed, and mount it again; files are kept."""
        self.unmount()
        self.start()

    def unmount(self) -> None:
        """Unmount both, whether files are open or not."""
        for path, process in self.mounts.items():
            with contextlib.suppress(ProcessLookupError):
                resume(process.pid)
            argv = [shutil.which("umount") or "umount", "-l", str(path)]
            subprocess.run(argv, check=False, capture_output=True)
            process.stop(5.0)
        self.mounts = {}

    def close(self) -> None:
        self.unmount()
        for server in self.servers:
            server.kill()


class JuiceFs(SharedMounts):
    """JuiceFS: metadata in a SQLite file, data in a folder, a daemon for each mount."""

    filesystem = "fuse.juicefs"

    def __init__(self, folder: Path, options: Sequence[str] = ()) -> None:
        super().__init__(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._options = options
        self._program = find_installed_program("juicefs")
        self._metadata = f"sqlite3://{folder / 'metadata.db'}"
        argv = [self._program, "format", self._metadata, "shared", "--bucket", str(folder / "data")]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            raise HoldfastError(f"juicefs format fails: {done.stderr.strip()[-300:]}")

    def mount_command(self, path: Path) -> Sequence[str]:
        cache = self.folder / f"cache-{path.name}"
        argv = [self._program, "mount", "--no-usage-report", "--heartbeat", "2s"]
        return [*argv, "--cache-dir", str(cache), *self._options, self._metadata, str(path)]


class SeaweedFs(SharedMounts):
    """SeaweedFS: a server with a filer, and a process for each mount.

    Its mount breaks promises of POSIX: a reader may see a file before its content.
    """

    filesystem = "fuse.seaweedfs"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._program = find_installed_program("weed")
        self._filer = free_seaweed_port()
        (folder / "data").mkdir(parents=True)
        argv = [self._program, "-logtostderr", "server", f"-dir={folder / 'data'}", "-filer"]
        argv += ["-master.telemetry=false", f"-ip={HOST}", f"-ip.bind={HOST}", "-volume.max=8"]
        argv += [
            f"-master.port={free_seaweed_port()}",
            f"-volume.port={free_seaweed_port()}",
        ]
        argv += [f"-filer.port={self._filer}", "-master.volumeSizeLimitMB=256"]
        server = ChildProcess("weed server", argv, folder / "server.log", {})
        self.servers.append(server)
        wait_until(server, lambda: listens(self._filer), READY_S)

    def mount_command(self, path: Path) -> Sequence[str]:
        argv = [self._program, "-logtostderr", "mount", f"-filer={HOST}:{self._filer}"]
        return [*argv, f"-dir={path}", f"-cacheDir={self.folder / f'cache-{path.name}'}"]


def mounted() -> set[str]:
    """Return all mount points of this machine."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return {line.split(" ")[4] for line in lines}
