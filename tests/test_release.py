"""A release has a wheel with what the commands name, its components, and checksums."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from holdfast import __version__
from holdfast.sim.shipped import find_ladder, find_trace

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ("conversation", "taubench", "lmcache-agent", "azure-code")
BYTES_MAX = 3_000_000


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """The folder of a release without its image, which tests of `deploy` build."""
    folder = tmp_path_factory.mktemp("release") / "dist"
    command = [sys.executable, "tools/release.py", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(release):
    (file,) = release.glob("holdfast_kv-*.whl")
    return file


def test_checksums_name_every_file_of_it(release):
    check = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    done = subprocess.run(check, cwd=release, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    listed = {line.split()[1] for line in (release / "SHA256SUMS").read_text().splitlines()}
    assert listed == {file.name for file in release.iterdir()} - {"SHA256SUMS"}
    rests = {name.partition(__version__)[2] for name in listed}
    assert rests == {".cdx.json", "-py3-none-any.whl", ".tar.gz"}


def test_the_sbom_lists_the_installed_dependencies(release):
    (file,) = release.glob("*.cdx.json")
    versions = {
        each["name"]: each["version"] for each in json.loads(file.read_text())["components"]
    }
    assert versions["holdfast-kv"] == __version__
    assert {"msgspec", "numpy", "PyYAML", "xxhash", "cryptography"} <= set(versions)
    assert not {"torch", "vllm", "pytest"} & set(versions)


def test_a_release_is_not_built_into_an_existing_folder(release):
    command = [sys.executable, "tools/release.py", str(release)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"{release} is there already; remove it" in done.stderr


def test_the_wheel_contains_the_shipped_traces_and_ladders(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for trace in SHIPPED:
        assert f"holdfast/sim/data/traces/{find_trace(trace).name}" in names
    for ladder in ("four-tiers", "host-and-disk", "cxl", "many-workers"):
        assert f"holdfast/sim/data/ladders/{find_ladder(ladder).name}" in names
    assert "holdfast/sim/data/traces/README.md" in names, "it has the licences"


def test_the_wheel_is_small_and_contains_no_tests(wheel):
    assert wheel.stat().st_size < BYTES_MAX
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if name.startswith(("tests", "traces", "docs"))]


def test_an_unpacked_wheel_runs_a_simulation_without_the_repository(wheel, tmp_path):
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
