"""Time that a thread waits for a processor does not count against a node."""

import os
import subprocess
import sys
import threading
import time

from holdfast.client.timeouts import RunningClock


def test_the_running_clock_counts_sleep_but_not_waiting_for_a_processor():
    """Beside a process that never sleeps, on one processor, this thread waits for its turns."""
    core = min(os.sched_getaffinity(0))
    busy = f"import os\nos.sched_setaffinity(0, {{{core}}})\nprint(flush=True)\nwhile True: pass"
    told = []

    def measure():
        os.sched_setaffinity(0, {core})  # of this thread alone
        clock = RunningClock()
        begun_s, ran_s = time.monotonic(), clock()
        while time.monotonic() - begun_s < 1.0:
            pass
        told.append((time.monotonic() - begun_s, clock() - ran_s))

    others = [
        subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE) for _ in range(4)
    ]
    try:
        for other in others:
            other.stdout.readline()
        thread = threading.Thread(target=measure)
        thread.start()
        thread.join()
    finally:
        for other in others:
            other.kill()
            other.wait()
            other.stdout.close()
    [(wall_s, ran_s)] = told
    assert 0 < ran_s < 0.6 * wall_s, "four others have most of the processor"


def test_the_running_clock_is_wall_clock_time_without_schedstat(monkeypatch):
    monkeypatch.setattr("holdfast.client.timeouts._SCHEDSTAT", "/nowhere")
    clock = RunningClock()
    before, told_s, after = time.monotonic(), clock(), time.monotonic()
    assert before <= told_s <= after
