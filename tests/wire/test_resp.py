"""RESP over a real socket: records land in place; whatever is said, nothing hangs or crashes."""

import socket
import threading
import time

import pytest

from holdfast.errors import ProtocolError
from holdfast.wire.resp import AHEAD_BYTES, Refusal, RespConnection, command
from holdfast.wire.stream import Deadline, PlainStream

SOON_S = 30.0


class Server:
    """The far end of one connection, that says what the test wants."""

    def __init__(self):
        near, self.far = socket.socketpair()
        self.connection = RespConnection(PlainStream(near))

    def say(self, *pieces):
        """Say these, one after the other, a moment apart; returns the thread that does."""

        def talk():
            for piece in pieces:
                self.far.sendall(piece)
                time.sleep(0.002)

        talking = threading.Thread(target=talk, daemon=True)
        talking.start()
        return talking

    def heard(self):
        try:
            return self.far.recv(1 << 20, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""


@pytest.fixture
def server():
    server = Server()
    yield server
    server.connection.close()
    server.far.close()


def soon():
    return Deadline.within(SOON_S)


def record(seed, nbytes=5_000):
    return bytes((seed + i) % 251 for i in range(nbytes))


def bulk(data):
    return b"$%d\r\n%b\r\n" % (len(data), data)


def buffers(count, nbytes=5_000):
    return [(b"k%d" % n, memoryview(bytearray(nbytes))) for n in range(count)]


def test_replies_of_every_kind_are_read_however_they_are_cut(server):
    said = (
        b"+OK\r\n:42\r\n$-1\r\n$4\r\na\r\nb\r\n-OOM no room\r\n*3\r\n:1\r\n*1\r\n$0\r\n\r\n*-1\r\n"
    )
    server.say(*(said[at : at + 3] for at in range(0, len(said), 3)))
    assert server.connection.ask([command(b"X")] * 6, soon()) == [
        *(b"OK", 42, None, b"a\r\nb", Refusal("OOM", "no room"), [1, [b""], []])
    ]


def test_commands_are_encoded_by_length(server):
    server.say(b":1\r\n")
    server.connection.ask([command(b"EXISTS", b"a\r\nb")], soon())
    assert server.heard() == b"*2\r\n$6\r\nEXISTS\r\n$4\r\na\r\nb\r\n"


def test_records_are_put_as_they_lie_with_a_time_to_live(server):
    records = [(b"k1", memoryview(record(1))), (b"k2", memoryview(record(2)))]
    server.say(b"+OK\r\n+OK\r\n")
    assert server.connection.put(records, 1.5, soon()) == [b"OK", b"OK"]
    ttl = b"$2\r\nPX\r\n$4\r\n1500\r\n"
    assert server.heard() == b"".join(
        b"*5\r\n$3\r\nSET\r\n" + bulk(key) + bulk(bytes(value)) + ttl for key, value in records
    )


@pytest.mark.parametrize("cut", [997, 4_096, 1 << 20])
def test_records_land_in_place_among_what_is_missing(server, cut):
    refused = b"-WRONGTYPE not a string\r\n"
    said = [bulk(record(0)), b"$-1\r\n", bulk(record(2)), refused, bulk(b"short"), bulk(record(5))]
    whole = b"".join([*said, bulk(record(6, 50_000)), b"$-1\r\n", b"$-1\r\n"])
    wanted = buffers(9)
    server.say(*(whole[at : at + cut] for at in range(0, len(whole), cut)))
    found = list(server.connection.get(wanted, soon()))
    assert found == [
        *(True, False, True, Refusal("WRONGTYPE", "not a string"), False, True, False),
        *(False, False),
    ]
    for number in (0, 2, 5):
        assert bytes(wanted[number][1]) == record(number)
    server.say(b"+PONG\r\n")
    assert server.connection.ask([command(b"PING")], soon()) == [b"PONG"], "nothing is left over"


def test_records_of_many_lengths_land_in_place(server):
    sizes = [4_096, 100_000, 9, 70_000, 12, 4_096]
    wanted = [(b"k%d" % n, memoryview(bytearray(size))) for n, size in enumerate(sizes)]
    server.say(b"".join(bulk(record(n, size)) for n, size in enumerate(sizes)))
    assert list(server.connection.get(wanted, soon())) == [True] * len(sizes)
    assert [bytes(into) for _, into in wanted] == [record(n, s) for n, s in enumerate(sizes)]


def test_only_so_much_is_asked_for_ahead(server):
    size = AHEAD_BYTES // 2
    got = server.connection.get(buffers(6, size), soon())
    server.say(*[bulk(bytes(size))] * 6)
    next(got)
    assert server.heard().count(b"GET") == 2
    assert list(got) == [True] * 5
    assert server.heard().count(b"GET") == 4


@pytest.mark.parametrize(
    "said",
    [
        *(b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$abc\r\n", b"$-7\r\n", b"$99999999999\r\n"),
        *(b"*999999999\r\n", b"$3\r\nabcde", b"x" * 10_000, b"*1\r\n" * 10, b"\r\n\r\n"),
    ],
)
def test_what_is_no_reply_is_refused(server, said):
    server.say(said)
    with pytest.raises(ProtocolError):
        server.connection.ask([command(b"PING")], soon())


@pytest.mark.parametrize(
    "said", [b":17\r\n:17\r\n", b"$999999999999\r\n", b"$5000\r\n" + b"x" * 5_002]
)
def test_what_is_no_record_is_refused(server, said):
    server.say(said)
    with pytest.raises(ProtocolError):
        list(server.connection.get(buffers(1), soon()))


def test_a_server_that_goes_away_is_said(server):
    server.say(b"$5000\r\nonly this").join()
    threading.Timer(0.05, server.far.close).start()
    with pytest.raises(ConnectionError):
        list(server.connection.get(buffers(1), soon()))


def test_a_dribble_ends_at_the_deadline(server, standstills):
    stop = threading.Event()

    def dribble():
        server.far.sendall(b"$5000\r\n")
        while not stop.wait(0.01):
            server.far.sendall(b"x")

    thread = threading.Thread(target=dribble)
    thread.start()
    begun_s = time.monotonic()
    try:
        with pytest.raises(TimeoutError):
            list(server.connection.get(buffers(1), Deadline.within(0.3)))
        assert time.monotonic() - begun_s >= 0.3
        assert standstills.since(begun_s) < 2.0
    finally:
        stop.set()
        thread.join()
