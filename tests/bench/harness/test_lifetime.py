"""What a process starts ends with it, stopped processes and grandchildren included."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from holdfast_bench.harness import lifetime
from holdfast_bench.harness.lifetime import owned

FOREVER = "import time; time.sleep(600)"
PROGRAM = f"""
import os, subprocess, sys, pathlib
child = subprocess.Popen([sys.executable, "-c", {FOREVER!r}])
pathlib.Path(sys.argv[1]).write_text(f"{{os.getpid()}} {{child.pid}}\\n")
child.wait()
"""
OWNER = f"""
import subprocess, sys, time
from holdfast_bench.harness.lifetime import owned
subprocess.Popen(owned([sys.executable, "-c", {PROGRAM!r}, sys.argv[1]]))
time.sleep(600)
"""


def until(truth, within_s=60.0):
    end = time.monotonic() + within_s
    while not truth():
        assert time.monotonic() < end
        time.sleep(0.02)


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@contextlib.contextmanager
def started(argv, told):
    """Run a command; lend it and the numbers of the program and its child."""
    process = subprocess.Popen(argv)
    pids = []
    try:
        until(lambda: told.exists() and told.read_text().endswith("\n"))
        pids = [int(pid) for pid in told.read_text().split()]
        yield process, pids
    finally:
        for pid in (process.pid, *pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_program_and_its_children_end_when_the_owner_is_killed(tmp_path, stopped):
    with started([sys.executable, "-c", OWNER, str(tmp_path / "pids")], tmp_path / "pids") as run:
        owner, pids = run
        for pid in pids if stopped else ():
            os.kill(pid, signal.SIGSTOP)
        owner.kill()
        owner.wait()
        until(lambda: all(map(gone, pids)))


def test_children_that_outlive_the_program_end_with_the_owner(tmp_path):
    with started([sys.executable, "-c", OWNER, str(tmp_path / "pids")], tmp_path / "pids") as run:
        owner, (program, child) = run
        os.kill(program, signal.SIGKILL)
        until(lambda: gone(program))
        assert not gone(child)
        owner.kill()
        owner.wait()
        until(lambda: gone(child))


def test_output_and_status_are_those_of_the_program():
    argv = owned([sys.executable, "-c", "print('said'); raise SystemExit(3)"])
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (3, "said\n"), done.stderr


def test_a_program_has_no_child_and_no_descriptor_of_its_guardian():
    code = (
        "import os\n"
        "print(sorted(map(int, os.listdir('/proc/self/fd')))[3:-1])\n"
        "try: os.wait()\n"
        "except ChildProcessError: print('none')\n"
    )
    done = subprocess.run(
        owned([sys.executable, "-c", code]), capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\nnone\n"


def test_a_program_does_not_start_for_an_owner_that_has_ended():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    argv = [sys.executable, lifetime.__file__, str(ended.pid), "echo", "started"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")


def test_a_program_started_by_a_thread_of_this_process_runs(tmp_path):
    """As long as the thread lives: Linux takes the thread for the parent."""
    found = []

    def start():
        done = subprocess.run(owned(["echo", "said"]), capture_output=True, text=True, check=True)
        found.append(done.stdout)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert found == ["said\n"]
