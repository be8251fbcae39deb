"""Child processes with a log file and a process group, which do not outlive this process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

from holdfast.errors import HoldfastError, NodeGoneError
from holdfast_bench.harness.lifetime import owned
from holdfast_bench.harness.pause import pause, resume

TAIL_LINES = 25
POLL_S = 0.05


class ChildProcess(AbstractContextManager["ChildProcess"]):
    """A program that runs until `stop`, `kill`, the end of a `with` block or of this process."""

    def __init__(self, name: str, argv: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        """Start `argv` with `env` added to the environment; append stdout and stderr to `log`."""
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        settings = [f"{key}={value}" for key, value in env.items()]
        with log.open("ab") as out:
            self._popen = start_owned(
                ["env", *settings, *argv],
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
        return self._popen.poll() is None

    def check(self) -> None:
        """Raise HoldfastError with the log's tail if the program has ended."""
        if not self.running:
            raise HoldfastError(
                f"{self.name} ended with status {self._popen.returncode}; {self.tail()}"
            )

    def tail(self) -> str:
        """Return the path of the log and its last lines, for the end of an error's text."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join([f"the end of {self.log}:", *lines[-TAIL_LINES:]])

    def stop(self, within_s: float = 15.0) -> None:
        """Send SIGTERM, wait up to `within_s`, and kill the rest of the group.

        A paused program (SIGSTOP) is resumed first, so that it can handle SIGTERM.
        """
        if self.running:
            self._popen.terminate()
            with contextlib.suppress(ProcessLookupError):
                resume(self.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(within_s)
        self.kill()

    def kill(self) -> None:
        """Kill the whole group (SIGKILL) and wait until the program has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.stop()
        else:
            self.kill()


class ServerProcesses:
    """Server processes of one peer, killed, paused and resumed together.

    Implements `holdfast.testing.shared_tier_contract.RemoteSide`.
    """

    def __init__(self) -> None:
        self.processes: list[ChildProcess] = []

    def kill(self) -> None:
        """Kill all; the data that they hold is lost."""
        processes, self.processes = self.processes, []
        for process in processes:
            process.kill()

    def stall(self) -> None:
        for process in self.processes:
            pause(process.pid)

    def wake(self) -> None:
        for process in self.processes:
            resume(process.pid)

    close = kill


def wait_until(
    process: ChildProcess, reached: Callable[[], bool], within_s: float, state: str = "ready"
) -> None:
    """Return once `reached()`; raise HoldfastError if the process ends or `within_s` passes.

    Does not stop the process. `state` names the awaited state in the error. If `reached` raises
    NodeGoneError, the error contains the end of the process's log.
    """
    end_s = time.monotonic() + within_s
    while True:
        try:
            if reached():
                return
        except NodeGoneError as error:
            process.check()
            raise HoldfastError(f"{process.name} hung up: {error}; {process.tail()}") from error
        process.check()
        if time.monotonic() > end_s:
            raise HoldfastError(
                f"{process.name} was not {state} within {within_s:.0f} s; {process.tail()}"
            )
        time.sleep(POLL_S)


def listens(port: int) -> bool:
    """Whether a program listens on this port of the loopback interface."""
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        return True
    return False


def start_owned(argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:  # noqa: ANN401  # Popen's
    """Start `owned(argv)` with the options of `subprocess.Popen`.

    SIGINT and SIGTERM that arrive during the start are handled after it. If their handler raises,
    the program is killed, because the caller has no handle to it yet.
    """
    process = None
    try:
        with _interrupts_deferred():
            process = cast("subprocess.Popen[bytes]", subprocess.Popen(owned(argv), **options))
    except BaseException:
        if process is not None:
            process.kill()
            process.wait()
        raise
    return process


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Run the Python handlers of SIGINT and SIGTERM after the block instead of within it.

    Only the main thread runs such handlers; in other threads this has no effect.
    """
    received: list[int] = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, lambda received_number, _: received.append(received_number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for received_number in received:
            signal.raise_signal(received_number)
