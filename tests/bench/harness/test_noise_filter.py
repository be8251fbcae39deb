"""A sample counts where nobody else computed beside it, whatever it came out as."""

import os

import pytest

from holdfast_bench.harness import noise_filter as module
from holdfast_bench.harness.noise_filter import OtherProcesses, least_disturbed

US = os.getpid()


class Machine:
    """A folder like /proc, with processors and processes whose times are set by hand."""

    def __init__(self, folder):
        self.folder = folder
        self.now = 0.0
        self.busy = [0, 0, 0, 0]
        self.set(1, parent=0)
        self.set(2, parent=0)
        self.set(US, parent=1)

    def set(self, number, parent, own=0, children=0):
        name = "kthreadd" if number == 2 else "a (b) c"
        folder = self.folder / str(number)
        folder.mkdir(exist_ok=True)
        times = f"{own} 0 {children} 0"
        (folder / "stat").write_text(f"{number} ({name}) S {parent} 1 1 0 0 0 0 0 0 0 {times} 20")

    def passes(self, seconds, user=0, nice=0, system=0, stolen=0):
        self.now += seconds
        self.busy = [a + b for a, b in zip(self.busy, (user, nice, system, stolen), strict=True)]
        user, nice, system, stolen = self.busy
        (self.folder / "stat").write_text(f"cpu  {user} {nice} {system} 9 9 9 9 {stolen} 0 0\n")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    made = Machine(tmp_path)
    monkeypatch.setattr(module, "_TICKS", 100)
    monkeypatch.setattr(module.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(module.time, "monotonic", lambda: made.now)
    made.passes(1.0)
    return made


def test_cpu_time_of_this_process_its_children_and_the_kernel_is_excluded(machine):
    others = OtherProcesses(machine.folder)
    machine.set(US, parent=1, own=10, children=20)
    machine.set(70, parent=US, own=30)
    machine.set(71, parent=70, own=40)
    machine.set(9, parent=2, own=50)
    machine.passes(1.0, user=100, system=50)
    assert others.share() == 0.0


def test_the_share_counts_cpu_time_of_other_processes_and_the_hypervisor(machine):
    others = OtherProcesses(machine.folder)
    machine.set(80, parent=1, own=5)
    machine.passes(1.0, user=4, nice=10, system=6, stolen=20)
    assert others.share() == pytest.approx(0.2)
    machine.passes(1.0)
    assert others.share() == 0.0


def test_the_share_counts_cpu_time_of_processes_that_have_ended(machine):
    machine.set(80, parent=1, own=5)
    others = OtherProcesses(machine.folder)
    (machine.folder / "80" / "stat").unlink()
    machine.passes(2.0, user=40)
    assert others.share() == pytest.approx(0.1)


def test_the_share_of_other_processes_can_be_measured_on_this_machine():
    assert OtherProcesses().share() >= 0.0


def test_disturbed_samples_are_left_out_regardless_of_their_value():
    samples = [(1.0, 0.0), (9.0, 0.02), (0.1, 0.5), (2.0, 0.04), (3.0, 0.06)]
    assert least_disturbed(samples, 2) == [1.0, 9.0, 2.0]


def test_the_least_disturbed_samples_are_kept_if_too_few_are_undisturbed(machine):
    samples = [("a", 0.4), ("b", 0.3), ("c", 0.2), ("d", 0.01)]
    assert least_disturbed(samples, 3) == ["b", "c", "d"]
    assert least_disturbed(samples, 9) == ["a", "b", "c", "d"]
    assert least_disturbed([], 3) == []
