"""A program that starts while a signal arrives is neither lost nor left behind."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from holdfast_bench.harness import process as spawn
from holdfast_bench.harness.process import start_owned

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


class Interrupted(BaseException):
    """What the handler of the test raises."""


@pytest.fixture
def raising():
    def handle(_number, _frame):
        raise Interrupted

    before = signal.signal(signal.SIGTERM, handle)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_signal_while_a_program_starts_kills_it_and_is_raised(raising, monkeypatch):
    made, popen = [], subprocess.Popen

    def interrupted(argv, **options):
        process = popen(argv, **options)
        made.append(process)
        os.kill(process.pid, signal.SIGSTOP)
        signal.raise_signal(signal.SIGTERM)
        return process

    monkeypatch.setattr(spawn.subprocess, "Popen", interrupted)
    with pytest.raises(Interrupted):
        start_owned(SLEEP)
    assert made[0].returncode == -signal.SIGKILL
    with pytest.raises(Interrupted):
        signal.raise_signal(signal.SIGTERM)


def test_a_program_starts_from_a_thread(raising):
    processes = []
    thread = threading.Thread(target=lambda: processes.append(start_owned(["sleep", "0"])))
    thread.start()
    thread.join()
    assert processes[0].wait() in (0, -signal.SIGKILL)  # the thread that started it may end first


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        process = start_owned(["true"])
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        assert process.wait() == 0
    finally:
        signal.signal(signal.SIGTERM, before)
