"""`holdfast bench gpu`: what is refused, a rehearsal, and the file that grows with each phase."""

import json

import pytest

from holdfast.cli import INTERRUPTED, main
from holdfast.report import Row
from holdfast_bench.cli.bench import gpu

pytest.importorskip("rich")
pytest.importorskip("torch")


@pytest.fixture
def phases(monkeypatch):
    """Phases that take no time; returns those that were run, and what the files held then."""
    ran = []

    def run_phases(chosen, run):
        for phase in chosen:
            ran.append((phase.name, run.rounds))
            yield (
                phase,
                [
                    Row(f"gpu.{phase.name}", 1.0, "GB/s", limit=2.0, ratio=0.5, goal=0.9, ok=False),
                    Row(f"gpu.phase.{phase.name}", 1.0, "s", ok=phase.name != "decode"),
                ],
            )

    monkeypatch.setattr(gpu, "run_phases", run_phases)
    return ran


def test_a_rehearsal_runs_its_phases_in_processes(tmp_path, capsys):
    file = tmp_path / "gpu.json"
    argv = ["bench", "gpu", "--rehearse", "--phases", "bus,hardware", "--json", str(file)]
    assert main(argv) == 0
    names = [row["what"] for row in json.loads(file.read_text())["rows"]]
    assert names[:2] == ["gpu.memory", "gpu.phase.hardware"]
    assert names[-1] == "gpu.phase.bus"
    assert "step 2 of 2" in capsys.readouterr().err
    assert not file.with_name("gpu.json.part").exists()


def test_a_rehearsal_judges_whether_phases_ran_and_no_figure(phases, capsys):
    assert main(["bench", "gpu", "--rehearse", "--phases", "copies"]) == 0
    assert main(["bench", "gpu", "--rehearse", "--phases", "decode"]) == 1
    assert phases == [("copies", 1), ("decode", 1)]
    assert capsys.readouterr()


def test_what_was_measured_is_in_a_file_after_each_phase(phases, tmp_path, monkeypatch):
    file = tmp_path / "gpu.json"
    part = tmp_path / "gpu.json.part"
    seen = []

    def interrupted(chosen, run):
        for found in phases_of(chosen, run):
            seen.append(part.exists() and len(json.loads(part.read_text())["rows"]))
            if len(seen) == 3:
                raise KeyboardInterrupt
            yield found

    phases_of = gpu.run_phases
    monkeypatch.setattr(gpu, "run_phases", interrupted)
    assert main(["bench", "gpu", "--rehearse", "--json", str(file)]) == INTERRUPTED
    assert seen == [False, 2, 4]
    assert json.loads(part.read_text())["broken_off"]
    assert not file.exists()
    assert phases


def test_quick_leaves_out_the_phases_of_engines(phases):
    assert main(["bench", "gpu", "--rehearse", "--quick"]) == 0
    assert [name for name, _ in phases] == list(gpu.QUICK)


def test_an_unknown_phase_is_refused_with_the_known_ones(capsys):
    assert main(["bench", "gpu", "--phases", "copies,bis"]) == 2
    assert "--phases: 'bis' is not one of hardware, bus, locking" in capsys.readouterr().err
