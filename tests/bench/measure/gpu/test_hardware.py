"""What is known of the machine; without a GPU, and with a driver that answers."""

import ctypes

import pytest

pytest.importorskip("torch")

from holdfast_bench.measure.gpu import hardware


def test_a_machine_without_a_gpu_has_its_own_facts_only(measured, monkeypatch):
    monkeypatch.setattr(hardware.shutil, "which", lambda _: None)
    more = measured(hardware)["gpu.memory"].more
    assert {"gpu", "torch", "memlock_bytes", "huge_pages_enabled"} <= more.keys()
    assert "driver_version" not in more


def test_nvidia_smi_and_the_driver_are_asked(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '570.1, 5, 16, 1980 MHz, Enabled'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert hardware.smi() == {
        "driver_version": "570.1",
        "pcie.link.gen.current": "5",
        "pcie.link.width.current": "16",
        "clocks.max.sm": "1980 MHz",
        "persistence_mode": "Enabled",
    }
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert "status 9" in hardware.smi()["nvidia_smi"]


def test_attributes_come_from_the_driver(monkeypatch):
    class Driver:
        def cuInit(self, _flags):  # noqa: N802  # as CUDA has it
            return 0

        def cuDeviceGetAttribute(self, value, number, _gpu):  # noqa: N802
            ctypes.cast(value, ctypes.POINTER(ctypes.c_int))[0] = number
            return 0 if number != 100 else 1

    monkeypatch.setattr(hardware.ctypes, "CDLL", lambda _: Driver())
    assert hardware.attributes() == {
        name: number for name, number in hardware.ATTRIBUTES.items() if number != 100
    }
    monkeypatch.undo()
    assert hardware.attributes("libno-such-library.so.1") == {}


def test_a_file_of_choices_that_is_missing_is_no_error(tmp_path):
    assert hardware._chosen(tmp_path / "none") == ""
