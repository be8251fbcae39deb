"""Every phase at toy sizes, without a GPU."""

import time

import pytest

torch = pytest.importorskip("torch")

from holdfast_bench.measure.gpu.accelerator import HostAccelerator  # noqa: E402
from holdfast_bench.measure.gpu.setting import Setting  # noqa: E402


@pytest.fixture
def setting(tmp_path):
    """What a phase is given: no GPU, one round, toy sizes, a minute."""
    return Setting(HostAccelerator(), tmp_path, time.monotonic() + 60, rounds=1, rehearse=True)


@pytest.fixture
def measured(setting):
    """Run a phase; return its rows by name."""

    def run(phase, **changed):
        return {row.what: row for row in phase.rows(setting._replace(**changed))}

    return run
