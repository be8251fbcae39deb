"""The kernels under a sanitizer: where there is none, with a finding, and without one."""

import pytest

pytest.importorskip("torch")

from holdfast.errors import HoldfastError
from holdfast_bench.measure.gpu import sanitizer


def test_a_rehearsal_runs_what_the_sanitizer_watches(measured):
    assert list(measured(sanitizer)) == ["gpu.sanitizer.rehearsed"]


def test_without_a_sanitizer_nothing_is_measured(measured, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sanitizer, "PLACES", ())
    (row,) = measured(sanitizer, rehearse=False).values()
    assert row.more["why"] == "compute-sanitizer is not installed"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Call with a shell script to install it in the sanitizer's place."""

    def install(script):
        file = tmp_path / "compute-sanitizer"
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
        monkeypatch.setattr(sanitizer, "PLACES", (str(tmp_path),))
        monkeypatch.setenv("PATH", "/usr/bin:/bin")

    return install


def test_each_tool_of_the_sanitizer_watches_both_kernels(measured, installed, tmp_path):
    installed(f'echo "$@" >> {tmp_path}/calls')
    found = measured(sanitizer, rehearse=False)
    assert [row.ok for row in found.values()] == [True, True, True]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.split()[:2] for call in calls] == [["--tool", tool] for tool in sanitizer.TOOLS]
    assert all(call.endswith("-m holdfast_bench.measure.gpu.sanitizer") for call in calls)


def test_a_finding_ends_the_phase_with_what_was_found(measured, installed):
    installed('echo "Invalid __global__ write of size 16 bytes"; exit 86')
    with pytest.raises(HoldfastError, match="ended with 86: Invalid __global__ write"):
        measured(sanitizer, rehearse=False)
