"""Every message between a node and a target, version 2; Refused, Status, List and Report included.

Whole records follow a `PutRecords` and a `RecordsFollow` as payload: header, payload, tag and
padding, each as long as its header says. Records of one namespace may differ in length. The request
ids of a connection count up from 1, and answers come in order. `epoch` is a field that nothing
reads; it is sent as 0.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from holdfast.errors import ProtocolError
from holdfast.wire.fields import Integer, PackedBytes, ShortBytes, Text
from holdfast.wire.local.messages import List, Refused, ReportReply, Status
from holdfast.wire.remote.token import Verb

TARGET_PROTOCOL = 2

_SIZE_BYTES = 4


class _Message(msgspec.Struct, frozen=True, tag_field="type"):
    pass


class NamedBlocks(_Message, frozen=True, kw_only=True):
    """Blocks of one namespace; `keys` are 16 bytes each."""

    fingerprint: ShortBytes
    domain: ShortBytes
    raw_bytes: Integer
    block_tokens: Integer
    keys: PackedBytes
    epoch: Integer = 0


class Challenge(_Message, frozen=True, tag="challenge"):
    """The target's first message on a connection: its protocol version, and a nonce."""

    protocol: Integer
    nonce: ShortBytes
    nixl: bool = False
    """Whether the target offers to move records over NIXL."""


class Busy(_Message, frozen=True, tag="busy"):
    """The target's first and last message on a connection that is one more than it serves.

    A node of a version without this message takes the connection for broken.
    """

    connections: Integer
    """The number of connections that the target serves at once."""


class Join(_Message, frozen=True, tag="join"):
    """The node's answer: its name, a nonce, and a token's claims and proof if it has one."""

    protocol: Integer
    peer: Text
    nonce: ShortBytes
    claims: Text = ""
    proof: ShortBytes = b""
    nixl: PackedBytes = b""
    """Metadata of the node's NIXL agent; empty if records go over TCP."""


class Joined(_Message, frozen=True, tag="joined"):
    """The target accepts; the proof shows that it knows the key the token was made with."""

    protocol: Integer
    incarnation: Text
    proof: ShortBytes = b""
    epoch: Integer = 0
    nixl: bool = False
    """Whether the target can access the memory that the node registered."""
    page: Text = ""
    """Address of the target's status page, tcp://host:port; empty if it has none."""


class PutRecords(_Message, frozen=True, tag="put"):
    """Store these records; `headers`: their first 128 bytes each. The payload is the records."""

    headers: PackedBytes
    epoch: Integer = 0
    spans: PackedBytes = b""
    """The records' addresses and lengths for NIXL, 16 bytes each; then no payload follows."""


class Stored(_Message, frozen=True, tag="stored"):
    """One byte per record: 1 if it is held now, 0 if no slot was free or it failed its check."""

    held: PackedBytes
    epoch: Integer = 0


class GetRecords(NamedBlocks, frozen=True, tag="get"):
    """Ask for the records of the leading run of these blocks that are in memory in time."""

    deadline_s: float
    spans: PackedBytes = b""
    """Where to write the records over NIXL; then no payload follows the answer."""


class RecordsFollow(_Message, frozen=True, tag="records"):
    """The first records follow; `outcome` and `reason` tell why not all, if so."""

    sizes: PackedBytes
    """The length of each record that follows in bytes, 4 bytes each, little-endian."""
    outcome: Text
    reason: Text = ""
    epoch: Integer = 0


class ExistBlocks(NamedBlocks, frozen=True, tag="exist"):
    """Ask which of these blocks are held."""


class Existing(_Message, frozen=True, tag="existing"):
    """One byte per key: 1 if it is held, on any tier."""

    held: PackedBytes
    epoch: Integer = 0


class DeleteBlocks(NamedBlocks, frozen=True, tag="delete"):
    """Delete these blocks, without a check of their records."""


class SuspectBlocks(NamedBlocks, frozen=True, tag="suspect"):
    """Report blocks that failed a reader's check; the target deletes those that fail its own."""


class UseBlocks(NamedBlocks, frozen=True, tag="use"):
    """State that these blocks are in use, so that others are evicted before them.

    Sent for parity records, which are not read as long as their blocks are there.
    """


class PrestageBlocks(NamedBlocks, frozen=True, tag="prestage"):
    """Hint: have the held ones of these blocks, which are consecutive here, in memory in `in_s`.

    The answer is the number of leading blocks that are held.
    """

    in_s: float


class Counted(_Message, frozen=True, tag="counted"):
    """The number of blocks that a request found; of a SuspectBlocks, the number that it deleted."""

    blocks: Integer
    epoch: Integer = 0


TargetRequest: TypeAlias = (
    Join
    | PutRecords
    | GetRecords
    | ExistBlocks
    | DeleteBlocks
    | SuspectBlocks
    | UseBlocks
    | PrestageBlocks
    | Status
    | List
)
TargetReply: TypeAlias = (
    Challenge | Busy | Joined | Stored | RecordsFollow | Existing | Counted | ReportReply | Refused
)


def pack_sizes(records: Sequence[memoryview]) -> bytes:
    """Return the lengths of records as `RecordsFollow.sizes`."""
    return struct.pack(f"<{len(records)}I", *map(len, records))


def unpack_sizes(packed: bytes) -> tuple[int, ...]:
    """Return the lengths in a `RecordsFollow.sizes`; raise ProtocolError for a cut one."""
    if len(packed) % _SIZE_BYTES:
        raise ProtocolError(f"records.sizes: {len(packed)} bytes do not divide by {_SIZE_BYTES}")
    return struct.unpack(f"<{len(packed) // _SIZE_BYTES}I", packed)


def permission_for(request: type[msgspec.Struct]) -> Verb:
    """Return the permission that a token needs for a request of this class."""
    return _NEEDS.get(request, "read")


_NEEDS: dict[type[msgspec.Struct], Verb] = {PutRecords: "write", DeleteBlocks: "delete"}
