"""A client of RESP, the protocol of Redis and Valkey, without copies of records.

A read never requests more bytes from the socket than are certain to arrive, so that a record can be
received directly into its buffer. Every reply has at least 4 bytes, that of a record at least 5,
and the reply with an existing record starts with a line that is known in advance.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from holdfast.address import HostPort
from holdfast.buffers import ALIGNMENT
from holdfast.errors import ProtocolError, RefusedError, printable
from holdfast.limits import KIB, MIB, PAYLOAD_BYTES_MAX
from holdfast.wire.remote.credentials import read_secret
from holdfast.wire.remote.stream import Buffer, Deadline, PlainStream, Stream, dial, start_tls, tune

AHEAD_BYTES = 4 * MIB
"""Most bytes of records requested ahead. The server buffers them; more halves its speed."""

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


class RespErrorReply(NamedTuple):
    """An error reply: its code, such as MOVED or OOM, and the text after the code."""

    code: str
    text: str


Reply: TypeAlias = int | bytes | RespErrorReply | list["Reply"] | None


class RespLogin(NamedTuple):
    """Credentials for a server. Without `user`, the password is that of the default user."""

    user: str = ""
    password_file: str = ""
    database: int = 0
    tls: ssl.SSLContext | None = None


class RespConnection:
    """One connection, for one caller at a time.

    Every method raises OSError (TimeoutError past the deadline) or ProtocolError. The caller must
    then close the connection; no buffer changes after that.
    """

    def __init__(self, stream: Stream) -> None:
        self.used = False
        """Whether the server has answered a request on it."""
        self._stream = stream
        self._buffer = bytearray()
        self._outstanding = 0
        """Number of replies expected after the one being read."""

    def ask(self, commands: Sequence[bytes], deadline: Deadline) -> list[Reply]:
        """Send all commands at once; return the reply to each."""
        self._stream.send([b"".join(commands)], deadline)
        return self._replies(len(commands), deadline)

    def put(
        self,
        records: Sequence[tuple[bytes, memoryview]],
        ttl_s: float,
        deadline: Deadline,
        replaced: Collection[bytes] = (),
    ) -> list[Reply]:
        """Set keys to records, for `ttl_s` seconds (0: without limit); return the reply to each.

        An existing key keeps its record and the reply is None, unless the key is in `replaced`.
        """
        ttl = _bulk(b"PX") + _bulk(b"%d" % max(1, round(ttl_s * 1000))) if ttl_s else b""
        parts: list[Buffer] = []
        before = b""
        for key, record in records:
            only_new = b"" if key in replaced else _bulk(b"NX")
            words = 3 + bool(only_new) + 2 * bool(ttl)
            head = b"*%d\r\n$3\r\nSET\r\n%b$%d\r\n" % (words, _bulk(key), len(record))
            parts += [before + head, record]
            before = _END + only_new + ttl
        self._stream.send([*parts, before], deadline)
        return self._replies(len(records), deadline)

    def get(
        self, wanted: Sequence[tuple[bytes, memoryview]], deadline: Deadline
    ) -> Iterator[bool | RespErrorReply | None]:
        """Receive records into their buffers, one by one; yield True for each that was received.

        Yields False if the key has no record, None if its record is longer than the buffer or not
        whole sectors. Buffers do not change after the generator has ended, or the connection was
        closed.
        """
        requested = ahead_bytes = 0
        for number, (_, into) in enumerate(wanted):
            commands = []
            while requested < len(wanted) and (requested <= number or ahead_bytes < AHEAD_BYTES):
                commands.append(command(b"GET", wanted[requested][0]))
                ahead_bytes += len(wanted[requested][1])
                requested += 1
            if commands:
                self._stream.send([b"".join(commands)], deadline)
            self._outstanding = requested - number - 1
            yield self._record(into, deadline)
            ahead_bytes -= len(into)
        self.used = True

    def close(self) -> None:
        """Close the connection."""
        self._stream.close()

    def _replies(self, count: int, deadline: Deadline) -> list[Reply]:
        self._outstanding = count
        replies = [self._item(deadline) for _ in range(count)]
        self.used = True
        return replies

    def _item(self, deadline: Deadline, depth: int = 0) -> Reply:
        """Read one outstanding reply, or one item of an array."""
        self._outstanding -= 1
        line = self._line(deadline)
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return _error_reply(rest)
        if kind == b":":
            return _number(rest)
        if kind == b"$":
            size = _number(rest, _BULK_BYTES_MAX)
            return None if size < 0 else self._exactly(size, deadline)
        if kind == b"*" and depth < _DEPTH_MAX:
            count = _number(rest, _ITEMS_MAX)
            self._outstanding += max(count, 0)
            return [self._item(deadline, depth + 1) for _ in range(count)]
        raise ProtocolError(f"{line[:40]!r} starts no known reply")

    def _record(self, into: memoryview, deadline: Deadline) -> bool | RespErrorReply | None:
        """Read the reply to a GET of a record, most likely as long as `into`."""
        head = b"$%d\r\n" % len(into)
        certain_bytes = min(len(head), _RECORD_BYTES_MIN * (1 + self._outstanding))
        self._fill(certain_bytes, deadline)
        if self._buffer.startswith(_ABSENT):
            del self._buffer[: len(_ABSENT)]
            return False
        if head.startswith(self._buffer[: len(head)]):
            self._fill(len(head), deadline)
        if not self._buffer.startswith(head):
            return self._other_reply(into, deadline)
        del self._buffer[: len(head)]
        return self._record_into(into, len(head), deadline)

    def _record_into(self, into: memoryview, head_bytes: int, deadline: Deadline) -> bool:
        """Read a record that fills a buffer, and the first bytes of the next reply if certain."""
        buffered = self._buffer[: len(into)]
        into[: len(buffered)] = buffered
        del self._buffer[: len(buffered)]
        if self._buffer:
            self._fill(len(_END), deadline)
            _check_end(self._buffer[: len(_END)])
            del self._buffer[: len(_END)]
            return True
        next_bytes = min(head_bytes, _RECORD_BYTES_MIN * self._outstanding)
        tail = memoryview(bytearray(len(_END) + next_bytes))
        self._stream.receive([into[len(buffered) :], tail], deadline)
        _check_end(tail[: len(_END)])
        self._buffer = bytearray(tail[len(_END) :])
        return True

    def _other_reply(self, into: memoryview, deadline: Deadline) -> bool | RespErrorReply | None:
        """Read a reply that is no record of the buffer's length: a shorter one, or an error.

        Skips a record that is longer, or not whole sectors, and returns None.
        """
        line = self._line(deadline)
        if line[:1] == b"-":
            return _error_reply(line[1:])
        if line[:1] != b"$":
            raise ProtocolError(f"{line[:40]!r} instead of a record")
        size = _number(line[1:], PAYLOAD_BYTES_MAX + MIB)
        if 0 < size < len(into) and not size % ALIGNMENT:
            return self._record_into(into[:size], len(line), deadline)
        left = size + len(_END)
        buffered = min(left, len(self._buffer))
        del self._buffer[:buffered]
        scratch = memoryview(bytearray(min(left, _SCRATCH_BYTES)))
        left -= buffered
        while left:
            piece = scratch[:left]
            self._stream.receive([piece], deadline)
            left -= len(piece)
        return None

    def _line(self, deadline: Deadline) -> bytes:
        """Read a line; return it without its line end."""
        while (end := self._buffer.find(_END)) < 0:
            if len(self._buffer) > _LINE_BYTES_MAX:
                raise ProtocolError(f"a line is longer than {_LINE_BYTES_MAX} bytes")
            least = 1 if self._buffer.endswith(b"\r") else len(_END)
            rest = least if self._buffer else _REPLY_BYTES_MIN
            self._receive(rest + _REPLY_BYTES_MIN * self._outstanding, deadline)
        line = bytes(self._buffer[:end])
        del self._buffer[: end + len(_END)]
        return line

    def _exactly(self, nbytes: int, deadline: Deadline) -> bytes:
        """Read a string of known length, and the line end after it."""
        self._fill(nbytes + len(_END), deadline)
        data = bytes(self._buffer[:nbytes])
        _check_end(self._buffer[nbytes : nbytes + len(_END)])
        del self._buffer[: nbytes + len(_END)]
        return data

    def _fill(self, nbytes: int, deadline: Deadline) -> None:
        """Receive until the buffer has `nbytes`."""
        while len(self._buffer) < nbytes:
            self._receive(nbytes - len(self._buffer), deadline)

    def _receive(self, nbytes: int, deadline: Deadline) -> None:
        piece = bytearray(min(nbytes, _BULK_BYTES_MAX))
        self._stream.receive([memoryview(piece)], deadline)
        self._buffer += piece


def command(*words: bytes) -> bytes:
    """Encode one command."""
    return b"*%d\r\n%b" % (len(words), b"".join(map(_bulk, words)))


def log_in(endpoint: HostPort, login: RespLogin, deadline: Deadline) -> RespConnection:
    """Connect and log in.

    Raises OSError or ProtocolError if no RESP server answers, ConfigError if the password cannot be
    read, RefusedError if the server rejects the login.
    """
    commands = login_commands(login)
    with contextlib.ExitStack() as undo:
        connected = dial(endpoint, deadline)
        undo.callback(connected.close)
        tune(connected, endpoint)
        stream: Stream
        if login.tls is None:
            stream = PlainStream(connected)
        else:
            stream = start_tls(connected, login.tls, deadline, endpoint.host)
        connection = RespConnection(stream)
        undo.callback(connection.close)
        for reply in connection.ask(commands, deadline):
            if isinstance(reply, RespErrorReply):
                raise RefusedError(f"{reply.code} {reply.text}")
        connection.used = False
        undo.pop_all()
    return connection


def login_commands(login: RespLogin) -> list[bytes]:
    """Return the first commands of a connection; raise ConfigError for an unusable password."""
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


def _error_reply(rest: bytes) -> RespErrorReply:
    code, _, text = rest.decode("utf-8", "replace").partition(" ")
    return RespErrorReply(printable(code), printable(text))


def _number(text: bytes, limit: int | None = None) -> int:
    try:
        number = int(text)
    except ValueError as error:
        raise ProtocolError(f"{text[:40]!r} is not a number") from error
    if limit is not None and not -1 <= number <= limit:
        raise ProtocolError(f"length {number} is out of range; at most {limit} is accepted")
    return number


def _check_end(found: Buffer) -> None:
    if found != _END:
        raise ProtocolError(f"{bytes(found)!r} instead of a line end")
