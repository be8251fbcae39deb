"""What a node grants to a request that nobody waits for any more goes back to it."""

import socket
import threading

from holdfast.wire.local import messages as m
from holdfast.wire.local.client import Client

HELLO = m.Hello(m.PROTOCOL, "test")


def granting(returned, before_granting):
    """A node that grants a lease and a ticket, and writes down what comes back."""

    def script(peer):
        peer.welcome()
        fetch, reserve = peer.take(), peer.take()
        before_granting()
        peer.say(fetch.request_id, m.Fetched(11, [0], {}, "ok", ""))
        peer.say(reserve.request_id, m.Reserved(12, [0], "ok"))
        while frame := peer.take():
            returned.append(frame.message)
            peer.say(frame.request_id, m.Done())

    return script


def test_grants_in_a_forgotten_reply_are_returned_when_it_arrives(fake_node):
    returned, forgotten = [], threading.Event()
    client = Client(fake_node(granting(returned, lambda: forgotten.wait(30))), HELLO, 5)
    for message in (m.Fetch(b"", 1.0), m.Reserve(b"", b"", 0)):
        client.forget(client.send(message))
    forgotten.set()
    client.call(m.Status(), m.Done, 60)
    client.call(m.List(), m.Done, 60)
    assert [r for r in returned if r != m.Status()][:2] == [m.Release(11), m.Abort(12)]
    client.close()


def test_grants_in_a_received_reply_are_returned_when_it_is_forgotten(fake_node):
    returned = []
    client = Client(fake_node(granting(returned, lambda: None)), HELLO, 60)
    ids = [client.send(message) for message in (m.Fetch(b"", 1.0), m.Reserve(b"", b"", 0))]
    client.call(m.Status(), m.Done, 60)  # by now both replies are here
    for request_id in ids:
        client.forget(request_id)
    client.call(m.List(), m.Done, 60)
    assert returned == [m.Status(), m.Release(11), m.Abort(12), m.List()]
    client.close()


def test_locks_in_a_forgotten_reply_are_returned_when_it_arrives(fake_node):
    returned, forgotten = [], threading.Event()

    def script(peer):
        peer.welcome()
        lock = peer.take()
        forgotten.wait(30)
        peer.say(lock.request_id, m.Locked([3, 5]))
        while frame := peer.take():
            returned.append(frame.message)
            peer.say(frame.request_id, m.Done())

    client = Client(fake_node(script), HELLO, 60)
    client.forget(client.send(m.Lock([3, 5])))
    forgotten.set()
    client.call(m.Status(), m.Done, 60)
    client.call(m.List(), m.Done, 60)
    assert m.Unlock([3, 5]) in returned
    client.close()


def test_grants_are_returned_after_the_frame_that_is_being_sent(fake_node, monkeypatch):
    monkeypatch.setattr("holdfast.wire.local.client.SEND_S", 20.0)
    said = []

    def script(peer):
        peer.welcome()
        fetch = peer.take()
        peer.socket.recv(1, socket.MSG_PEEK)  # more than fits is on its way
        peer.say(fetch.request_id, m.Fetched(11, [0], {}, "ok", ""))
        while frame := peer.take():
            said.append(type(frame.message))
            peer.say(frame.request_id, m.Done())

    client = Client(fake_node(script), HELLO, 60)
    client.forget(client.send(m.Fetch(b"", 1.0)))
    client.call(m.Cover(bytes(640 * 1024)), m.Done, 60)
    client.call(m.Status(), m.Done, 60)
    assert said == [m.Cover, m.Release, m.Status]
    client.close()
