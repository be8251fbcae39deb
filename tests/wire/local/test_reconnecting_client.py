"""The link: a client whenever there is a node, and never a wait for one."""

import logging
import socket
import threading
import time
import weakref
from types import SimpleNamespace

import pytest

from holdfast.errors import HoldfastError
from holdfast.wire.local import messages as m
from holdfast.wire.local import reconnecting_client
from holdfast.wire.local.reconnecting_client import ReconnectingClient

HELLO = m.Hello(m.PROTOCOL, "test")


def until(condition, within_s=60):
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_no_node_means_no_client(tmp_path):
    link = ReconnectingClient(f"unix://{tmp_path}/none.sock", HELLO, 1.0)
    assert link.client() is None
    until(lambda: "No such file" in link.failure)
    assert link.client() is None
    assert not link.refused
    link.close()


def test_a_silent_node_delays_no_request(fake_node):
    asked, answers = threading.Event(), threading.Event()

    def slow(peer):
        hello = peer.take()
        asked.set()
        answers.wait(30)
        peer.say(hello.request_id, m.Welcome(m.PROTOCOL, "fake", b"k" * 32, 0))

    link = ReconnectingClient(fake_node(slow), HELLO, 60.0)
    assert asked.wait(60)
    assert link.client() is None  # a call that waited would return the client
    answers.set()
    link.close()


def test_a_lost_node_is_noticed_while_idle_and_found_again(fake_node):
    die = threading.Event()

    def first(peer):
        peer.welcome()
        die.wait(30)

    def second(peer):
        peer.welcome()
        peer.say(peer.take().request_id, m.Done())
        peer.take()

    link = ReconnectingClient(fake_node(first, second), HELLO, 60.0)
    old = link.wait(60)
    die.set()
    until(lambda: link.client() not in (None, old))
    new = link.client()
    assert old.closed
    assert new.call(m.Status(), m.Done, 60) == m.Done()
    link.close()
    assert link.client() is None


def test_each_attempt_goes_to_the_address_that_the_node_has_then(fake_node, tmp_path):
    live = fake_node(lambda peer: (peer.welcome(), peer.take()))
    asked = []

    def present(away_s):
        asked.append(away_s)
        if len(asked) == 1:
            raise HoldfastError("no node starts")
        return f"unix://{tmp_path}/none.sock" if len(asked) == 2 else live

    link = ReconnectingClient(present, HELLO, 60.0, retry_s=0.02)
    assert link.wait(60) is not None
    assert link.address == live
    first, second, third = asked
    assert first == 0.0 < second < third
    link.close()


def test_a_node_that_refuses_is_not_away(fake_node):
    def refuse(peer):
        peer.say(peer.take().request_id, m.Refused("full"))

    asked, live = [], fake_node(refuse, refuse, lambda peer: (peer.welcome(), peer.take()))
    link = ReconnectingClient(lambda away_s: asked.append(away_s) or live, HELLO, 5.0, retry_s=0.02)
    assert link.wait(60) is not None
    assert asked == [0.0] * 3
    link.close()


def test_wait_returns_none_when_time_is_up(tmp_path):
    link = ReconnectingClient(f"unix://{tmp_path}/none.sock", HELLO, 1.0)
    assert link.wait(0.05) is None
    link.close()


def test_a_refusing_node_is_logged_once_and_retried(fake_node, caplog):
    def refuse(peer):
        peer.say(peer.take().request_id, m.Refused("protocol version 1 is not supported"))

    def relent(peer):
        noted.wait(30)
        peer.welcome()
        peer.take()

    noted = threading.Event()
    with caplog.at_level(logging.WARNING):
        link = ReconnectingClient(
            fake_node(refuse, refuse, refuse, relent), HELLO, 5.0, retry_s=0.05
        )
        until(lambda: link.refused)
        noted.set()
        assert link.wait(60) is not None
    assert not link.refused
    assert len([r for r in caplog.records if "not supported" in r.message]) == 1
    link.close()


def test_a_node_that_is_gone_for_changing_reasons_is_logged_once(fake_node, caplog):
    def refuse(words):
        return lambda peer: peer.say(peer.take().request_id, m.Refused(words))

    def live_and_end(peer):
        peer.welcome()

    def live(peer):
        peer.welcome()
        lives.set()
        peer.take()

    lives = threading.Event()
    plays = [refuse("full"), refuse("busy"), live_and_end, refuse("full"), refuse("busy")]
    with caplog.at_level(logging.WARNING):
        link = ReconnectingClient(fake_node(*plays, live), HELLO, 5.0, 0.05)
        assert lives.wait(60)
    warnings = [r.message for r in caplog.records if "reconnecting" in r.message]
    assert len(warnings) == 2
    assert "full" in warnings[0]
    assert "connection ended" in warnings[1]
    link.close()


@pytest.mark.parametrize("connected", [False, True])
def test_close_ends_the_thread(fake_node, tmp_path, connected):
    address = fake_node(lambda peer: (peer.welcome(), peer.take()))
    link = ReconnectingClient(address if connected else f"unix://{tmp_path}/none.sock", HELLO, 60.0)
    if connected:
        link.wait(60)
    link.close()
    link._thread.join(60)
    assert not link._thread.is_alive()


def test_the_arena_of_a_lost_node_is_released(fake_node):
    die = threading.Event()

    def first(peer):
        peer.welcome(1 << 20)
        die.wait(30)

    link = ReconnectingClient(fake_node(first), HELLO, 60.0)
    arena = weakref.ref(link.wait(60).arena)
    assert arena() is not None
    die.set()
    until(lambda: arena() is None)
    link.close()


def test_a_client_without_free_descriptors_retries_the_connection(fake_node, monkeypatch):
    calls = []

    def scarce(*values, **named):
        calls.append(1)
        if len(calls) < 3:
            raise OSError(24, "Too many open files")
        return make(*values, **named)

    make = socket.socket
    monkeypatch.setattr("holdfast.wire.local.client.socket.socket", scarce)
    address = "unix:///nowhere/node.sock"
    link = ReconnectingClient(address, HELLO, 60.0)
    until(lambda: "No such file" in link.failure)
    assert len(calls) >= 3
    link.close()


def test_reconnects_back_off_if_a_node_ends_each_session_at_once(monkeypatch):
    now, pauses = [0.0], []

    class Ended(threading.Event):
        def wait(self, timeout=None):
            pauses.append(timeout)
            if len(pauses) == 8:
                self.set()

    class Dropped:
        """A client whose connection ends, at the seventh time after it has lasted."""

        def __init__(self, *_):
            self.closed = True

        def wait_gone(self):
            now[0] += 1.0 if len(pauses) == 6 else 0.0

        def close(self):
            pass

    names = SimpleNamespace(Event=Ended, Thread=threading.Thread, Condition=threading.Condition)
    monkeypatch.setattr(reconnecting_client, "threading", names)
    monkeypatch.setattr(reconnecting_client, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(reconnecting_client, "Client", Dropped)
    link = ReconnectingClient("unix:///run/none.sock", HELLO, 1.0, retry_s=0.3)
    link._thread.join(60)
    assert pauses == [0.02, 0.04, 0.08, 0.16, 0.3, 0.3, 0.02, 0.04]
