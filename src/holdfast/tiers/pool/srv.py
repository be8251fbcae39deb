"""The one DNS question that the standard library can not ask: SRV records (RFC 1035, 2782)."""

from __future__ import annotations

import secrets
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import MembershipError

SRV = 33
NAME_CHARACTERS_MAX = 253
LABEL_BYTES_MAX = 63
POINTERS_MAX = 32
"""Jumps followed in one name; more is a loop."""

_IN = 1
_HEADER = struct.Struct(">HHHHHH")
_RECORD = struct.Struct(">HHIH")
_FIELDS = struct.Struct(">HHH")
_ASK_RECURSION = 0x0100
_RESPONSE, _TRUNCATED, _STATUS = 0x8000, 0x0200, 0x000F
_NO_SUCH_NAME = 3
_DATAGRAM_BYTES_MAX = 65_535
_PORT = 53


class SrvRecord(NamedTuple):
    """Where a service is; the lowest priority counts, `weight` is a share within it."""

    priority: int
    weight: int
    port: int
    host: str


def lookup_srv(
    name: str, servers: Sequence[tuple[str, int]] = (), timeout_s: float = 3.0
) -> list[SrvRecord]:
    """Return the SRV records of a full name, asking the servers in turn; the system's if none.

    Raises MembershipError if none of them answers with records.
    """
    query_id = secrets.randbelow(1 << 16)
    query = encode_query(name, query_id)
    trouble = "no name server known"
    for server in servers or system_servers():
        try:
            return decode_answer(_ask(server, query, timeout_s), query_id, name)
        except (OSError, MembershipError) as error:
            trouble = f"{server[0]}: {error}"
    raise MembershipError(f"SRV records of {name}: {trouble}; check the name and the name server")


def system_servers(path: str = "/etc/resolv.conf") -> list[tuple[str, int]]:
    """Return the name servers of this machine."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise MembershipError(f"{path}: {error}; it names the name servers") from error
    words = [line.split() for line in text.splitlines()]
    return [(word[1], _PORT) for word in words if len(word) > 1 and word[0] == "nameserver"]


def encode_query(name: str, query_id: int) -> bytes:
    """Return the bytes of a question for SRV records."""
    labels = name.removesuffix(".").encode().split(b".") if name.isascii() else []
    lengths = [len(label) for label in labels]
    too_long = sum(lengths) + len(lengths) > NAME_CHARACTERS_MAX + 1
    if not lengths or min(lengths) < 1 or max(lengths) > LABEL_BYTES_MAX or too_long:
        raise MembershipError(f"{name!r:.300} is no DNS name; write it in full, in ASCII")
    packed = b"".join(bytes([len(label)]) + label for label in labels)
    header = _HEADER.pack(query_id, _ASK_RECURSION, 1, 0, 0, 0)
    return header + packed + b"\0" + struct.pack(">HH", SRV, _IN)


def decode_answer(data: bytes, query_id: int, name: str) -> list[SrvRecord]:
    """Return the SRV records in an answer; raises MembershipError on anything else."""
    try:
        number, flags, questions, answers, _, _ = _HEADER.unpack_from(data)
        if number != query_id or not flags & _RESPONSE:
            raise MembershipError("not the answer to our question")
        if status := flags & _STATUS:
            what = "no such name" if status == _NO_SUCH_NAME else f"status {status}"
            raise MembershipError(f"{name}: {what}")
        at = _HEADER.size
        for _ in range(questions):
            _, at = _name(data, at)
            at += 4
        records = []
        for _ in range(answers):
            record, at = _record(data, at)
            records += record
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise MembershipError(f"the answer is no DNS message: {error}") from error
    if not records:
        raise MembershipError(f"{name}: no SRV records")
    return records


def _record(data: bytes, at: int) -> tuple[list[SrvRecord], int]:
    """Read one record; return it if it is SRV (an alias may come first), and where it ends."""
    _, at = _name(data, at)
    kind, _, _, length = _RECORD.unpack_from(data, at)
    at += _RECORD.size
    end = at + length
    if kind != SRV:
        return [], end
    priority, weight, port = _FIELDS.unpack_from(data, at)
    host, _ = _name(data, at + _FIELDS.size)
    return [SrvRecord(priority, weight, port, host)], end


def _name(data: bytes, at: int) -> tuple[str, int]:
    """Read a name, which may go on elsewhere in the message; return it and where it ended here."""
    labels: list[str] = []
    end = 0
    pointers = 0
    while length := data[at]:
        if length <= LABEL_BYTES_MAX:
            labels.append(data[at + 1 : at + 1 + length].decode("ascii"))
            at += 1 + length
            continue
        end = end or at + 2
        at = (length << 8 | data[at + 1]) & 0x3FFF
        pointers += 1
        if pointers > POINTERS_MAX:
            raise MembershipError("the answer is no DNS message: a name without an end")
    return ".".join(labels), end or at + 1


def _ask(server: tuple[str, int], query: bytes, timeout_s: float) -> bytes:
    """Ask over UDP, and over TCP if the answer did not fit."""
    family = socket.AF_INET6 if ":" in server[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as udp:
        udp.settimeout(timeout_s)
        udp.connect(server)
        udp.send(query)
        answer = udp.recv(_DATAGRAM_BYTES_MAX)
    if len(answer) < _HEADER.size or not _HEADER.unpack_from(answer)[1] & _TRUNCATED:
        return answer
    with socket.create_connection(server, timeout_s) as tcp, tcp.makefile("rb") as stream:
        tcp.sendall(struct.pack(">H", len(query)) + query)
        (length,) = struct.unpack(">H", _exactly(stream.read(2), 2))
        return _exactly(stream.read(length), length)


def _exactly(data: bytes, length: int) -> bytes:
    if len(data) != length:
        raise MembershipError(f"{len(data)} of {length} bytes came")
    return data
