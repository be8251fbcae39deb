"""Processes that are stopped: none of their threads runs any more, until it may."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast_bench.harness.pause import pause, resume

COUNT = """
import mmap, sys, threading, time
with open(sys.argv[1], "r+b") as file:
    counts = mmap.mmap(file.fileno(), 4)
def count(at):
    while True:
        counts[at] = (counts[at] + 1) % 256
        time.sleep(0.0001)
for at in range(3):
    threading.Thread(target=count, args=(at,)).start()
count(3)
"""
IN_A_CHILD = """
import subprocess, sys
subprocess.run([sys.executable, "-c", *sys.argv[1:]])
"""


@pytest.fixture
def counts():
    """A file in memory: in a file on disk a write waits while the disk takes older ones."""
    with os.fdopen(os.memfd_create("counts"), "r+b") as file:
        file.truncate(4)
        yield Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")


def await_count(counts):
    """Wait until any thread counts on; a busy machine may let it wait for minutes."""
    before = counts.read_bytes()
    while counts.read_bytes() == before:
        time.sleep(0.001)


def stands_still(counts, for_s):
    """Whether no thread counts on within this time."""
    before = counts.read_bytes()
    time.sleep(for_s)
    return counts.read_bytes() == before


@pytest.mark.parametrize("argv", [[COUNT], [IN_A_CHILD, COUNT]], ids=["itself", "its group"])
def test_no_thread_of_a_paused_process_runs_until_it_is_resumed(counts, argv):
    command = [sys.executable, "-c", *argv, str(counts)]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        for _ in range(20):
            await_count(counts)
            pause(process.pid)
            assert stands_still(counts, 0.01)
            resume(process.pid)
        await_count(counts)
    finally:
        pause(process.pid)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_process_that_leads_no_group_is_paused_alone(counts):
    with subprocess.Popen([sys.executable, "-c", COUNT, str(counts)]) as process:
        try:
            await_count(counts)
            pause(process.pid)
            assert stands_still(counts, 0.1)
        finally:
            process.kill()


def test_pausing_an_ended_process_is_an_error():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        with pytest.raises(ProcessLookupError):
            pause(process.pid)
