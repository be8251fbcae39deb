"""One child process with a log file, its own process group and a certain end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from holdfast.errors import HoldfastError, NodeGoneError
from holdfast.pause import pause, resume

TAIL_LINES = 25
POLL_S = 0.05


class Process:
    """A program that runs until `stop`, `kill`, the end of a `with` block, or our own end."""

    def __init__(self, name: str, argv: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        """Start `argv` with `env` added to our environment; both its outputs append to `log`."""
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        settings = [f"{key}={value}" for key, value in env.items()]
        launch = [sys.executable, "-m", "holdfast.rig.launch", str(os.getpid())]
        with log.open("ab") as out:
            self._popen = subprocess.Popen(
                [*launch, "env", *settings, *argv],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process id, which is also the id of its group."""
        return self._popen.pid

    @property
    def running(self) -> bool:
        """Whether the program has not ended yet."""
        return self._popen.poll() is None

    def check(self) -> None:
        """Raise HoldfastError with the log's tail if the program has ended by itself."""
        if not self.running:
            raise HoldfastError(
                f"{self.name} ended with status {self._popen.returncode}; "
                f"the end of {self.log}:\n{self.tail()}"
            )

    def tail(self) -> str:
        """Return the last lines of the log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])

    def stop(self, within_s: float = 15.0) -> None:
        """Ask the program to end (SIGTERM), and kill what is left of its group after that time."""
        if self.running:
            self._popen.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(within_s)
        self.kill()

    def kill(self) -> None:
        """End the whole group at once (SIGKILL) and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.stop()
        else:
            self.kill()


class Servers:
    """Processes that are killed, stalled and let go on together: what others run against.

    As `holdfast.testing.shared_tier_contract.FarSide` wants it.
    """

    def __init__(self) -> None:
        self.processes: list[Process] = []

    def kill(self) -> None:
        """End all at once; what they held is gone."""
        processes, self.processes = self.processes, []
        for process in processes:
            process.kill()

    def stall(self) -> None:
        """Stop all where they are."""
        for process in self.processes:
            pause(process.pid)

    def wake(self) -> None:
        """Let them go on."""
        for process in self.processes:
            resume(process.pid)

    def close(self) -> None:
        """End them."""
        self.kill()


def wait_until(
    process: Process, reached: Callable[[], bool], within_s: float, state: str = "ready"
) -> None:
    """Return once `reached()`; raise HoldfastError if the process ends or the time runs out.

    Leaves the process as it is. `state` says in the error what was waited for.
    """
    end_s = time.monotonic() + within_s
    while not _reached(process, reached):
        process.check()
        if time.monotonic() > end_s:
            raise HoldfastError(
                f"{process.name} was not {state} within {within_s:.0f} s; "
                f"the end of {process.log}:\n{process.tail()}"
            )
        time.sleep(POLL_S)


def _reached(process: Process, reached: Callable[[], bool]) -> bool:
    """Ask; where the program hangs up on us, say what it wrote last."""
    try:
        return reached()
    except NodeGoneError as error:
        process.check()
        raise HoldfastError(
            f"{process.name} hung up: {error}; the end of {process.log}:\n{process.tail()}"
        ) from error
