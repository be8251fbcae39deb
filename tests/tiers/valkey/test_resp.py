"""RESP over a real socket: records are received in place; no reply causes a hang or a crash."""

import socket
import threading
import time

import pytest

from holdfast.errors import ProtocolError
from holdfast.tiers.valkey.resp import AHEAD_BYTES, RespConnection, RespErrorReply, command
from holdfast.wire.remote.stream import Deadline, PlainStream

SOON_S = 60.0


class Server:
    """The remote end of one connection, which sends what the test tells it to."""

    def __init__(self):
        local, self.remote = socket.socketpair()
        self.connection = RespConnection(PlainStream(local))

    def send(self, *pieces):
        """Send pieces 2 ms apart from a thread; return the thread."""

        def send_all():
            for piece in pieces:
                self.remote.sendall(piece)
                time.sleep(0.002)

        thread = threading.Thread(target=send_all, daemon=True)
        thread.start()
        return thread

    def received(self):
        try:
            return self.remote.recv(1 << 20, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""


@pytest.fixture
def server():
    server = Server()
    yield server
    server.connection.close()
    server.remote.close()


def soon():
    return Deadline.within(SOON_S)


def record(seed, nbytes=5_000):
    return bytes((seed + i) % 251 for i in range(nbytes))


def bulk(data):
    return b"$%d\r\n%b\r\n" % (len(data), data)


def buffers(count, nbytes=5_000):
    return [(b"k%d" % n, memoryview(bytearray(nbytes))) for n in range(count)]


def test_replies_of_every_kind_are_read_from_small_pieces(server):
    reply = (
        b"+OK\r\n:42\r\n$-1\r\n$4\r\na\r\nb\r\n-OOM no room\r\n*3\r\n:1\r\n*1\r\n$0\r\n\r\n*-1\r\n"
    )
    server.send(*(reply[at : at + 3] for at in range(0, len(reply), 3)))
    assert server.connection.ask([command(b"X")] * 6, soon()) == [
        *(b"OK", 42, None, b"a\r\nb", RespErrorReply("OOM", "no room"), [1, [b""], []])
    ]


@pytest.mark.parametrize("nbytes", [(1 << 20) - 2, (1 << 20) - 1, 1 << 20])
def test_the_longest_strings_are_read_whole(server, nbytes):
    text = (bytes(range(256)) * 4_096)[:nbytes]
    for _ in range(2):
        server.send(bulk(text))
        assert server.connection.ask([command(b"X")], soon()) == [text]


def test_commands_are_encoded_by_length(server):
    server.send(b":1\r\n")
    server.connection.ask([command(b"EXISTS", b"a\r\nb")], soon())
    assert server.received() == b"*2\r\n$6\r\nEXISTS\r\n$4\r\na\r\nb\r\n"


def test_records_are_put_with_a_time_to_live(server):
    records = [(b"k1", memoryview(record(1))), (b"k2", memoryview(record(2)))]
    server.send(b"+OK\r\n+OK\r\n")
    assert server.connection.put(records, 1.5, soon()) == [b"OK", b"OK"]
    ttl = b"$2\r\nNX\r\n$2\r\nPX\r\n$4\r\n1500\r\n"
    assert server.received() == b"".join(
        b"*6\r\n$3\r\nSET\r\n" + bulk(key) + bulk(bytes(value)) + ttl for key, value in records
    )


@pytest.mark.parametrize("cut", [997, 4_096, 1 << 20])
def test_records_are_received_in_place_between_missing_ones(server, cut):
    error = b"-WRONGTYPE not a string\r\n"
    reply = [bulk(record(0)), b"$-1\r\n", bulk(record(2)), error, bulk(b"short"), bulk(record(5))]
    whole = b"".join([*reply, bulk(record(6, 50_000)), b"$-1\r\n", b"$-1\r\n"])
    wanted = buffers(9)
    server.send(*(whole[at : at + cut] for at in range(0, len(whole), cut)))
    found = list(server.connection.get(wanted, soon()))
    assert found == [
        *(True, False, True, RespErrorReply("WRONGTYPE", "not a string"), None, True, None),
        *(False, False),
    ]
    for number in (0, 2, 5):
        assert bytes(wanted[number][1]) == record(number)
    server.send(b"+PONG\r\n")
    assert server.connection.ask([command(b"PING")], soon()) == [b"PONG"], "no bytes are left over"


def test_records_of_many_lengths_are_received_in_place(server):
    sizes = [4_096, 100_000, 9, 70_000, 12, 4_096]
    wanted = [(b"k%d" % n, memoryview(bytearray(size))) for n, size in enumerate(sizes)]
    server.send(b"".join(bulk(record(n, size)) for n, size in enumerate(sizes)))
    assert list(server.connection.get(wanted, soon())) == [True] * len(sizes)
    assert [bytes(into) for _, into in wanted] == [record(n, s) for n, s in enumerate(sizes)]


def test_the_bytes_requested_ahead_are_bounded(server):
    size = AHEAD_BYTES // 2
    got = server.connection.get(buffers(6, size), soon())
    server.send(*[bulk(bytes(size))] * 6)
    next(got)
    assert server.received().count(b"GET") == 2
    assert list(got) == [True] * 5
    assert server.received().count(b"GET") == 4


@pytest.mark.parametrize(
    "reply",
    [
        *(b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$abc\r\n", b"$-7\r\n", b"$99999999999\r\n"),
        *(b"*999999999\r\n", b"$3\r\nabcde", b"x" * 10_000, b"*1\r\n" * 10, b"\r\n\r\n"),
    ],
)
def test_an_invalid_reply_is_a_protocol_error(server, reply):
    server.send(reply)
    with pytest.raises(ProtocolError):
        server.connection.ask([command(b"PING")], soon())


@pytest.mark.parametrize(
    "reply", [b":17\r\n:17\r\n", b"$999999999999\r\n", b"$5000\r\n" + b"x" * 5_002]
)
def test_an_invalid_record_is_a_protocol_error(server, reply):
    server.send(reply)
    with pytest.raises(ProtocolError):
        list(server.connection.get(buffers(1), soon()))


def test_a_closed_connection_is_a_connection_error(server):
    server.send(b"$5000\r\nonly this").join()
    threading.Timer(0.05, server.remote.close).start()
    with pytest.raises(ConnectionError):
        list(server.connection.get(buffers(1), soon()))


def test_a_trickle_of_bytes_ends_at_the_deadline(server):
    stop = threading.Event()

    def trickle():
        server.remote.sendall(b"$5000\r\n")
        while not stop.wait(0.01):
            server.remote.sendall(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        with pytest.raises(TimeoutError):
            list(server.connection.get(buffers(1), Deadline.within(0.3)))
    finally:
        stop.set()
        thread.join()
