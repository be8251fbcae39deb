"""The process of a phase writes each row at once, and why it ended."""

import msgspec
import pytest

pytest.importorskip("torch")

from holdfast.report import Row
from holdfast_bench.measure.gpu import bus, phase_process
from holdfast_bench.measure.gpu.phases import PhaseLine


@pytest.fixture
def lines(tmp_path):
    """Run the phase `bus`; return the lines that it wrote, also if it failed."""

    def run(fails=None):
        file = tmp_path / "bus.jsonl"
        argv = [bus.__name__, str(file), "60", "1", "--rehearse"]
        if fails:
            with pytest.raises(fails):
                phase_process.main(argv)
        else:
            assert phase_process.main(argv) == 0
        return [
            msgspec.json.decode(line, type=PhaseLine) for line in file.read_bytes().splitlines()
        ]

    return run


def test_rows_are_followed_by_the_end(lines):
    *rows, last = lines()
    assert rows[0].row.what == "gpu.bus.to.1"
    assert last.end.failure == ""


def test_rows_before_a_failure_are_kept_with_its_reason(lines, monkeypatch):
    def rows(_setting):
        yield Row("gpu.first", 1.0, "s")
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(bus, "rows", rows)
    first, last = lines(fails=RuntimeError)
    assert first.row == Row("gpu.first", 1.0, "s")
    assert last.end.failure == (
        "RuntimeError: CUDA error: an illegal memory access was encountered"
    )
