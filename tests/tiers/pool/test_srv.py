"""SRV records from a name server of our own, and from hostile bytes."""

import socket
import struct
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import MembershipError
from holdfast.probe import free_port
from holdfast.tiers.pool.srv import (
    SrvRecord,
    decode_answer,
    encode_query,
    lookup_srv,
    system_servers,
)

NAME = "_holdfast._tcp.example.org"
RECORDS = [SrvRecord(1, 10, 7070, "flash-1.example.org"), SrvRecord(1, 20, 7071, "flash-2.other")]


def packed(name):
    return b"".join(bytes([len(p)]) + p.encode() for p in name.split(".")) + b"\0"


def answer_to(query, records=RECORDS, flags=0x8180):
    """Answer as servers do: names that end like the question point into it."""
    question = query[12:]
    tail = 12 + question.index(b"\x07example")
    body = b""
    alias = b"\xc0\x0c" + struct.pack(">HHIH", 5, 1, 60, 2) + b"\xc0\x0c"
    for record in records:
        host = record.host.removesuffix(".example.org")
        short = host != record.host
        name = packed(host)[:-1] + struct.pack(">H", 0xC000 | tail) if short else packed(host)
        data = struct.pack(">HHH", record.priority, record.weight, record.port) + name
        body += b"\xc0\x0c" + struct.pack(">HHIH", 33, 1, 60, len(data)) + data
    header = query[:2] + struct.pack(">HHHHH", flags, 1, len(records) + 1, 0, 0)
    return header + question + alias + body


@pytest.fixture
def name_server():
    """A server on one port of UDP and TCP; returns what starts it with two ways to answer."""
    sockets = []

    def start(by_udp, by_tcp=None):
        tcp = socket.create_server(("127.0.0.1", free_port()))
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind(tcp.getsockname())
        sockets.extend([tcp, udp])

        def serve():
            query, client = udp.recvfrom(512)
            udp.sendto(by_udp(query), client)
            if by_tcp is None:
                return
            connection, _ = tcp.accept()
            with connection:
                (length,) = struct.unpack(">H", connection.recv(2))
                said = by_tcp(connection.recv(length))
                connection.sendall(struct.pack(">H", len(said)) + said)

        threading.Thread(target=serve, daemon=True).start()
        return tcp.getsockname()

    yield start
    for each in sockets:
        each.close()


def test_records_are_asked_for_and_read(name_server):
    server = name_server(answer_to)
    assert lookup_srv(NAME, [server], timeout_s=30) == RECORDS


def test_an_answer_that_does_not_fit_is_fetched_over_tcp(name_server):
    server = name_server(lambda query: answer_to(query, [], flags=0x8380), answer_to)
    assert lookup_srv(NAME, [server], timeout_s=30) == RECORDS


def test_the_next_server_is_asked_when_one_fails(name_server):
    broken = name_server(lambda query: answer_to(query, flags=0x8182))
    good = name_server(answer_to)
    assert lookup_srv(NAME, [broken, good], timeout_s=30) == RECORDS


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda query: answer_to(query, flags=0x8183), "no such name"),
        (lambda query: answer_to(query, flags=0x8182), "status 2"),
        (lambda query: answer_to(query, []), "no SRV records"),
        (lambda query: b"\0\0" + answer_to(query)[2:], "not the answer to our question"),
        (lambda query: answer_to(query)[:-9], "no DNS message"),
        (lambda query: query, "not the answer to our question"),
        (lambda _: b"", "no DNS message"),
    ],
    ids=["name", "failed", "empty", "other-id", "cut", "echo", "nothing"],
)
def test_a_bad_answer_is_named(name_server, answer, said, monkeypatch):
    monkeypatch.setattr("secrets.randbelow", lambda _: 0x1234)
    server = name_server(answer)
    with pytest.raises(MembershipError, match=said) as refused:
        lookup_srv(NAME, [server], timeout_s=30)
    assert f"SRV records of {NAME}: 127.0.0.1: " in str(refused.value)


def test_a_name_that_points_at_itself_ends():
    query = encode_query(NAME, 7)
    loop = query[:2] + struct.pack(">HHHHH", 0x8180, 0, 1, 0, 0) + b"\xc0\x0c" * 20
    with pytest.raises(MembershipError, match="a name without an end"):
        decode_answer(loop, 7, NAME)


@given(st.binary(max_size=300))
def test_any_bytes_are_records_or_refused(data):
    query = encode_query(NAME, 7)
    for answer in (data, query[:2] + b"\x81\x80" + data, answer_to(query)[:40] + data):
        try:
            assert decode_answer(answer, 7, NAME)
        except MembershipError:
            continue


@pytest.mark.parametrize("name", ["", ".", "a..b", "x" * 64, ".".join(["x" * 60] * 5), "ü.org"])
def test_what_is_no_name_is_not_asked(name):
    with pytest.raises(MembershipError, match="is no DNS name"):
        encode_query(name, 1)


def test_the_systems_servers_are_read(tmp_path):
    path = tmp_path / "resolv.conf"
    path.write_text("# ü\nsearch x\nnameserver 10.0.0.53\nnameserver fd00::53\nnameserver\n")
    assert system_servers(str(path)) == [("10.0.0.53", 53), ("fd00::53", 53)]
    with pytest.raises(MembershipError, match="names the name servers"):
        system_servers(str(tmp_path / "none"))
