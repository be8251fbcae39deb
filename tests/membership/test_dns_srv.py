"""SRV records from a name server of our own, which answers well and badly."""

import contextlib
import socket
import struct
import sys
import threading

import pytest
from dns import flags, message, rcode, rrset

from holdfast.errors import MembershipError
from holdfast.membership.dns_source import SrvRecord, lookup_srv
from holdfast.probe import free_port

NAME = "_holdfast._tcp.example.org"
RECORDS = [SrvRecord(1, 10, 7070, "flash-1.example.org"), SrvRecord(1, 20, 7071, "flash-2.other")]


def answer_to(query, records=RECORDS, status=rcode.NOERROR, *, truncated=False):
    """Answer a query with records."""
    asked = message.from_wire(query)
    answer = message.make_response(asked)
    answer.set_rcode(status)
    answer.flags |= flags.TC if truncated else 0
    texts = [f"{each.priority} {each.weight} {each.port} {each.host}." for each in records]
    if texts:
        answer.answer.append(rrset.from_text(asked.question[0].name, 60, "IN", "SRV", *texts))
    return answer.to_wire()


@pytest.fixture
def name_server():
    """Call with how to answer over UDP, and over TCP, to start a server; returns its address."""
    sockets = []

    def start(by_udp, by_tcp=None):
        tcp = socket.create_server(("127.0.0.1", free_port()))
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind(tcp.getsockname())
        sockets.extend([tcp, udp])

        def serve_udp():
            with contextlib.suppress(OSError):  # closed
                while True:  # a client that waits for long asks again
                    query, client = udp.recvfrom(512)
                    udp.sendto(by_udp(query), client)

        def serve_tcp():
            with contextlib.suppress(OSError):  # closed
                while True:
                    connection, _ = tcp.accept()
                    with connection:
                        (length,) = struct.unpack(">H", connection.recv(2))
                        said = by_tcp(connection.recv(length))
                        connection.sendall(struct.pack(">H", len(said)) + said)

        for serve in (serve_udp, *([serve_tcp] if by_tcp else [])):
            threading.Thread(target=serve, daemon=True).start()
        return tcp.getsockname()

    yield start
    for each in sockets:
        each.close()


def test_srv_records_are_looked_up_and_parsed(name_server):
    assert sorted(lookup_srv(NAME, [name_server(answer_to)], timeout_s=30)) == RECORDS


def test_an_answer_that_does_not_fit_is_fetched_over_tcp(name_server):
    server = name_server(lambda query: answer_to(query, [], truncated=True), answer_to)
    assert sorted(lookup_srv(NAME, [server], timeout_s=30)) == RECORDS


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda query: answer_to(query, [], rcode.NXDOMAIN), "does not exist"),
        (lambda query: answer_to(query, []), "does not contain an answer"),
        (lambda query: answer_to(query, [], rcode.SERVFAIL), "failed to answer"),
    ],
    ids=["name", "empty", "failed"],
)
def test_an_answer_without_records_is_named(name_server, answer, said):
    with pytest.raises(MembershipError, match=said) as refused:
        lookup_srv(NAME, [name_server(answer)], timeout_s=30)
    assert "check the name and the name server" in str(refused.value)


@pytest.mark.parametrize("name", ["a..b", "x" * 64, ".".join(["x" * 60] * 5)])
def test_an_invalid_name_is_refused(name):
    with pytest.raises(MembershipError, match="check the name"):
        lookup_srv(name, [("127.0.0.1", 9)], timeout_s=3)


def test_without_dnspython_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "dns", None)
    with pytest.raises(MembershipError, match=r"pip install 'holdfast-kv\[dns\]'"):
        lookup_srv(NAME)
