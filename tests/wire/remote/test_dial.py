"""Connections by name: no longer than the deadline, whatever the name server does."""

import contextlib
import socket
import threading

import pytest

from holdfast.address import HostPort
from holdfast.wire.remote.stream import Deadline, dial


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def named(monkeypatch, *hosts, after=None):
    """Let every name mean these addresses; `after` an event, if given."""

    def look(_host, port, **_):
        if after is not None:
            after.wait(250)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in hosts]

    monkeypatch.setattr("holdfast.wire.remote.stream.socket.getaddrinfo", look)


def test_a_numeric_address_is_not_resolved(listener):
    with contextlib.closing(dial(HostPort(*listener.getsockname()), Deadline.within(60))) as made:
        assert made.getpeername() == listener.getsockname()


def test_a_slow_name_server_raises_a_timeout(listener, monkeypatch):
    known = threading.Event()
    named(monkeypatch, "127.0.0.1", after=known)
    with pytest.raises(TimeoutError, match="'far' was not found in time"):
        dial(HostPort("far", listener.getsockname()[1]), Deadline.within(0.2))
    assert not known.is_set()
    known.set()


def test_the_first_address_that_answers_is_taken(monkeypatch, listener):
    port = listener.getsockname()[1]
    tried = []

    def connect(address, timeout):
        tried.append((address.host, timeout))
        if address.host != "127.0.0.3":
            raise ConnectionRefusedError
        return listener.dup()

    monkeypatch.setattr("holdfast.wire.remote.stream.socket.create_connection", connect)
    named(monkeypatch, "127.0.0.1", "127.0.0.2", "127.0.0.3")
    dial(HostPort("far", port), Deadline.within(9_000)).close()
    assert [host for host, _ in tried] == ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    assert [round(seconds, -2) for _, seconds in tried] == [3_000, 4_500, 9_000]


def test_the_last_error_is_raised_if_no_address_answers(monkeypatch):
    def refuse(address, _):
        raise ConnectionRefusedError(address.host)

    monkeypatch.setattr("holdfast.wire.remote.stream.socket.create_connection", refuse)
    named(monkeypatch, "127.0.0.1", "127.0.0.2")
    with pytest.raises(ConnectionRefusedError, match=r"127\.0\.0\.2"):
        dial(HostPort("far", 1), Deadline.within(60))


@pytest.mark.parametrize("name", ["no such name", "x" * 64 + ".org"])
def test_an_unresolvable_name_raises_an_oserror(name):
    with pytest.raises(OSError):  # what it says is the system's
        dial(HostPort(name, 1), Deadline.within(60))
