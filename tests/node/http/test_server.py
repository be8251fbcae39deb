"""The HTTP server against clients that are slow, greedy, unauthorized or broken."""

import asyncio
import base64
import contextlib
import re
import socket
import time
from http import HTTPStatus

import pytest

from holdfast.errors import RefusedError
from holdfast.node.http.server import Answer, HttpLimits, HttpServer, Routes
from holdfast.node.remote.server import bind

TOKEN = b"0123456789abcdef"
LIMITS = HttpLimits(head_bytes=2_048, head_s=5.0, write_s=0.5, connections=8, streams=2)
PATIENT = LIMITS._replace(head_s=600.0, hurried_head_s=600.0)
"""Limits with which no client is too slow."""


async def hello():
    return Answer(HTTPStatus.OK, b"hello\n")


async def large():
    return Answer(HTTPStatus.OK, bytes(64 << 20), "application/octet-stream")


async def broken():
    raise ValueError("a fault of the route")


async def away():
    raise TimeoutError("the drive did not answer")


async def events():
    async def parts():
        while True:
            yield b"data: 1\n\n"
            await asyncio.sleep(0.01)

    return Answer(HTTPStatus.OK, parts(), "text/event-stream")


async def torn():
    async def parts():
        yield b"data: 1\n\n"
        raise ValueError("a fault of the stream")

    return Answer(HTTPStatus.OK, parts(), "text/event-stream")


PATHS = {
    "/": hello,
    "/large": large,
    "/broken": broken,
    "/away": away,
    "/events": events,
    "/torn": torn,
    "/open": hello,
}


@pytest.fixture
def serve():
    """Start a server; returns a function that connects to it."""
    servers, clients = [], []

    def start(token=b"", limits=LIMITS, **options):
        listener = bind("tcp://127.0.0.1:0")
        place = listener.getsockname()
        routes = Routes(PATHS, public=frozenset({"/open"}))
        servers.append(HttpServer(listener, routes, token, limits, **options).start())

        def connect(request=b""):
            client = socket.create_connection(place, timeout=30)
            clients.append(client)
            with contextlib.suppress(ConnectionError):  # the server may have cut it
                client.sendall(request)
            return client

        return connect

    yield start
    for server in servers:
        server.close()
    for client in clients:
        client.close()


def answer_to(client):
    """Return the status line, and all that follows, until the server closes."""
    data = b""
    try:
        while part := client.recv(1 << 16):
            data += part
    except ConnectionResetError:
        pass
    status, _, rest = data.partition(b"\r\n")
    return status.decode(), rest


def until_answered(connect):
    """Wait until a request is answered, because other connections have ended."""
    end_s = time.monotonic() + 60
    while answer_to(connect(get()))[0] != "HTTP/1.1 200 OK":
        assert time.monotonic() < end_s


def get(path="/", *headers):
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode()


def test_a_known_path_is_answered_and_the_connection_closed(serve):
    status, rest = answer_to(serve()(get("/?q=1")))
    head, _, body = rest.partition(b"\r\n\r\n")
    assert status == "HTTP/1.1 200 OK"
    assert b"Content-Length: 6" in head
    assert body == b"hello\n"


def test_head_has_no_body(serve):
    status, rest = answer_to(serve()(get().replace(b"GET", b"HEAD")))
    assert status == "HTTP/1.1 200 OK"
    assert rest.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("request_bytes", "code"),
    [
        (b"garbage\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),  # the start of TLS
        (b"GET / HTTP/2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n", 405),
        (get("/nothing"), 404),
        (get("/../../etc/passwd"), 404),
        (get("/\xff"), 404),
        (get("/broken"), 500),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * 8_192, 431),
    ],
)
def test_an_invalid_request_is_refused_and_the_next_one_is_answered(serve, request_bytes, code):
    connect = serve()
    assert answer_to(connect(request_bytes))[0].startswith(f"HTTP/1.1 {code} ")
    assert answer_to(connect(get()))[0] == "HTTP/1.1 200 OK"


@pytest.mark.parametrize("path", ["/broken", "/away"])
def test_a_page_that_fails_is_answered_with_an_error_and_logged(serve, path, caplog):
    assert answer_to(serve()(get(path)))[0] == "HTTP/1.1 500 Internal Server Error"
    assert f"an HTTP request failed path={path}" in caplog.text


def test_a_stream_that_fails_ends_without_another_answer(serve):
    status, rest = answer_to(serve()(b"GET /torn HTTP/1.1\r\n\r\n"))
    assert status == "HTTP/1.1 200 OK"
    assert rest.endswith(b"\r\n\r\ndata: 1\n\n")


def test_a_request_that_does_not_end_is_cut(serve):
    connect = serve(limits=LIMITS._replace(head_s=0.5))
    slow = connect(b"GET / HT")
    assert slow.recv(1) == b""
    until_answered(connect)


def test_a_client_that_does_not_read_is_cut(serve):
    connect = serve(limits=LIMITS._replace(connections=1))
    scrape = connect(get("/large"))
    assert scrape.recv(12) == b"HTTP/1.1 200"
    until_answered(connect)  # the scrape, as the only connection that is permitted, has ended
    _, rest = answer_to(scrape)
    assert len(rest) < 64 << 20


def test_connections_above_the_limit_get_status_503_and_retry_after(serve):
    connect = serve(limits=PATIENT)
    waiting = [connect(b"GET") for _ in range(LIMITS.connections)]
    statuses = set()
    for _ in range(3):
        status, rest = answer_to(connect(get()))
        statuses.add(status)
        assert b"Retry-After: 5" in rest
    assert statuses == {"HTTP/1.1 503 Service Unavailable"}
    for client in waiting:
        client.close()
    until_answered(connect)


def test_connections_above_twice_the_limit_are_closed_without_an_answer(serve):
    connect = serve(limits=PATIENT)
    silent = [connect() for _ in range(2 * LIMITS.connections)]
    assert answer_to(connect(get())) == ("", b"")
    assert silent[0].recv(1) == b""  # the oldest made room
    for client in silent:
        client.close()
    until_answered(connect)


@pytest.mark.parametrize("silent", [1, 2, 10], ids=lambda times: f"{times} times the limit")
@pytest.mark.parametrize("sent", [b"", b"GET /open HTTP/1.1\r\nX: "], ids=["nothing", "half"])
def test_probes_are_answered_beside_clients_that_do_not_finish_a_request(serve, silent, sent):
    connect = serve(TOKEN)
    clients = [connect(sent) for _ in range(silent * LIMITS.connections)]
    for _ in range(3):
        assert answer_to(connect(get("/open")))[0] == "HTTP/1.1 200 OK"
        assert answer_to(connect(get("/open").replace(b"GET", b"HEAD")))[0] == "HTTP/1.1 200 OK"
    for client in clients[: -2 * LIMITS.connections]:
        assert client.recv(1) == b""  # the oldest made room


def test_probes_are_answered_beside_clients_that_do_not_read(serve):
    connect = serve(limits=LIMITS._replace(write_s=30))
    scrapes = [connect(get("/large")) for _ in range(LIMITS.connections)]
    for scrape in scrapes:
        assert scrape.recv(12) == b"HTTP/1.1 200"
    assert answer_to(connect(get()))[0] == "HTTP/1.1 503 Service Unavailable"
    assert answer_to(connect(get("/open")))[0] == "HTTP/1.1 200 OK"


def test_requests_have_a_shorter_timeout_above_the_connection_limit(serve):
    connect = serve(limits=LIMITS._replace(head_s=600, hurried_head_s=0))
    silent = [connect() for _ in range(2 * LIMITS.connections)]
    assert answer_to(connect(get()))[0] == "HTTP/1.1 200 OK"
    assert silent[0].recv(1) == b""


def test_a_client_that_is_refused_reads_probes_only(serve):
    def check_client(connected):
        raise RefusedError(f"port {connected.getpeername()[1]} is not admitted")

    connect = serve(check_client=check_client)
    client = connect(get())
    status, rest = answer_to(client)
    assert status == "HTTP/1.1 403 Forbidden"
    assert re.search(rb"port \d+ is not admitted", rest)
    assert answer_to(connect(get("/open")))[0] == "HTTP/1.1 200 OK"


def test_open_event_streams_do_not_prevent_a_scrape(serve):
    connect = serve()
    pages = [connect(get("/events")) for _ in range(LIMITS.streams)]
    for page in pages:
        assert page.recv(12) == b"HTTP/1.1 200"
    assert answer_to(connect(get("/events")))[0] == "HTTP/1.1 503 Service Unavailable"
    assert answer_to(connect(get()))[0] == "HTTP/1.1 200 OK"
    pages.pop().close()
    end_s = time.monotonic() + 60
    while connect(get("/events")).recv(12) != b"HTTP/1.1 200":
        assert time.monotonic() < end_s


def test_paths_that_are_not_public_require_the_token(serve):
    connect = serve(TOKEN)
    basic = base64.b64encode(b"anyone:" + TOKEN).decode()
    for header, code in (
        ("X: y", 401),
        ("Authorization: Bearer wrong", 401),
        ("Authorization: Basic !!", 401),
        ("Authorization: Basic " + base64.b64encode(b"anyone:wrong").decode(), 401),
        ("Authorization: Digest x", 401),
        (f"authorization: bearer {TOKEN.decode()}", 200),
        (f"Authorization: Basic {basic}", 200),
    ):
        assert answer_to(connect(get("/", header)))[0].startswith(f"HTTP/1.1 {code} "), header
    assert answer_to(connect(get("/open")))[0] == "HTTP/1.1 200 OK"


def test_wrong_tokens_are_reported_with_their_host_and_missing_ones_are_not(serve):
    denied = []
    connect = serve(TOKEN, deny=lambda *told: denied.append(told))
    for header in ("X: y", f"Authorization: Bearer {TOKEN.decode()}"):
        answer_to(connect(get("/", header)))
    assert denied == []
    for header in ("Authorization: Bearer wrong", "Authorization: Digest x"):
        answer_to(connect(get("/", header)))
    answer_to(connect(get("/open", "Authorization: Bearer wrong")))
    assert denied == [("host 127.0.0.1", "presented a wrong token over HTTP")] * 2


def test_closing_cuts_clients_and_frees_the_port():
    listener = bind("tcp://127.0.0.1:0")
    place = listener.getsockname()
    server = HttpServer(listener, Routes(PATHS), limits=LIMITS).start()
    with socket.create_connection(place, timeout=30) as page:
        page.sendall(get("/events"))
        assert page.recv(12) == b"HTTP/1.1 200"
        server.close()
        answer_to(page)  # ends
    bind(f"tcp://127.0.0.1:{place[1]}").close()
