"""What this machine gives a process is looked up, and a port is nobody else's meanwhile."""

import os
import socket

import pytest

from holdfast import probe
from holdfast.probe import free_port, memory


def test_memory_is_that_of_the_machine_at_most():
    assert 0 < memory().nbytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_a_free_port_can_be_listened_on():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))


@pytest.mark.parametrize(("lent", "below"), [("20000 60999", 20_000), ("32768 60999", 32_000)])
def test_no_port_is_given_twice_nor_lent_by_the_kernel(tmp_path, monkeypatch, lent, below):
    file = tmp_path / "range"
    file.write_text(f"{lent}\n")
    monkeypatch.setattr(probe, "_EPHEMERAL_RANGE", file)
    ports = {free_port() for _ in range(50)}
    assert len(ports) == 50
    assert 15_000 <= min(ports) <= max(ports) < below


@pytest.mark.parametrize("lent", ["1024 65535", "none of it", None])
def test_where_all_are_lent_it_is_any_that_is_free(tmp_path, monkeypatch, lent):
    file = tmp_path / "range"
    if lent:
        file.write_text(lent)
    monkeypatch.setattr(probe, "_EPHEMERAL_RANGE", file)
    assert free_port() > 1024


def test_a_port_that_somebody_listens_on_is_left_out(monkeypatch):
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(probe, "_drawn", iter([port - 15_000, port - 14_999]))
        assert free_port() != port
