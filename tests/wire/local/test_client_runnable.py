"""Whether a process computes or sleeps, by the kernel's word."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from holdfast.wire.local.client import Client


def is_runnable(pid):
    """Whether a client whose node has this process id takes it for runnable."""
    return Client.node_is_runnable(SimpleNamespace(_node_pid=pid))


@pytest.fixture
def started():
    """Start Python code in a process of its own."""
    processes = []

    def start(code):
        processes.append(subprocess.Popen([sys.executable, "-c", code]))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def until(truth):
    end = time.monotonic() + 60
    while not truth():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_process_that_computes_is_runnable_and_one_that_is_stopped_is_not(started):
    busy = started("while True: pass")
    until(lambda: is_runnable(busy.pid))
    os.kill(busy.pid, signal.SIGSTOP)
    until(lambda: not is_runnable(busy.pid))


def test_a_sleeping_or_ended_process_is_not_runnable(started):
    asleep = started("import time; time.sleep(600)")
    until(lambda: not is_runnable(asleep.pid))
    asleep.kill()
    asleep.wait()
    assert not is_runnable(asleep.pid)


def test_the_own_process_and_an_unknown_one_are_not_runnable():
    assert not is_runnable(os.getpid())
    assert not is_runnable(0)
