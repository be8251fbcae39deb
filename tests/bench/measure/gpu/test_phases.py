"""Phases run one by one, each for a limited time, and what one measured is kept."""

import time

import pytest

from holdfast.report import Row
from holdfast_bench.measure.gpu import phases
from holdfast_bench.measure.gpu.phases import Phase, PhaseRun, run_phases

pytest.importorskip("torch")

MEASURING = """
import sys, time, pathlib
from holdfast_bench.measure.gpu.phases import PhaseEnd, PhaseLine
from holdfast.report import Row
import msgspec
name, file, limit_s = sys.argv[1:4]
with open(file, "wb", buffering=0) as lines:
    row = Row(f"gpu.{name}", float(limit_s), "s")
    lines.write(msgspec.json.encode(PhaseLine(row=row)) + b"\\n")
    if name == "hangs":
        lines.write(b'{"row": {"what": "half a li')
        time.sleep(600)
    if name == "dies":
        sys.exit("the GPU fell off the bus")
    failure = "RuntimeError: no" if name == "fails" else ""
    lines.write(msgspec.json.encode(PhaseLine(end=PhaseEnd(failure))) + b"\\n")
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run phases whose process is the script above; return the rows of each by its name."""
    script = tmp_path / "phase_of_a_test.py"
    script.write_text(MEASURING)
    monkeypatch.setattr(phases, "PROCESS", "phase_of_a_test")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")

    def run(*chosen):
        given = [Phase(name, name, limit_s, "") for name, limit_s in chosen]
        found = run_phases(given, PhaseRun(tmp_path, rounds=1, rehearse=True))
        return {phase.name: rows for phase, rows in found}

    return run


def end(rows):
    return rows[-1].ok, rows[-1].more.get("why", "")


def run_until_measured(run, others):
    """Run a phase that hangs and others; give it longer until it measured something before."""
    for limit_s in (3, 15, 60):
        found = run(("hangs", limit_s), *others)
        assert end(found["hangs"]) == (False, f"took longer than {limit_s} s")
        if len(found["hangs"]) > 1:
            break
    return found


def test_a_phase_that_hangs_fails_or_dies_costs_its_own_figures_only(run):
    found = run_until_measured(run, [("fails", 60), ("dies", 60), ("works", 60)])
    assert end(found["fails"]) == (False, "RuntimeError: no")
    ok, why = end(found["dies"])
    assert not ok
    assert "the GPU fell off the bus" in why
    assert end(found["works"]) == (True, "")
    assert [[row.what for row in rows] for rows in found.values()] == [
        [f"gpu.{name}", f"gpu.phase.{name}"] for name in found
    ]


def test_time_that_a_phase_does_not_need_is_left_to_the_next(run):
    begun_s = time.monotonic()
    first, second = run(("works", 60), ("works too", 40)).values()
    took_s = time.monotonic() - begun_s
    assert first[0] == Row("gpu.works", 60.0, "s")
    assert 100 - took_s < second[0].value <= 100


def test_all_phases_together_take_nine_minutes_at_most():
    assert sum(phase.limit_s for phase in phases.PHASES) <= 540
