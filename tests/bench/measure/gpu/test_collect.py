"""What is taken to a machine without a network: packages for its Python, tests, one script."""

import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.errors import ConfigError
from holdfast_bench.measure.gpu import collect


@pytest.fixture
def pip(monkeypatch):
    """A pip that downloads one wheel, or fails; returns the commands."""
    commands = []

    def run(argv, **_):
        commands.append(argv)
        if "msgspec" not in argv:
            return subprocess.CompletedProcess(argv, 1, "", "no such package")
        folder = Path(argv[argv.index("--dest") + 1])
        folder.mkdir()
        (folder / "a-1-py3-none-any.whl").write_bytes(bytes(1000))
        return subprocess.CompletedProcess(argv, 0, "", "")

    monkeypatch.setattr(collect, "subprocess", SimpleNamespace(run=run))
    return commands


def test_the_folder_has_packages_for_the_other_python_tests_and_a_script(pip, tmp_path):
    folder = tmp_path / "folder"
    assert collect.collect(folder, "3.13", "aarch64") > 1000
    assert {"--python-version=3.13", "--platform=manylinux_2_28_aarch64"} <= set(pip[0])
    assert "numpy" not in pip[0]
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {
        "bench-gpu",
        "wheels/a-1-py3-none-any.whl",
        "packages/holdfast/__main__.py",
        "packages/holdfast_bench/cli/bench/gpu.py",
        "tests/devices/cuda/test_on_gpu.py",
    } <= names
    assert not [name for name in names if name.endswith(".pyc")]


def test_the_script_installs_beside_itself_and_runs_the_bench(pip, tmp_path):
    folder = tmp_path / "folder"
    collect.collect(folder)
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\nmkdir -p "$7"; echo "$PYTHONPATH|$@"\n')
    python.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    argv = [str(folder / "bench-gpu"), "--json", "out.json"]
    said = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True).stdout
    install, bench = said.splitlines()
    wheel = f"{folder}/wheels/a-1-py3-none-any.whl"
    assert install.endswith(f"--no-index --no-deps --target {folder}/site {wheel}")
    assert bench == f"{folder}/packages:{folder}/site|-m holdfast bench gpu --json out.json"


def test_the_collected_packages_need_nothing_from_elsewhere(pip, tmp_path):
    """The copied bench starts, and finds the tests that lie beside it."""
    folder = tmp_path / "folder"
    collect.collect(folder)
    program = "from holdfast_bench.measure.gpu import gpu_tests as g; print(g.TESTS_FOLDER)"
    environment = {**os.environ, "PYTHONPATH": str(folder / "packages")}
    argv = [sys.executable, "-c", program]
    said = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True).stdout
    assert said == f"{folder / 'tests'}\n"


def test_the_collected_packages_declare_their_verbs(pip, tmp_path):
    """Without an installation, `holdfast` would not know `bench`."""
    folder = tmp_path / "folder"
    collect.collect(folder)
    declared = {
        (point.group, point.name)
        for found in distributions(path=[str(folder / "packages")])
        for point in found.entry_points
    }
    assert ("holdfast.verbs", "holdfast_bench") in declared


def test_a_folder_that_is_not_empty_is_refused(pip, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="the folder is not empty; name a new one"):
        collect.collect(tmp_path)
    assert pip == []


def test_what_pip_cannot_get_is_named(pip, tmp_path, monkeypatch):
    monkeypatch.setattr(collect, "PACKAGES", ("none",))
    with pytest.raises(ConfigError, match="pip cannot get the packages"):
        collect.collect(tmp_path / "folder")
    assert pip


def test_a_folder_that_is_too_large_is_an_error(pip, tmp_path, monkeypatch):
    monkeypatch.setattr(collect, "BYTES_MAX", 1_000)
    with pytest.raises(ConfigError, match="are more than 1000"):
        collect.collect(tmp_path / "folder")
    assert pip


@pytest.mark.parametrize("python", ["2.x", "3", "three", ""])
def test_another_version_of_python_is_refused(pip, tmp_path, python):
    with pytest.raises(ConfigError, match=r"--python: '.*' is not a version such as 3\.12"):
        collect.collect(tmp_path / "folder", python)
    assert not pip


def test_a_file_in_the_place_of_the_folder_is_refused(pip, tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="cannot be made: File exists; name a new folder"):
        collect.collect(file)
    assert not pip
