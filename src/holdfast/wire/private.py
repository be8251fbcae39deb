"""Start a node of one's own, which ends with the process that started it."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time

from holdfast.errors import NodeGoneError

READY = "READY "
_END_WITHIN_S = 10.0


class PrivateNode:
    """A child process that serves at `address` and keeps its blocks in a temporary folder.

    It ends when this object is closed or when this process ends, however that happens: it watches
    a pipe whose other end only this process, and what it forks, holds. `config_file` may set its
    tiers. Raises NodeGoneError with the node's words if it does not serve within `timeout_s`.
    """

    def __init__(self, config_file: str = "", timeout_s: float = 30.0) -> None:
        watched, self._lifeline = os.pipe()
        argv = [sys.executable, "-m", "holdfast", "serve", "--private"]
        argv += ["--log-level", "warning", "--with-parent", str(watched)]
        argv += ["--config", config_file] if config_file else []
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                pass_fds=[watched],
                start_new_session=True,  # an engine's Ctrl-C is not for the node
            )
        finally:
            os.close(watched)
        try:
            self.address = self._await_ready(timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The node's process id."""
        return self._process.pid

    def close(self) -> None:
        """Let the node end, and kill it if it does not."""
        if self._lifeline < 0:
            return
        os.close(self._lifeline)
        self._lifeline = -1
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_WITHIN_S)
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _await_ready(self, timeout_s: float) -> str:
        end_s, said = time.monotonic() + timeout_s, b""
        stdout = self._process.stdout
        while stdout is not None and not said.endswith(b"\n"):
            left_s = end_s - time.monotonic()
            if left_s <= 0 or not select.select([stdout], [], [], left_s)[0]:
                raise NodeGoneError(f"the private node did not serve within {timeout_s:g} s")
            part = os.read(stdout.fileno(), 4096)
            if not part:
                raise NodeGoneError("the private node ended before it served; its log says why")
            said += part
        return said.decode().strip().removeprefix(READY)
