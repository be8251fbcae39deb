"""Every message of the node protocol, version 1.

A request and its reply carry the same request id in their frames; replies may come in any order.
Keys travel as one byte string, 16 bytes a key. Places are byte offsets of records in the session's
arena. `holdfast.wire.frame` has the bytes around a message.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec

from holdfast.limits import OBSERVED_MAX, SEGMENT_BLOCKS

PROTOCOL = 1

T = TypeVar("T")
Told: TypeAlias = Annotated[list[T], msgspec.Meta(max_length=OBSERVED_MAX)]
"""A list whose length is checked before anything in it is read."""


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    pass


class Hello(_Message, frozen=True, tag="hello"):
    """First message of a connection: who speaks, and in which world (fingerprint and domain).

    `payload_bytes` 0 with an empty fingerprint opens a session for `Status`, `List` and such only.
    """

    protocol: int
    peer: str
    fingerprint: bytes = b""
    payload_bytes: int = 0
    block_tokens: int = 0
    domain: str = "default"
    description: str = ""
    publish: bytes = b""
    """What lets a peer write in the public domain."""


class Welcome(_Message, frozen=True, tag="welcome"):
    """The node's answer. The arena's descriptor comes along where a world was named."""

    protocol: int
    incarnation: str
    domain_key: bytes
    arena_bytes: int
    common_key: bytes = b""
    """The key of the public domain, which all may read; empty: there is none, or this is it."""
    segment_blocks: int = SEGMENT_BLOCKS
    """How many blocks of a chain are placed together."""


class Refused(_Message, frozen=True, tag="refused"):
    """The request cannot be served; `message` names value, limit and remedy."""

    message: str


class Cover(_Message, frozen=True, tag="cover"):
    """What of this chain is held, and how much of that is worth fetching?

    `tokens`: of the whole prompt; 0, not known, makes everything held worth fetching that can be
    there within `limit_s`. `have`: leading tokens that the engine has already. `plan`: number of
    an earlier answer for the same prompt, which this one replaces. `session`: whose chain it is,
    for later hints. `deadline_s`: how long to wait for shared tiers; then the answer is what is
    known without them. 0: as long as they may take.
    """

    keys: bytes
    tokens: int = 0
    have: int = 0
    limit_s: float = 5.0
    plan: int = 0
    session: str = ""
    common: bytes = b""
    """Names of the leading blocks in the public domain, where a peer wants them looked for."""
    deadline_s: float = 0.0


class Covered(_Message, frozen=True, tag="covered"):
    """Leading blocks held, how many of them to use, and how many would come from each tier.

    Blocks up to `worth` that the engine does not have are worth fetching, within `deadline_s`; the
    first token is then expected after `expected_s`, against `recompute_s` (both 0: not known).
    """

    blocks: int
    worth: int
    sources: dict[str, int]
    plan: int = 0
    deadline_s: float = 0.0
    expected_s: float = 0.0
    recompute_s: float = 0.0
    reason: str = ""


class Fetch(_Message, frozen=True, tag="fetch"):
    """Bring the leading run of these blocks into the arena and lease it; `plan` asked for it."""

    keys: bytes
    deadline_s: float
    plan: int = 0


class Fetched(_Message, frozen=True, tag="fetched"):
    """The blocks that landed, verified: one place each. `outcome` says why not all, if so."""

    lease: int
    places: list[int]
    sources: dict[str, int]
    outcome: str
    reason: str


class Release(_Message, frozen=True, tag="release"):
    """The reader is done with a lease."""

    lease: int


class Released(_Message, frozen=True, tag="released"):
    """`valid` False: the lease had ended before, so whatever was copied must not be used."""

    valid: bool


class Reserve(_Message, frozen=True, tag="reserve"):
    """Slots for consecutive blocks of a chain, the first at `depth` behind `parent`.

    `segment` (8 bytes) is that of the first block, for placement in a pool.
    """

    keys: bytes
    parent: bytes
    depth: int
    segment: bytes = b""


class Reserved(_Message, frozen=True, tag="reserved"):
    """One place per key; -1 where the block is held already or there is no room."""

    ticket: int
    places: list[int]
    outcome: str


class Commit(_Message, frozen=True, tag="commit"):
    """The slots of a ticket are filled: seal and publish them, to be kept for so long."""

    ticket: int
    retention: str = "session"


class Committed(_Message, frozen=True, tag="committed"):
    """How many blocks were published."""

    blocks: int


class Abort(_Message, frozen=True, tag="abort"):
    """The slots of a ticket will not be filled, and nobody writes to them any more."""

    ticket: int


class Observed(_Message, frozen=True, tag="observed"):
    """What an engine saw of its own speed, in batches; answered with Done.

    `steps`: tokens computed, the context in front of them, seconds. `endings`: number of a plan,
    seconds until all that was fetched was in the engine's pages, seconds until the first token;
    0 where that was not seen. More of either than `OBSERVED_MAX` ends the connection.
    """

    steps: Told[tuple[float, float, float]]
    endings: Told[tuple[int, float, float]] = []


class Prestage(_Message, frozen=True, tag="prestage"):
    """Have what is held of this chain in memory in `in_s` seconds."""

    keys: bytes
    in_s: float


class Pin(_Message, frozen=True, tag="pin"):
    """Bring what is held of this chain to memory and keep it there for `ttl_s`."""

    keys: bytes
    ttl_s: float


class Closed(_Message, frozen=True, tag="closed"):
    """This session is over."""

    session: str


class Returns(_Message, frozen=True, tag="returns"):
    """This session comes back in `in_s` seconds; `keys`, if any, are its chain by now."""

    session: str
    in_s: float
    keys: bytes = b""


class Hinted(_Message, frozen=True, tag="hinted"):
    """How many blocks a hint is about; 0 where the session is not known or nothing is held."""

    blocks: int


class Done(_Message, frozen=True, tag="done"):
    """The request was carried out."""


class Status(_Message, frozen=True, tag="status"):
    """How is the node?"""


class Members(_Message, frozen=True, tag="members"):
    """Who is behind the shared tiers, and how are they?"""


class List(_Message, frozen=True, tag="list"):
    """What is stored, by fingerprint, domain and tier?"""


class Plans(_Message, frozen=True, tag="plans"):
    """What was planned lately, from which estimates, and how did it turn out?"""


class Verify(_Message, frozen=True, tag="verify"):
    """Read and verify what is stored for about `seconds`; drop what fails.

    Begins at `start`, a number from the last answer's `next`; at most `rate` bytes a second, 0 for
    as fast as it goes. So that whoever asks can show progress, and others are answered in between.
    """

    fingerprint: str = ""
    start: int = 0
    seconds: float = 1.0
    rate: int = 0


class Drop(_Message, frozen=True, tag="drop"):
    """Forget stored blocks: those of one fingerprint (hex), or all for `*`."""

    fingerprint: str


class Domains(_Message, frozen=True, tag="domains"):
    """Show domains and their epochs; or begin another epoch, drop old ones, or erase it all."""

    action: Literal["list", "rotate", "retire", "erase"] = "list"
    name: str = ""


class Report(_Message, frozen=True, tag="report"):
    """Plain data answering Status, Members, List, Plans, Verify, Drop and Domains."""

    data: dict[str, object]


Request: TypeAlias = (
    Hello
    | Cover
    | Fetch
    | Release
    | Reserve
    | Commit
    | Abort
    | Prestage
    | Pin
    | Closed
    | Returns
    | Observed
    | Status
    | Members
    | List
    | Plans
    | Verify
    | Drop
    | Domains
)
Reply: TypeAlias = (
    Welcome | Refused | Covered | Fetched | Released | Reserved | Committed | Hinted | Done | Report
)
