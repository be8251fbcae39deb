"""The target before anybody has joined: what a stranger may say, and what it costs."""

import contextlib
import socket
import struct
import threading

import msgspec
import pytest
from target_rig import QUICK, RECORDS, Served, ended

from holdfast.errors import Outcome
from holdfast.limits import MIB
from holdfast.wire.address import tcp_endpoint


@pytest.fixture
def node():
    with contextlib.ExitStack() as undo:
        yield Served(undo, QUICK, None, 16 * MIB)


def test_a_system_without_threads_to_spare_turns_one_away_and_the_next_is_served(node, monkeypatch):
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "holdfast-peer":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with socket.create_connection(tcp_endpoint(node.address)) as raw:
        assert ended(raw)
    monkeypatch.undo()
    assert node.target.put(RECORDS[:1], 5) == [Outcome.OK]
    assert node.service.status()["turned_away"] == 1


@pytest.mark.parametrize("said", [{"type": "join\nFAKE"}, {"type": "status", "\n" + "a" * 9999: 1}])
def test_a_stranger_writes_no_lines_of_its_own_into_the_log(node, caplog, said):
    body = msgspec.msgpack.encode(said)
    with socket.create_connection(tcp_endpoint(node.address)) as raw:
        raw.sendall(struct.pack("<IIQ", len(body), 1, 0) + body)
        assert ended(raw)
    node.until(lambda: "connection ended" in caplog.text)
    told = [record.getMessage() for record in caplog.records]
    assert all(line.isprintable() and len(line) < 500 for line in told), told
