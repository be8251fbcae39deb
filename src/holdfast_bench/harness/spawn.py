"""Start programs that end with this process (`lifetime.py`), safe against interrupts."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from holdfast_bench.harness.lifetime import owned


def start_owned(argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:  # noqa: ANN401  # Popen's
    """Start `owned(argv)` with the options of `subprocess.Popen`.

    SIGINT and SIGTERM that arrive during the start are handled after it. If their handler raises,
    the program is killed, because the caller has no handle to it yet.
    """
    process = None
    try:
        with _interrupts_deferred():
            process = subprocess.Popen(owned(argv), **options)
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
