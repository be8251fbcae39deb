"""What this machine gives a process is looked up, and a port is nobody else's meanwhile."""

import os
import re
import resource
import socket
from pathlib import Path

import pytest

from holdfast import probe
from holdfast.probe import free_port, memory, process_figures


def test_memory_does_not_exceed_the_memory_of_the_machine():
    assert 0 < memory().nbytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_process_figures_match_those_of_the_kernel():
    before = process_figures()
    assert 0 < before.resident_bytes < before.virtual_bytes
    assert before.resident_bytes <= memory().nbytes
    assert before.max_fds == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    with Path(__file__).open(), Path(__file__).open():
        after = process_figures()
    assert after.open_fds == before.open_fds + 2
    assert 0 < before.cpu_s <= after.cpu_s
    boot_s = int(re.search(r"^btime (\d+)$", Path("/proc/stat").read_text(), re.MULTILINE)[1])
    assert boot_s <= before.started_s == after.started_s


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """The folder of a kernel's control groups; this process is in /system.slice/x.service."""
    own, folder = tmp_path / "cgroup", tmp_path / "groups"
    own.write_text("4:memory:/other\n0::/system.slice/x.service\n")
    for name in ("system.slice/x.service", "other"):
        (folder / name).mkdir(parents=True)
        (folder / name / "memory.max").write_text("max\n")
    monkeypatch.setattr(probe, "_OWN_GROUP", own)
    monkeypatch.setattr(probe, "_CONTROL_GROUPS", folder)
    return folder


@pytest.mark.parametrize("group", ["", "system.slice", "system.slice/x.service"])
def test_memory_is_limited_by_the_own_control_group_or_an_ancestor(groups, group):
    (groups / group / "memory.max").write_text("1048576\n")
    assert memory() == (1 << 20, "the control group's limit")


def test_the_smallest_limit_counts_and_that_of_another_group_does_not(groups):
    (groups / "other" / "memory.max").write_text("4096\n")
    assert memory().source == "the machine's memory"
    (groups / "system.slice" / "memory.max").write_text("8192\n")
    (groups / "system.slice" / "x.service" / "memory.max").write_text("16384\n")
    assert memory().nbytes == 8192


def test_the_limit_of_version_1_of_control_groups_counts(groups):
    probe._OWN_GROUP.write_text("4:memory:/other\n")
    (groups / "memory").mkdir()
    (groups / "memory" / "memory.limit_in_bytes").write_text("32768\n")
    assert memory().nbytes == 32768


def test_a_free_port_can_be_listened_on():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))


@pytest.mark.parametrize(("lent", "below"), [("20000 60999", 20_000), ("32768 60999", 32_000)])
def test_free_port_repeats_no_port_and_avoids_the_ephemeral_range(
    tmp_path, monkeypatch, lent, below
):
    file = tmp_path / "range"
    file.write_text(f"{lent}\n")
    monkeypatch.setattr(probe, "_EPHEMERAL_RANGE", file)
    ports = {free_port() for _ in range(50)}
    assert len(ports) == 50
    assert 15_000 <= min(ports) <= max(ports) < below


@pytest.mark.parametrize("lent", ["1024 65535", "none of it", None])
def test_free_port_returns_any_free_port_if_all_are_ephemeral(tmp_path, monkeypatch, lent):
    file = tmp_path / "range"
    if lent:
        file.write_text(lent)
    monkeypatch.setattr(probe, "_EPHEMERAL_RANGE", file)
    assert free_port() > 1024


def test_free_port_skips_a_port_in_use(monkeypatch):
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(probe, "_drawn", iter([port - 15_000, port - 14_999]))
        assert free_port() != port
