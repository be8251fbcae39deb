"""Progress is a line for each step where there is no terminal; a kept folder is used once."""

import re
import subprocess
import sys

import pytest

from holdfast.errors import ConfigError
from holdfast_bench.cli import measuring


def test_a_bench_without_a_terminal_prints_its_progress_as_lines(tmp_path):
    argv = [sys.executable, "-m", "holdfast", "bench", "sim", "--quick", "--json", "-"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=240)
    steps = re.findall(r"^ +\d+ s  (.+)$", done.stderr, re.MULTILINE)
    assert steps[0] == "set-up ..."
    assert len(steps) > 1
    assert done.stdout.startswith("{"), "progress must not come between the JSON"


def test_a_folder_with_the_blocks_of_an_earlier_run_is_refused(tmp_path, engine_is_here):
    kept = tmp_path / "kept"
    kept.mkdir()
    with measuring.engines(kept) as folder:
        assert folder == kept
        (kept / "node").mkdir()
    with (
        pytest.raises(ConfigError, match=f"--keep {kept}: the folder is not empty; name another"),
        measuring.engines(kept),
    ):
        pass


def test_a_file_in_the_place_of_a_folder_is_refused_before_any_work(tmp_path, engine_is_here):
    file = tmp_path / "file"
    file.write_text("mine")
    for kept in (file, file / "below"):
        with (
            pytest.raises(ConfigError, match=f"--keep {kept}: .*; name a folder"),
            measuring.engines(kept),
        ):
            pass
    assert file.read_text() == "mine"
