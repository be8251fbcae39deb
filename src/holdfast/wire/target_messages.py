"""Every message between a node and a target, version 1; Refused, Status, List and Report included.

Whole records follow a `Put` and a `Records` as payload: header, payload, tag and padding, each as
long as its header says. The request ids of a connection count up from 1, and answers come in
order. `epoch` is 64 bits that name the sender's view of the pool; it never decides an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from holdfast.blocks.world import World
from holdfast.wire.messages import List, Refused, Report, Status

TARGET_PROTOCOL = 1


def named(world: World, keys: Sequence[bytes]) -> dict[str, Any]:
    """Return the fields that name blocks in a request."""
    return {**world._asdict(), "keys": b"".join(keys)}


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    pass


class _Named(_Message, frozen=True, kw_only=True):
    """Blocks of one world; `keys` are 16 bytes each."""

    fingerprint: bytes
    domain: bytes
    payload_bytes: int
    block_tokens: int
    keys: bytes
    epoch: int = 0


class Challenge(_Message, frozen=True, tag="challenge"):
    """The target's first word on a connection: what it speaks, and bytes never used before."""

    protocol: int
    nonce: bytes
    nixl: bool = False
    """Whether the target would move records over NIXL."""


class Join(_Message, frozen=True, tag="join"):
    """Who speaks. `claims` and `proof` are a token's, where the target asks for one."""

    protocol: int
    peer: str
    nonce: bytes
    claims: str = ""
    proof: bytes = b""
    nixl: bytes = b""
    """What the node's NIXL agent tells of itself; empty where records go over TCP."""


class Joined(_Message, frozen=True, tag="joined"):
    """Welcome; the proof says that the target knows the key the token was made with."""

    protocol: int
    incarnation: str
    proof: bytes = b""
    epoch: int = 0
    nixl: bool = False
    """Whether the target can reach the memory that the node laid open."""


class Put(_Message, frozen=True, tag="put"):
    """Keep these records; `headers` are their first 128 bytes each, the payload has all of them."""

    headers: bytes
    epoch: int = 0
    spans: bytes = b""
    """Where the records lie for NIXL; no payload follows then. 16 bytes each: address, length."""


class Stored(_Message, frozen=True, tag="stored"):
    """One byte per record: 1 if it is held now, 0 if there was no room or it failed its check."""

    held: bytes
    epoch: int = 0


class Get(_Named, frozen=True, tag="get"):
    """Send the leading run of these blocks that can be had in time."""

    deadline_s: float
    spans: bytes = b""
    """Where they go over NIXL; no payload follows the answer then."""


class Records(_Message, frozen=True, tag="records"):
    """So many records follow. `outcome` and `reason` say why not more, if so."""

    blocks: int
    outcome: str
    reason: str = ""
    epoch: int = 0


class Exist(_Named, frozen=True, tag="exist"):
    """Which of these blocks are held?"""


class Existing(_Message, frozen=True, tag="existing"):
    """One byte per key: 1 if it is held, on whatever tier."""

    held: bytes
    epoch: int = 0


class Delete(_Named, frozen=True, tag="delete"):
    """Forget these blocks; also what to say of one that failed its check after a get."""


class Stage(_Named, frozen=True, tag="stage"):
    """Bring the leading run of these blocks to memory, soon; nobody waits for it."""


class Lease(_Named, frozen=True, tag="lease"):
    """Keep the leading run of these blocks where it lies for a while, in memory."""

    ttl_s: float


class Counted(_Message, frozen=True, tag="counted"):
    """How many blocks a Delete, Stage or Lease found."""

    blocks: int
    epoch: int = 0


TargetRequest: TypeAlias = Join | Put | Get | Exist | Delete | Stage | Lease | Status | List
TargetReply: TypeAlias = (
    Challenge | Joined | Stored | Records | Existing | Counted | Report | Refused
)
