"""Every message of the node protocol, version 1.

A request and its reply have the same request id in their frames; replies may come in any order.
Keys are sent as one byte string, 16 bytes a key. Places are byte offsets of records in the
session's arena. Framing: `holdfast.wire.frame`. Bounds of fields: `holdfast.wire.fields`.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from holdfast.limits import LIST_KEYS_MAX, SEGMENT_BLOCKS
from holdfast.wire.fields import (
    ByTier,
    Chunks,
    Groups,
    Integer,
    ObservedList,
    PackedBytes,
    Places,
    Report,
    ShortBytes,
    Text,
    Trace,
)

PROTOCOL = 2


class _Message(msgspec.Struct, frozen=True, tag_field="type"):
    pass


class GroupHello(msgspec.Struct, frozen=True):
    """One of a model's further KV groups, in a `Hello`; the fields are those of the first group."""

    fingerprint: ShortBytes
    raw_bytes: Integer
    block_tokens: Integer
    attention: Text = "full"
    window: Integer = 0
    part: PackedBytes = b""
    element_bytes: Integer = 1


class Hello(_Message, frozen=True, tag="hello"):
    """First message of a connection: the peer's name and its namespace (fingerprint and domain).

    `raw_bytes` 0 with an empty fingerprint opens a session for reports only, such as `Status`.
    """

    protocol: Integer
    peer: Text
    fingerprint: ShortBytes = b""
    raw_bytes: Integer = 0
    """Length of a decoded payload of the namespace."""
    block_tokens: Integer = 0
    domain: Text = "default"
    description: Text = ""
    """The fingerprint as JSON, as in docs/reference/format.md; empty: not known."""
    part: PackedBytes = b""
    """Ranges of each payload that this session writes, a u32 offset and a u32 length each.

    Other sessions write the rest; empty: this session writes all of it.
    """
    publish: ShortBytes = b""
    """The secret that permits writes in the public domain."""
    element_bytes: Integer = 1
    """Width of one number in a payload in bytes; 1 if it is unknown."""
    named: bool = False
    """Whether an engine names the blocks one by one: each is placed and found by itself."""
    attention: Text = "full"
    window: Integer = 0
    """What a resume needs of the first KV group; the words are those of a fingerprint."""
    more_groups: Groups[GroupHello] = []
    """The other KV groups of the model. All share the domain and the arena."""


class Welcome(_Message, frozen=True, tag="welcome"):
    """The node's answer to a hello; with a namespace, the arena's descriptor comes with it."""

    protocol: Integer
    incarnation: Text
    domain_key: ShortBytes
    arena_bytes: Integer
    common_key: ShortBytes = b""
    """Key of the public domain; empty if there is none, or if the session is in it."""
    segment_blocks: Integer = SEGMENT_BLOCKS
    """Number of blocks of a chain that are placed together."""
    codec: Text = ""
    """A lossy codec that the domain asks for and a gate record permits; empty: none.

    The blocks of this session are exact. To have quantised ones, the client connects again with the
    fingerprint that names this codec and `codec_version`.
    """
    codec_version: Integer = 0
    exact_because: Text = ""
    """Why blocks stay exact although the domain asks for a codec; empty if it does not."""
    chunk_bytes: Integer = 0
    """Bytes of a chunk of the arena, the unit of page-locking; 0: this node grants no locks."""
    lockable_bytes: Integer = 0
    """Bytes of the arena that engines of the domain may lock; 0: the node's options forbid it."""
    lock_requested: bool = False
    """Whether the node's operator gave a size of memory to lock, and did not leave it at `auto`.

    Then engines lock memory also if their device does not by default.
    """


class Refused(_Message, frozen=True, tag="refused"):
    """The request cannot be served; `message` names value, limit and remedy."""

    message: Text


class Cover(_Message, frozen=True, tag="cover", omit_defaults=True):
    """Ask which blocks of a chain are held, and for a plan of how many to fetch.

    `tokens`: length of the whole prompt. 0: the chain is not to be computed now; the node answers,
    but neither logs a plan nor records a request. `have`: leading tokens in the engine's own cache.
    `limit_s`: longest time of a fetch. `plan`: number of an earlier answer for the same prompt,
    which this one replaces. `session`: name of the chain's session, for later hints. `deadline_s`:
    timeout for shared tiers, after which the answer leaves them out; 0: the tiers' own timeouts.
    `queued_tokens`: prefill tokens of other prompts that the engine computes first; `queued_pairs`:
    their token pairs, the sum of `new * (context + new/2)`. `to_load`: blocks by tier that the
    engine is about to fetch for other prompts.

    With several KV groups, or one that is not full attention, the answer is about tokens after
    which all groups can be resumed. Its numbers count blocks of as many tokens as the blocks of all
    groups divide.
    """

    keys: PackedBytes
    tokens: Integer = 0
    have: Integer = 0
    limit_s: float = 5.0
    plan: Integer = 0
    session: Text = ""
    common: PackedBytes = b""
    """Keys of the leading blocks in the public domain; empty: do not look there."""
    deadline_s: float = 0.0
    trace: Trace = ""
    """The engine's span of this request, as a `traceparent` of W3C Trace Context; empty: none."""
    queued_tokens: Integer = 0
    queued_pairs: float = 0.0
    to_load: ByTier[Integer] = {}
    more_keys: Groups[PackedBytes] = []
    """The chains of the other KV groups."""


class Covered(_Message, frozen=True, tag="covered"):
    """Leading blocks held, how many of them to use, and how many would come from each tier.

    The plan is to fetch the blocks up to `worth` that the engine does not have, within
    `deadline_s`; the first token is then expected after `expected_s`, and after `recompute_s`
    without a fetch (both 0: not known). `unanswered`: shared tiers that may hold more blocks, with
    the outcome `late` or `gone` of asking them.
    """

    blocks: Integer
    worth: Integer
    sources: ByTier[Integer]
    plan: Integer = 0
    deadline_s: float = 0.0
    expected_s: float = 0.0
    recompute_s: float = 0.0
    reason: Text = ""
    unanswered: ByTier[Text] = {}
    pending: Integer = 0
    """Leading blocks that are held or that a session is saving; of one group with full attention.

    For other sessions it is the number of blocks held.
    """


class Find(_Message, frozen=True, tag="find"):
    """Ask which of these blocks are held, each by itself, on whatever tier.

    Shared tiers are asked for at most `deadline_s` (0: the node's default).
    """

    keys: PackedBytes
    deadline_s: float = 0.0


class Found(_Message, frozen=True, tag="found"):
    """One byte for each key, 1 if the block is held.

    `unanswered`: shared tiers that may hold more of them, with the outcome `late` or `gone`.
    """

    held: PackedBytes
    unanswered: ByTier[Text] = {}


class Fetch(_Message, frozen=True, tag="fetch"):
    """Read the leading run of these blocks into the arena and lease it, to carry out `plan`.

    `group`: number of the KV group of the session.
    """

    keys: PackedBytes
    deadline_s: float
    plan: Integer = 0
    group: Integer = 0


class Fetched(_Message, frozen=True, tag="fetched"):
    """The verified blocks, one place each; `outcome` and `reason` tell why not all, if so."""

    lease: Integer
    places: Places
    sources: ByTier[Integer]
    outcome: Text
    reason: Text


class Release(_Message, frozen=True, tag="release"):
    """End a lease."""

    lease: Integer


class Released(_Message, frozen=True, tag="released"):
    """`valid` False: the lease had expired, so the copied bytes must not be used."""

    valid: bool


class Reserve(_Message, frozen=True, tag="reserve"):
    """Reserve slots for consecutive blocks of a chain, the first at `depth`, after `parent`.

    `segment` (8 bytes): segment of the first block, for placement in a pool. Sessions with a part
    get the same slots for the same blocks. `group`: number of the KV group of the session.
    """

    keys: PackedBytes
    parent: ShortBytes
    depth: Integer
    segment: ShortBytes = b""
    group: Integer = 0


class Reserved(_Message, frozen=True, tag="reserved"):
    """The reservation's number `ticket`, and a place per key.

    -1: the block is held already, no slot is free, or another session writes the same part of it.
    """

    ticket: Integer
    places: Places
    outcome: Text


class Commit(_Message, frozen=True, tag="commit"):
    """Publish the filled slots of a reservation, sealed if configured, with a retention class.

    A block that several sessions write is published with the commit of its last part.
    """

    ticket: Integer
    retention: Text = "session"


class Committed(_Message, frozen=True, tag="committed"):
    """The number of blocks that were published."""

    blocks: Integer


class Abort(_Message, frozen=True, tag="abort"):
    """Cancel a reservation; the engine no longer writes to its slots."""

    ticket: Integer


class Observed(_Message, frozen=True, tag="observed", omit_defaults=True):
    """Times that an engine measured, in batches; answered with Done.

    `steps`: tokens computed, tokens of context before them, seconds. `endings`: number of a plan,
    seconds until all fetched blocks were in the engine's pages, seconds until the first token; 0 if
    not measured. `not_followed`: number of a plan that was not carried out, the reason (a value of
    `errors.NotFollowed`), seconds until the first token, 0 if there was none. A plan is in one of
    the two lists. `prompts`, for the node's counters: tokens of a prompt that the engine computed
    or loaded, leading tokens in the engine's own cache, tokens loaded from the node by tier.

    More than `OBSERVED_MAX` entries in a list end the connection. Empty lists except `steps` are
    omitted, because nodes of earlier versions do not know all of them.
    """

    steps: ObservedList[tuple[float, float, float]]
    endings: ObservedList[tuple[Integer, float, float]] = []
    not_followed: ObservedList[tuple[Integer, Text, float]] = []
    prompts: ObservedList[tuple[Integer, Integer, ByTier[Integer]]] = []


class ListKeys(_Message, frozen=True, tag="list_keys"):
    """Ask for at most `limit` keys of the session's namespace that the node holds itself.

    `start`: 0, or the `next` of the last answer.
    """

    start: Integer = 0
    limit: Integer = LIST_KEYS_MAX


class ListedKeys(_Message, frozen=True, tag="listed_keys"):
    """A page of keys, 16 bytes each, in no particular order; it may be empty before the end.

    `next`: where the next page starts; 0 at the end.
    """

    keys: PackedBytes
    next: Integer = 0


class Prestage(_Message, frozen=True, tag="prestage", omit_defaults=True):
    """Hint: promote the held blocks of this chain to memory within `in_s` seconds.

    Shared tiers are asked for the other blocks, for at most `deadline_s` (0: the node's default).
    `group`, here and in other hints: number of the KV group of the session. `queued`: whether a
    request of this engine waits for its turn; `queued_tokens` and `queued_pairs`: the prefill that
    the engine does before, at least, as in `Cover`.
    """

    keys: PackedBytes
    in_s: float
    deadline_s: float = 0.0
    group: Integer = 0
    queued: bool = False
    queued_tokens: Integer = 0
    queued_pairs: float = 0.0


class Pin(_Message, frozen=True, tag="pin"):
    """Hint: promote the held blocks of this chain to memory and keep them there for `ttl_s`.

    The blocks are looked up and read for at most `deadline_s` (0: the node's default).
    """

    keys: PackedBytes
    ttl_s: float
    deadline_s: float = 0.0
    group: Integer = 0


class Sync(_Message, frozen=True, tag="sync", omit_defaults=True):
    """Write the held blocks of this chain to the durable tier; wait for at most `deadline_s`.

    The answer is `Hinted` with the number of leading blocks that its medium has flushed. `saving`:
    also wait for blocks that are not held, because an engine is saving them.
    """

    keys: PackedBytes
    deadline_s: float
    group: Integer = 0
    saving: bool = False


class Closed(_Message, frozen=True, tag="closed"):
    """Hint: the session has ended."""

    session: Text


class Returns(_Message, frozen=True, tag="returns"):
    """Hint: the session returns in `in_s` seconds; `keys`: its current chain, if not empty."""

    session: Text
    in_s: float
    keys: PackedBytes = b""
    group: Integer = 0


class Hinted(_Message, frozen=True, tag="hinted"):
    """The number of blocks a hint applies to; 0 if the session is unknown or no block is held."""

    blocks: Integer


class Done(_Message, frozen=True, tag="done"):
    """The request was carried out."""


class Lock(_Message, frozen=True, tag="lock"):
    """Ask to page-lock chunks of the arena; `chunks` empty: up to `most` that the node chooses.

    Sent only if the welcome offers locks. The engine locks a chunk only after the answer grants it.
    """

    chunks: Chunks = []
    most: Integer = 0


class Locked(_Message, frozen=True, tag="locked"):
    """The chunks that the engine may lock; their memory is populated, on huge pages if possible."""

    chunks: Chunks


class Unlock(_Message, frozen=True, tag="unlock"):
    """Chunks that the engine has unlocked, or will not lock; answered with Done.

    `failure`: why the engine cannot lock memory, for an operator; empty if it can.
    """

    chunks: Chunks
    failure: Text = ""


class AwaitRecall(_Message, frozen=True, tag="await_recall"):
    """Ask to be told when the node wants chunks back; one request of a session waits at a time."""


class Recall(_Message, frozen=True, tag="recall"):
    """Chunks that the engine must unlock within `within_s`; else the node ends the session."""

    chunks: Chunks
    within_s: float


class Status(_Message, frozen=True, tag="status"):
    """Ask for the node's status."""


class Members(_Message, frozen=True, tag="members"):
    """Ask for the members behind the shared tiers, and their health."""


class List(_Message, frozen=True, tag="list"):
    """Ask for the stored blocks, by fingerprint, domain and tier."""


class Plans(_Message, frozen=True, tag="plans"):
    """Ask for the recent plans, their estimates and how they ended."""


class Curve(_Message, frozen=True, tag="curve"):
    """Ask what other capacities would have hit of the node's recent requests."""


class Verify(_Message, frozen=True, tag="verify"):
    """Read and verify stored blocks for about `seconds`; drop those that fail.

    Begins at `start`, the `next` of the last answer. `rate`: maximum bytes a second, 0: unlimited.
    The work is divided into requests so that a caller can show progress and other requests are
    answered in between.
    """

    fingerprint: Text = ""
    start: Integer = 0
    seconds: float = 1.0
    rate: Integer = 0


class Drop(_Message, frozen=True, tag="drop", omit_defaults=True):
    """Drop stored blocks: those of one fingerprint (hex), or all for `*`.

    `step` "preview" drops nothing and is answered with the blocks that would be dropped.
    """

    fingerprint: Text
    step: Literal["", "preview"] = ""


class Domains(_Message, frozen=True, tag="domains", omit_defaults=True):
    """List domains and their epochs; begin a new epoch, retire old ones, or erase a domain.

    `step`, for `retire` and `erase`: "preview" changes nothing and is answered with the blocks that
    would become unreadable. Only "confirmed" retires data keys that blocks are sealed with.
    """

    action: Literal["list", "rotate", "retire", "erase"] = "list"
    name: Text = ""
    step: Literal["", "preview", "confirmed"] = ""


class ReplaceMedium(_Message, frozen=True, tag="replace_medium", omit_defaults=True):
    """Detach a tier's drive, or use the one at `path` (absolute; empty: the tier's own path).

    `step` "preview" changes nothing; every answer has the copies that are forgotten.
    """

    action: Literal["detach", "replace"]
    tier: Text
    path: Text = ""
    step: Literal["", "preview"] = ""


class ReportReply(_Message, frozen=True, tag="report"):
    """Plain data, the answer to every request of an operator."""

    data: Report


Request: TypeAlias = (
    Hello
    | Cover
    | Find
    | Fetch
    | Release
    | Reserve
    | Commit
    | Abort
    | ListKeys
    | Prestage
    | Pin
    | Sync
    | Closed
    | Returns
    | Observed
    | Lock
    | Unlock
    | AwaitRecall
    | Status
    | Members
    | List
    | Plans
    | Curve
    | Verify
    | Drop
    | Domains
    | ReplaceMedium
)
Reply: TypeAlias = (
    Welcome
    | Refused
    | Covered
    | Found
    | Fetched
    | Released
    | Reserved
    | Committed
    | ListedKeys
    | Hinted
    | Locked
    | Recall
    | Done
    | ReportReply
)
