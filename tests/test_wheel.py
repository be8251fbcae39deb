"""The wheel that is built has what the commands name, and little else."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from holdfast.sim.shipped import find_ladder, find_trace

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ("conversation", "taubench", "lmcache-agent", "azure-code")
BYTES_MAX = 1_800_000


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(folder), "."]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    (file,) = folder.glob("holdfast_kv-*.whl")
    return file


def test_traces_and_ladders_are_in_it(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for trace in SHIPPED:
        assert f"holdfast/sim/data/traces/{find_trace(trace).name}" in names
    for ladder in ("four-tiers", "host-and-disk", "cxl", "many-workers"):
        assert f"holdfast/sim/data/ladders/{find_ladder(ladder).name}" in names
    assert "holdfast/sim/data/traces/README.md" in names, "it has the licences"


def test_it_is_small_and_has_no_tests(wheel):
    assert wheel.stat().st_size < BYTES_MAX
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if name.startswith(("tests", "traces", "docs"))]


def test_what_it_has_can_be_simulated_without_the_repository(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    words = "sim conversation --ladder host-and-disk --model Llama-3.1-70B"
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", *words.split()],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
