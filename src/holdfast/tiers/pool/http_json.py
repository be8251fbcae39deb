"""JSON over HTTP with a deadline on everything: single answers, and streams of objects."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from urllib.parse import urlsplit

import msgspec

from holdfast.errors import MembershipError
from holdfast.limits import MIB

ANSWER_BYTES_MAX = 16 * MIB
LINE_BYTES_MAX = 4 * MIB
MESSAGE_CHARACTERS_MAX = 300

_OK = range(200, 300)


class HttpStatusError(MembershipError):
    """The server answered, but not with what was asked for; `status` is its HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class TlsFiles(msgspec.Struct, frozen=True):
    """Paths of PEM files: whom to trust (the system's list if empty), and who we are, if asked.

    Read anew for every connection, because they are renewed while we run.
    """

    ca: str = ""
    certificate: str = ""
    key: str = ""

    def context(self) -> ssl.SSLContext:
        """Return a context that verifies the server; raises OSError naming what is unreadable."""
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
            if self.certificate:
                context.load_cert_chain(self.certificate, self.key or None)
        except OSError as error:  # ssl.SSLError too: a file that is not PEM
            names = ", ".join(filter(None, [self.ca, self.certificate, self.key]))
            raise MembershipError(f"TLS files {names}: {error}; they must be PEM") from error
        return context


class HttpJson:
    """One server. Calls may come from one thread at a time; `interrupt` from any.

    Every failure is a MembershipError that names the server: no connection, no answer within
    `timeout_s`, an answer that is no JSON object, a status other than 2xx (HttpStatusError).
    """

    def __init__(
        self,
        url: str,
        tls: TlsFiles,
        headers: Callable[[], Mapping[str, str]],
        timeout_s: float,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise MembershipError(f"{url!r:.300} is not a server; write http(s)://host:port")
        self.url = url.rstrip("/")
        self._host, self._port = parts.hostname, parts.port
        self._secure = parts.scheme == "https"
        self._tls = tls
        self._headers = headers
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None
        self._interrupted = False

    def call(self, method: str, target: str, body: object = None) -> dict[str, object]:
        """Return the first object of the answer."""
        with self._answer(method, target, body) as answer:
            line = answer.readline(ANSWER_BYTES_MAX + 1)
            if len(line) > ANSWER_BYTES_MAX:
                raise MembershipError(
                    f"{self.url}: an answer of more than {ANSWER_BYTES_MAX} bytes; is it the "
                    "right server?"
                )
            return self._object(line)

    def stream(
        self, method: str, target: str, body: object, silence_s: float
    ) -> Iterator[dict[str, object]]:
        """Yield the answer's objects, one a line, until its end.

        A server that says nothing for `silence_s` ends the stream too: it may be gone without a
        word, so the caller should ask again.
        """
        with self._answer(method, target, body) as answer:
            if self._socket is not None:
                self._socket.settimeout(silence_s)
            while True:
                try:
                    line = answer.readline(LINE_BYTES_MAX + 1)
                except TimeoutError:
                    return
                if not line:
                    return
                if len(line) > LINE_BYTES_MAX:
                    raise MembershipError(f"{self.url}: an event of over {LINE_BYTES_MAX} bytes")
                if line.strip():
                    yield self._object(line)

    def interrupt(self) -> None:
        """End what is waiting for this server, now and from now on."""
        self._interrupted = True
        if (waiting := self._socket) is not None:
            # The plain socket's own: under TLS no farewell is sent, and the reader sees the end.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(waiting, socket.SHUT_RDWR)

    @contextlib.contextmanager
    def _answer(self, method: str, target: str, body: object) -> Iterator[http.client.HTTPResponse]:
        connection = self._connection()
        try:
            connection.connect()
            self._socket = connection.sock
            if self._interrupted:
                raise MembershipError(f"{self.url}: closed")
            data = None if body is None else msgspec.json.encode(body)
            headers = {"Accept": "application/json", **self._headers()}
            if data is not None:
                headers["Content-Type"] = "application/json"
            connection.request(method, target, body=data, headers=headers)
            answer = connection.getresponse()
            if answer.status not in _OK:
                said = _message(answer.read(LINE_BYTES_MAX))
                raise HttpStatusError(f"{self.url}: {answer.status}: {said}", answer.status)
            yield answer
        except (OSError, http.client.HTTPException, ValueError) as error:
            said = str(error) or type(error).__name__
            raise MembershipError(
                f"{self.url}: {said}; is it up, and the right address?"
            ) from error
        finally:
            self._socket = None
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if not self._secure:
            return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        return http.client.HTTPSConnection(
            self._host, self._port, timeout=self._timeout_s, context=self._tls.context()
        )

    def _object(self, line: bytes) -> dict[str, object]:
        try:
            return msgspec.json.decode(line, type=dict[str, object])
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise MembershipError(f"{self.url}: answered no JSON object: {error}") from error


def _message(body: bytes) -> str:
    """Return what an error's body says: its `message` field if it has one."""
    with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError):
        said = msgspec.json.decode(body, type=dict[str, object]).get("message")
        if isinstance(said, str):
            return said[:MESSAGE_CHARACTERS_MAX]
    return " ".join(body.decode(errors="replace").split())[:MESSAGE_CHARACTERS_MAX]
