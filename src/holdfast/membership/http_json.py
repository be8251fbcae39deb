"""JSON over HTTP with timeouts: single responses, and streams of objects."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from holdfast.errors import MembershipError, printable
from holdfast.limits import MIB
from holdfast.regular_file import check_regular

ANSWER_BYTES_MAX = 16 * MIB
LINE_BYTES_MAX = 4 * MIB
MESSAGE_CHARACTERS_MAX = 300
ANSWER_SHOWN_BYTES = 200
"""Start of an unexpected answer that its error shows."""

_OK = range(200, 300)

_T = TypeVar("_T")


class HttpStatusError(MembershipError):
    """The server answered with the HTTP status `status`, which is not 2xx."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class HttpTlsFiles(msgspec.Struct, frozen=True):
    """Paths of PEM files: trusted CAs (the system's if empty), and a client certificate and key.

    Read again for every connection, because they are renewed while the process runs.
    """

    ca: str = ""
    certificate: str = ""
    key: str = ""

    def context(self) -> ssl.SSLContext:
        """Return a context that verifies the server.

        Raises MembershipError if a file cannot be read or is not PEM.
        """
        try:
            for file in filter(None, (self.ca, self.certificate, self.key)):
                check_regular(Path(file))
            context = ssl.create_default_context(cafile=self.ca or None)
            if self.certificate:
                context.load_cert_chain(self.certificate, self.key or None)
        except OSError as error:  # ssl.SSLError too: a file that is not PEM
            names = ", ".join(filter(None, [self.ca, self.certificate, self.key]))
            raise MembershipError(f"TLS files {names}: {error}; they must be PEM") from error
        return context


class HttpJson:
    """Client of one server. One thread at a time may call it; any thread may `interrupt`.

    Every failure raises a MembershipError with the server's URL: no connection, no answer within
    `timeout_s`, an answer of another kind, a status other than 2xx (HttpStatusError).
    """

    def __init__(
        self,
        url: str,
        tls: HttpTlsFiles,
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

    def call(self, method: str, target: str, kind: type[_T], body: object = None) -> _T:
        """Return the first object of the answer, decoded as a `kind`."""
        with self._answer(method, target, body) as answer:
            line = answer.readline(ANSWER_BYTES_MAX + 1)
            if len(line) > ANSWER_BYTES_MAX:
                raise MembershipError(
                    f"{self.url}: answer longer than {ANSWER_BYTES_MAX} bytes; check the address"
                )
            return self._decoded(line, kind)

    def stream(
        self, method: str, target: str, kind: type[_T], body: object, silence_s: float
    ) -> Iterator[_T]:
        """Yield the answer's objects, one a line, until its end; each is decoded as a `kind`.

        The stream also ends if nothing arrives for `silence_s`, because the connection may be
        dead; the caller should send the request again.
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
                    raise MembershipError(
                        f"{self.url}: event longer than {LINE_BYTES_MAX} bytes; check the address"
                    )
                if line.strip():
                    yield self._decoded(line, kind)

    def interrupt(self) -> None:
        """End the call in progress and make every later call fail."""
        self._interrupted = True
        if (waiting := self._socket) is not None:
            # The plain socket's method: it sends no TLS close, and the reader gets an EOF.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(waiting, socket.SHUT_RDWR)

    @contextlib.contextmanager
    def _answer(self, method: str, target: str, body: object) -> Iterator[http.client.HTTPResponse]:
        if self._secure:
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                self._host, self._port, timeout=self._timeout_s, context=self._tls.context()
            )
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
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
                message = _message(answer.read(LINE_BYTES_MAX))
                raise HttpStatusError(f"{self.url}: {answer.status}: {message}", answer.status)
            yield answer
        except (OSError, http.client.HTTPException, ValueError) as error:
            message = str(error) or type(error).__name__
            raise MembershipError(
                f"{self.url}: {message}; check that it runs, and the address"
            ) from error
        finally:
            self._socket = None
            connection.close()

    def _decoded(self, line: bytes, kind: type[_T]) -> _T:
        try:
            return msgspec.json.decode(line, type=kind, strict=False)  # etcd writes numbers as text
        except msgspec.DecodeError as error:
            raise MembershipError(
                f"{self.url}: unexpected answer: {error}: {line[:ANSWER_SHOWN_BYTES]!r}"
            ) from error


def _message(body: bytes) -> str:
    """Return the text of an error's body: its `message` field if it has one."""
    with contextlib.suppress(msgspec.DecodeError):
        message = msgspec.json.decode(body, type=dict[str, object]).get("message")
        if isinstance(message, str):
            return printable(message, MESSAGE_CHARACTERS_MAX)
    return printable(" ".join(body.decode(errors="replace").split()), MESSAGE_CHARACTERS_MAX)
