"""A command that is ended, however it is, leaves no process and in the end no folder."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("rich")


def until(truth, within_s=60.0):
    end = time.monotonic() + within_s
    while not truth():
        assert time.monotonic() < end
        time.sleep(0.05)


def serving(folder, *, running=False):
    """Return the processes that serve a configuration below a folder, or are about to.

    With `running`, only those that no longer run `holdfast_bench.harness.lifetime`.
    """
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else ()
            starting = any(word.endswith(b"lifetime.py") for word in words)
            ours = b"serve" in words and any(word.startswith(bytes(folder)) for word in words)
            if ours and not (running and starting):
                found.append(int(entry.name))
    return found


@pytest.fixture
def folder(tmp_path_factory):
    """Return one with a short name: sockets are in it."""
    return tmp_path_factory.mktemp("e")


@pytest.fixture
def bench(folder):
    """Run a bench whose nodes are stopped as soon as one of them runs."""
    argv = [sys.executable, "-m", "holdfast", "bench", "pool", "--only", "trouble"]
    process = subprocess.Popen(
        [*argv, "--folder", str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: serving(folder, running=True))
        for pid in serving(folder, running=True):
            os.kill(pid, signal.SIGSTOP)
        yield process
    finally:
        process.kill()
        process.wait()
        for pid in serving(folder):
            os.kill(pid, signal.SIGKILL)


def test_sigterm_ends_a_bench_and_its_stopped_nodes(bench, folder):
    bench.terminate()
    assert bench.wait(120) == 130
    until(lambda: not serving(folder))
    assert list(folder.iterdir()) == []


def test_a_killed_bench_leaves_no_node_and_the_next_one_sweeps_its_folder(bench, folder, holdfast):
    bench.kill()
    bench.wait()
    until(lambda: not serving(folder))
    assert list(folder.iterdir())
    swept = holdfast("soak", "flips.wire", "--faults", "1", "--folder", folder)
    assert swept.returncode == 0, swept.stderr
    assert list(folder.iterdir()) == []
