"""Progress is a line for each step where there is no terminal."""

import re
import subprocess
import sys


def test_a_bench_on_a_pipe_says_what_it_does(tmp_path):
    argv = [sys.executable, "-m", "holdfast", "bench", "sim", "--quick", "--json", "-"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=240)
    steps = re.findall(r"^ +\d+ s  (.+)$", done.stderr, re.MULTILINE)
    assert steps[0] == "set-up ..."
    assert len(steps) > 1
    assert done.stdout.startswith("{"), "progress must not come between the JSON"
