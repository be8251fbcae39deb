"""Objects by plain HTTP: the right bytes at the other end, or the caller has to ask again."""

import socket
import threading
import time
from contextlib import closing

import pytest

from holdfast.tiers.object.direct_client import DirectClient, Hedging
from holdfast.wire.remote.stream import Deadline

DATA = bytes(range(256)) * 64
NEVER = threading.Event()


class ScriptedServer:
    """Answers each request, on any connection, with what `answer` returns for it.

    `answer` gets the number of the request and the range that it wants, and sends by itself if it
    returns None. A connection ends after an answer of no bytes.
    """

    def __init__(self, answer):
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.requests, self.connections = [], []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self):
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self):
        self._listener.close()
        for connection in self.connections:
            connection.close()

    def _accept(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        try:
            with connection, connection.makefile("rb") as lines:
                while head := self._head(lines):
                    with self._lock:
                        self.requests.append(head)
                        number = len(self.requests)
                    if "content-length" in head:
                        head["body"] = lines.read(int(head["content-length"]))
                        answer = self._answer(number, 0, 0)
                    else:
                        first, _, last = head["range"].removeprefix("bytes=").partition("-")
                        answer = self._answer(number, int(first), int(last) + 1)
                    if not answer:
                        return
                    for piece in answer:
                        connection.sendall(piece)
        except OSError:
            return

    @staticmethod
    def _head(lines):
        head = {"line": lines.readline().decode().strip()}
        while line := lines.readline().decode().strip():
            name, _, value = line.partition(":")
            head[name.lower()] = value.strip()
        return head if head["line"] else None


def partial(start, end, data=DATA, more=""):
    part = data[start:end]
    head = f"HTTP/1.1 206 Partial Content\r\n{more}Content-Length: {len(part)}\r\n"
    head += f"Content-Range: bytes {start}-{start + len(part) - 1}/{len(data)}\r\n\r\n"
    return [head.encode(), part]


@pytest.fixture
def opened():
    """Return a function that starts a server with its answers, and a client of it."""
    made = []

    def make(answer):
        server = ScriptedServer(answer)
        counted = []
        client = DirectClient(
            lambda method, name, _: f"http://{server.address}/b/{name}?sig={method}",
            counted.append,
            idle_max=4,
        )
        made.extend([client, server])
        return client, server, counted

    yield make
    for each in made:
        each.close()


def read(client, start, sizes, within_s=60.0, hedging=None):
    into = [memoryview(bytearray(size)) for size in sizes]
    nbytes = client.read("7d/aa/x", start, into, Deadline.within(within_s), hedging)
    return nbytes, b"".join(into)


def test_a_range_is_scattered_over_the_buffers_on_one_connection(opened):
    client, server, counted = opened(lambda _, start, end: partial(start, end))
    for start in (0, 5, 4_000):
        nbytes, data = read(client, start, [1_000, 1, 2_999])
        assert (nbytes, data) == (4_000, DATA[start : start + 4_000])
    assert len(counted) == len(server.requests) == 3
    assert len(server.connections) == 1
    assert server.requests[0]["line"] == "GET /b/7d/aa/x?sig=GET HTTP/1.1"
    assert server.requests[0]["host"] == server.address


def test_a_range_past_the_end_is_as_long_as_the_object(opened):
    client, _, _ = opened(lambda _, start, end: partial(start, end))
    nbytes, data = read(client, len(DATA) - 100, [64, 64, 64])
    assert nbytes == 100
    assert data[:100] == DATA[-100:]


def test_a_head_and_a_body_in_small_pieces_are_put_together(opened):
    def answer(_, start, end):
        whole = b"".join(partial(start, end))
        return [whole[at : at + 7] for at in range(0, len(whole), 7)]

    client, _, _ = opened(answer)
    assert read(client, 3, [500, 500]) == (1_000, DATA[3:1_003])


OTHER_ANSWERS = {
    "whole object": [b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n", DATA[:10]],
    "not found": [b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"],
    "forbidden": [b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n"],
    "busy": [b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n"],
    "another range": partial(50, 150),
    "longer": partial(0, 5_000),
    "chunked": partial(0, 100, more="Transfer-Encoding: chunked\r\n"),
    "compressed": partial(0, 100, more="Content-Encoding: gzip\r\n"),
    "no length": [b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-99/100\r\n\r\n"],
    "no HTTP": [b"SSH-2.0-OpenSSH\r\n\r\n"],
    "endless head": [b"x" * 20_000],
    "more than it says": [*partial(0, 100), b"more"],
    "cut": [b"".join(partial(0, 100))[:-20]],
    "nothing": [],
}


@pytest.mark.parametrize("name", OTHER_ANSWERS)
def test_any_other_answer_is_none_and_its_connection_is_not_used_again(opened, name):
    def answer(number, start, end):
        if number > 1:
            return partial(start, end)
        return whole_answer() if OTHER_ANSWERS[name] else None

    def whole_answer():
        yield b"".join(OTHER_ANSWERS[name])
        if name == "cut":
            server.connections[0].shutdown(socket.SHUT_RDWR)

    client, server, _ = opened(answer)
    assert read(client, 0, [100])[0] is None
    assert read(client, 0, [100]) == (100, DATA[:100])
    assert len(server.connections) == 2


def put(client, parts, within_s=60.0):
    return client.put("7d/aa/x", [memoryview(part) for part in parts], Deadline.within(within_s))


STORED = [b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: 0\r\n\r\n']


def test_the_parts_of_an_object_are_sent_joined_on_one_connection(opened):
    client, server, counted = opened(lambda *_: STORED)
    parts = [DATA[at : at + 7] for at in range(0, 7_000, 7)]
    for _ in range(2):
        assert put(client, parts)
    assert [each["body"] for each in server.requests] == [DATA[:7_000]] * 2
    assert server.requests[0]["line"] == "PUT /b/7d/aa/x?sig=PUT HTTP/1.1"
    assert counted == ["PUT", "PUT"]
    assert len(server.connections) == 1


@pytest.mark.parametrize(
    "answer",
    [
        [b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n"],
        [b"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://h/\r\nContent-Length: 0\r\n\r\n"],
        [b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 4\r\n\r\nfull"],
        [b"x" * 20_000],
        [b"SSH-2.0-OpenSSH\r\n\r\n"],
        None,
    ],
    ids=["forbidden", "redirect", "full", "endless head", "no HTTP", "nothing"],
)
def test_an_object_is_stored_only_if_the_store_says_so(opened, answer):
    client, _, _ = opened(lambda number, *_: answer if number == 1 else STORED)
    assert not put(client, [DATA])
    assert put(client, [DATA])


def test_a_put_without_an_answer_ends_at_the_deadline(opened):
    held = threading.Event()
    client, _, _ = opened(lambda *_: held.wait(20.0) and STORED)
    with pytest.raises(TimeoutError):
        put(client, [DATA], within_s=0.3)
    held.set()


def test_a_slow_body_ends_at_the_deadline(opened):
    def dribble(_, start, end):
        head, body = partial(start, end)
        yield head
        for at in range(len(body)):
            NEVER.wait(0.02)
            yield body[at : at + 1]

    client, _, _ = opened(dribble)
    with pytest.raises(TimeoutError):
        read(client, 0, [1_000], within_s=0.3)


def test_a_late_answer_is_overtaken_by_a_second_request(opened):
    held = threading.Event()

    def answer(number, start, end):
        if number == 1:
            held.wait(20.0)
        return partial(start, end)

    client, server, counted = opened(answer)
    taken = []
    hedging = Hedging(0.05, lambda: taken.append(1) is None)
    assert read(client, 0, [100], hedging=hedging) == (100, DATA[:100])
    held.set()
    assert len(server.requests) == len(counted) == 2
    assert taken == [1]


def test_a_late_answer_is_awaited_if_no_second_request_is_permitted(opened):
    def answer(_, start, end):
        NEVER.wait(0.2)
        return partial(start, end)

    client, server, _ = opened(answer)
    assert read(client, 0, [100], hedging=Hedging(0.01, lambda: False)) == (100, DATA[:100])
    assert len(server.requests) == 1


def test_a_connection_that_the_store_has_closed_is_not_used_again(opened):
    client, server, _ = opened(lambda _, start, end: partial(start, end))
    assert read(client, 0, [10])[0] == 10
    server.connections[0].shutdown(socket.SHUT_RDWR)
    assert read(client, 0, [10])[0] == 10
    assert len(server.connections) == 2


def test_closing_ends_a_read_in_progress(opened):
    client, server, _ = opened(lambda *_: [(NEVER.wait(20.0) and b"") or b"x"])
    found = []
    reading = threading.Thread(target=lambda: found.append(read(client, 0, [10], within_s=60.0)))
    reading.start()
    while not server.requests:
        time.sleep(0.01)
    client.close()
    reading.join(60.0)
    assert found[0][0] is None


@pytest.mark.parametrize("url", ["", "https://h/b/x", "ftp://h/x"])
def test_a_url_of_another_kind_is_not_asked(url):
    client = DirectClient(lambda method, name, deadline: url, lambda method: None, 4)
    with closing(client):
        assert read(client, 0, [10])[0] is None


def test_a_store_that_refuses_connections_is_none():
    client = DirectClient(lambda *_: "http://127.0.0.1:9/b/x", lambda method: None, 4)
    with closing(client):
        assert read(client, 0, [10])[0] is None
