"""What Redis and Valkey speak: commands out, replies in, records straight from and into place.

A reply is read without ever asking the socket for more than is certain to come, so nothing needs
to be put back: every reply has at least 4 bytes, that of a record at least 5, and a record that is
there has a head that is known beforehand.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from holdfast.errors import ProtocolError, RefusedError
from holdfast.limits import KIB, MIB, PAYLOAD_BYTES_MAX
from holdfast.wire.address import HostPort
from holdfast.wire.credentials import read_secret
from holdfast.wire.dial import dial
from holdfast.wire.stream import Buffer, Deadline, PlainStream, Stream, seal, tune

AHEAD_BYTES = 4 * MIB
"""Records asked for but not here yet. The server copies what waits: more halves its speed."""

PASSWORD_BYTES_MAX = 512

_END = b"\r\n"
_ABSENT = b"$-1\r\n"
_REPLY_BYTES_MIN = 4
_RECORD_BYTES_MIN = len(_ABSENT)
_LINE_BYTES_MAX = 4 * KIB
_BULK_BYTES_MAX = MIB
_ITEMS_MAX = 1 << 18
_DEPTH_MAX = 6
_SCRATCH_BYTES = 256 * KIB


class Refusal(NamedTuple):
    """An error in place of a reply: its code, such as MOVED or OOM, and the words behind it."""

    code: str
    words: str


Reply: TypeAlias = int | bytes | Refusal | list["Reply"] | None


class Login(NamedTuple):
    """What a server wants to know of us. Without `user`, the password is the default user's."""

    user: str = ""
    password_file: str = ""
    database: int = 0
    tls: ssl.SSLContext | None = None


class RespConnection:
    """One connection; who uses it owns it.

    Every method raises OSError (TimeoutError past the deadline) or ProtocolError; then it must be
    closed. Nothing arrives in anybody's buffer after that.
    """

    def __init__(self, stream: Stream) -> None:
        self.used = False
        """Whether it has ever answered a request."""
        self._stream = stream
        self._buffer = bytearray()
        self._owed = 0
        """Replies to come behind the one being read."""

    def ask(self, commands: Sequence[bytes], deadline: Deadline) -> list[Reply]:
        """Send commands together; return the reply to each."""
        self._stream.send([b"".join(commands)], deadline)
        return self._replies(len(commands), deadline)

    def put(
        self, records: Sequence[tuple[bytes, memoryview]], ttl_s: float, deadline: Deadline
    ) -> list[Reply]:
        """Set keys to records, for `ttl_s` seconds unless that is 0; return the reply to each."""
        words = 5 if ttl_s else 3
        ttl = _bulk(b"PX") + _bulk(b"%d" % max(1, round(ttl_s * 1000))) if ttl_s else b""
        parts: list[Buffer] = []
        before = b""
        for key, record in records:
            head = b"*%d\r\n$3\r\nSET\r\n%b$%d\r\n" % (words, _bulk(key), len(record))
            parts += [before + head, record]
            before = _END + ttl
        self._stream.send([*parts, before], deadline)
        return self._replies(len(records), deadline)

    def get(
        self, wanted: Sequence[tuple[bytes, memoryview]], deadline: Deadline
    ) -> Iterator[bool | Refusal]:
        """Receive records into their buffers, one by one; True for each that landed.

        False where there is none, or one of another length. Buffers are not touched after the
        generator has ended, or was left and the connection closed.
        """
        asked = ahead_bytes = 0
        for number, (_, into) in enumerate(wanted):
            commands = []
            while asked < len(wanted) and (asked <= number or ahead_bytes < AHEAD_BYTES):
                commands.append(command(b"GET", wanted[asked][0]))
                ahead_bytes += len(wanted[asked][1])
                asked += 1
            if commands:
                self._stream.send([b"".join(commands)], deadline)
            self._owed = asked - number - 1
            yield self._record(into, deadline)
            ahead_bytes -= len(into)
        self.used = True

    def close(self) -> None:
        """Close it."""
        self._stream.close()

    def _replies(self, count: int, deadline: Deadline) -> list[Reply]:
        self._owed = count
        replies = [self._item(deadline) for _ in range(count)]
        self.used = True
        return replies

    def _item(self, deadline: Deadline, depth: int = 0) -> Reply:
        """Read one reply, or one item of an array, that was owed."""
        self._owed -= 1
        line = self._line(deadline)
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return _refusal(rest)
        if kind == b":":
            return _number(rest)
        if kind == b"$":
            size = _number(rest, _BULK_BYTES_MAX)
            return None if size < 0 else self._exactly(size, deadline)
        if kind == b"*" and depth < _DEPTH_MAX:
            count = _number(rest, _ITEMS_MAX)
            self._owed += max(count, 0)
            return [self._item(deadline, depth + 1) for _ in range(count)]
        raise ProtocolError(f"{line[:40]!r} begins no reply known here")

    def _record(self, into: memoryview, deadline: Deadline) -> bool | Refusal:
        """Read the reply that should be a record of this length."""
        head = b"$%d\r\n" % len(into)
        certain = min(len(head), _RECORD_BYTES_MIN * (1 + self._owed))
        self._have(certain, deadline)
        if self._buffer.startswith(_ABSENT):
            del self._buffer[: len(_ABSENT)]
            return False
        if head.startswith(self._buffer[: len(head)]):
            self._have(len(head), deadline)
        if not self._buffer.startswith(head):
            return self._other(deadline)
        early = self._buffer[len(head) :]
        into[: len(early)] = early
        behind = min(len(head), _RECORD_BYTES_MIN * self._owed)
        tail = memoryview(bytearray(len(_END) + behind))
        self._stream.receive([into[len(early) :], tail], deadline)
        _check_end(tail[: len(_END)])
        self._buffer = bytearray(tail[len(_END) :])
        return True

    def _other(self, deadline: Deadline) -> bool | Refusal:
        """Read past a reply that is not the record expected."""
        line = self._line(deadline)
        if line[:1] == b"-":
            return _refusal(line[1:])
        if line[:1] != b"$":
            raise ProtocolError(f"{line[:40]!r} in place of a record")
        left = _number(line[1:], PAYLOAD_BYTES_MAX + MIB) + len(_END)
        early = min(left, len(self._buffer))
        del self._buffer[:early]
        scratch = memoryview(bytearray(min(left, _SCRATCH_BYTES)))
        left -= early
        while left:
            piece = scratch[:left]
            self._stream.receive([piece], deadline)
            left -= len(piece)
        return False

    def _line(self, deadline: Deadline) -> bytes:
        """Read up to the end of a line, and return it without its end."""
        while (end := self._buffer.find(_END)) < 0:
            if len(self._buffer) > _LINE_BYTES_MAX:
                raise ProtocolError(f"a line of more than {_LINE_BYTES_MAX} bytes")
            least = 1 if self._buffer.endswith(b"\r") else len(_END)
            more = least if self._buffer else _REPLY_BYTES_MIN
            self._receive(more + _REPLY_BYTES_MIN * self._owed, deadline)
        line = bytes(self._buffer[:end])
        del self._buffer[: end + len(_END)]
        return line

    def _exactly(self, nbytes: int, deadline: Deadline) -> bytes:
        """Read a string of known length, and the end of line behind it."""
        self._have(nbytes + len(_END), deadline)
        data = bytes(self._buffer[:nbytes])
        _check_end(self._buffer[nbytes : nbytes + len(_END)])
        del self._buffer[: nbytes + len(_END)]
        return data

    def _have(self, nbytes: int, deadline: Deadline) -> None:
        if len(self._buffer) < nbytes:
            self._receive(nbytes - len(self._buffer), deadline)

    def _receive(self, nbytes: int, deadline: Deadline) -> None:
        piece = bytearray(min(nbytes, _BULK_BYTES_MAX))
        self._stream.receive([memoryview(piece)], deadline)
        self._buffer += piece


def command(*words: bytes) -> bytes:
    """Encode one command."""
    return b"*%d\r\n%b" % (len(words), b"".join(map(_bulk, words)))


def log_in(endpoint: HostPort, login: Login, deadline: Deadline) -> RespConnection:
    """Connect and log in.

    Raises OSError or ProtocolError where no such server answers, ConfigError where the password
    can not be read, RefusedError where the server does not take us.
    """
    commands = _greeting(login)
    connected = dial(endpoint, deadline)
    stream: Stream
    try:
        tune(connected, endpoint)
        if login.tls is None:
            stream = PlainStream(connected)
        else:
            stream = seal(connected, login.tls, deadline, endpoint.host)
    except BaseException:
        connected.close()
        raise
    connection = RespConnection(stream)
    try:
        for reply in connection.ask(commands, deadline):
            if isinstance(reply, Refusal):
                raise RefusedError(f"{reply.code} {reply.words}")
    except BaseException:
        connection.close()
        raise
    connection.used = False
    return connection


def check_login(login: Login) -> None:
    """Raise ConfigError if what a server wants to know can not be read."""
    _greeting(login)


def _greeting(login: Login) -> list[bytes]:
    commands = []
    if login.password_file:
        secret = read_secret(login.password_file, "password_file", PASSWORD_BYTES_MAX)
        user = [login.user.encode()] if login.user else []
        commands.append(command(b"AUTH", *user, secret.rstrip(_END)))
    if login.database:
        commands.append(command(b"SELECT", b"%d" % login.database))
    return [*commands, command(b"PING")]


def _bulk(word: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(word), word)


def _refusal(rest: bytes) -> Refusal:
    code, _, words = rest.decode("utf-8", "replace").partition(" ")
    return Refusal(code, words)


def _number(text: bytes, limit: int | None = None) -> int:
    try:
        number = int(text)
    except ValueError as error:
        raise ProtocolError(f"{text[:40]!r} is no number") from error
    if limit is not None and not -1 <= number <= limit:
        raise ProtocolError(f"{number} announced; at most {limit} is taken")
    return number


def _check_end(found: Buffer) -> None:
    if found != _END:
        raise ProtocolError(f"{bytes(found)!r} where a line should end")
