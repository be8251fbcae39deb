"""Ports of a SeaweedFS server are free, and so are the second ones that it takes by itself."""

import contextlib
import socket

import pytest

from holdfast.errors import HoldfastError
from holdfast_bench.peers import seaweed_ports


def test_a_port_and_its_second_one_can_be_listened_on():
    port = seaweed_ports.free_seaweed_port()
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", port))
        second.bind(("127.0.0.1", port + seaweed_ports.SECOND))


def test_a_port_whose_second_one_is_taken_is_not_returned(monkeypatch):
    port = seaweed_ports.free_seaweed_port()
    monkeypatch.setattr(seaweed_ports, "_PORTS", range(port, port + 1))
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", port + seaweed_ports.SECOND))
        with pytest.raises(HoldfastError, match=f"no port from {port} to {port} is free"):
            seaweed_ports.free_seaweed_port()
