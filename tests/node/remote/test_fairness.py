"""A target's domains: one that floods, or reads nothing, holds up itself."""

import contextlib
import threading

import pytest

from holdfast.buffers import aligned_buffer
from holdfast.errors import Outcome
from holdfast.limits import MIB
from holdfast.node.remote.service import TargetLimits
from holdfast.testing.payloads import is_right, key_of, namespace_of, record_of
from holdfast.wire.frame import encode
from holdfast.wire.local.messages import List, Status
from holdfast.wire.remote import messages as m

FLOOD = namespace_of(MIB - 8192)._replace(domain=b"f" * 16)
VICTIM = FLOOD._replace(domain=b"v" * 16)
KEYS = {FLOOD: [key_of(i) for i in range(8)], VICTIM: [key_of(100 + i) for i in range(8)]}
HOST_BYTES = 128 * MIB
CONNECTIONS = 40
PEERS = 5


@pytest.fixture
def node(serve_here):
    """A target with eight blocks of each domain, and a client of it."""
    node = serve_here(FLOOD, TargetLimits(pace_s=60.0), host_bytes=HOST_BYTES)
    for namespace, keys in KEYS.items():
        assert node.target.put([record_of(namespace, key) for key in keys], 60) == [Outcome.OK] * 8
    return node


@pytest.fixture
def ask(node):
    """Return what asks for all of the flood's blocks, and reads nothing."""
    with contextlib.ExitStack() as undo:

        def send():
            raw = undo.enter_context(node.connect())
            keys = b"".join(KEYS[FLOOD])
            raw.sendall(encode(2, m.GetRecords(**FLOOD._asdict(), keys=keys, deadline_s=60.0)))
            return raw

        yield send


def sending(node):
    return node.service.status().sending_bytes


def test_connections_that_never_read_hold_up_their_own_domain_only(node, ask):
    """Forty of them ask for 8 MiB each, of 64 MiB that may be kept for sending."""
    raws = [ask() for _ in range(CONNECTIONS)]
    node.until(lambda: sending(node) >= 7 * 8 * FLOOD.slot_bytes)
    into = [aligned_buffer(VICTIM.slot_bytes) for _ in KEYS[VICTIM]]
    for _ in range(10):
        got = node.target.get(VICTIM, KEYS[VICTIM], into, 60)
        assert got.blocks == 8
    assert all(is_right(r, VICTIM, key) for r, key in zip(into, KEYS[VICTIM], strict=True))
    assert sending(node) <= HOST_BYTES // 2 + 8 * VICTIM.slot_bytes  # its first always may
    node.until(lambda: sending(node) <= HOST_BYTES // 2)  # the victim has its bytes a bit before
    own = [aligned_buffer(FLOOD.slot_bytes) for _ in KEYS[FLOOD]]
    late = node.target.get(FLOOD, KEYS[FLOOD], own, 0.2)
    assert (late.blocks, late.outcome) == (0, "late")
    for raw in raws:
        raw.close()
    node.until(lambda: not sending(node))
    assert node.target.get(FLOOD, KEYS[FLOOD], own, 60).blocks == 8


def test_replies_that_wait_for_send_memory_are_sent_when_peers_read(node, ask):
    raws = [ask() for _ in range(12)]
    for raw in raws:
        left = 8 * FLOOD.slot_bytes
        raw.settimeout(20)
        while left > 0:
            left -= len(raw.recv(1 << 20))
    node.until(lambda: node.service.counters.sent_bytes == 12 * 8 * FLOOD.slot_bytes)


@pytest.mark.parametrize(("made", "request_of"), [("status", Status), ("listing", List)])
def test_a_report_that_many_peers_ask_for_is_made_once_for_all(node, monkeypatch, made, request_of):
    make, calls = getattr(node.store, made), []
    begun, go_on = threading.Event(), threading.Event()

    def counted():
        calls.append(made)
        begun.set()
        assert go_on.wait(60)
        return make()

    monkeypatch.setattr(node.store, made, counted)
    service = node.service
    report = {"status": service.peer_status, "listing": service.peer_listing}[made]
    with contextlib.ExitStack() as undo:
        raws = [undo.enter_context(node.connect()) for _ in range(1 + PEERS)]
        raws[0].sendall(encode(2, request_of()))
        assert begun.wait(60)
        for raw in raws[1:]:
            raw.sendall(encode(2, request_of()))
        node.until(lambda: report.waiting == PEERS)
        go_on.set()
        assert all(b"report" in raw.recv(1 << 16) for raw in raws)
    assert len(calls) == 2
