"""A session: one fingerprint in one domain, in terms of tokens and blocks.

A program uses the same `Session` whether the store is embedded in its process or belongs to a node
behind a Unix socket. It computes keys and checks arguments; a `SessionBackend` does the rest:
`holdfast.store.session` for an embedded store, `holdfast.client.session` for a node.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from holdfast.blocks.fingerprint import Fingerprint
from holdfast.blocks.key import Chain, Tokens, refuse_mask
from holdfast.blocks.layout import LayoutSlice
from holdfast.blocks.namespace import Namespace
from holdfast.blocks.payload_part import SliceCopy
from holdfast.errors import BlockError, Outcome
from holdfast.limits import LIST_KEYS_MAX
from holdfast.policy.retention import Retention

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Blocks: TypeAlias = "npt.NDArray[np.generic]"
"""Block payloads, one a row: any dtype and shape whose rows have `layout.raw_bytes` bytes.

In a session of a slice, rows have `layout_slice.nbytes` bytes.

A contiguous numpy array, or a torch tensor on the CPU; its memory is used in place.
"""

FETCH_S = 5.0
"""Default deadline of a fetch, in seconds."""
LOOK_S = 1.0
"""Maximum duration of a lookup on shared tiers, in seconds."""
LOOKUP_SHARE = 0.5
"""Maximum share of a fetch's deadline for lookups on shared tiers."""
PIN_S = 60.0
"""Default deadline of a pin, which reads from lower tiers, in seconds."""
PIN_TTL_S_MAX = 3_600.0
"""Maximum time for which a pin keeps blocks in memory, in seconds: an hour."""
ROWS_MAX = 1 << 48
"""Maximum start of a page of keys."""
SYNC_S = 60.0
"""Default deadline of a sync, which writes to the durable tier, in seconds."""
SECONDS_MAX = 86_400.0
"""Maximum deadline and maximum time of a hint, in seconds: a day."""
NAME_CHARS_MAX = 256
"""Maximum length of a session's name."""

NOTHING_HELD = "nothing is held here"

RECOVERING = "recovery runs and may find more blocks"
"""What a reason adds if blocks are missing while a store recovers what an earlier process left."""
"""Reason of a fetch of a context of which the store knows no block."""

_NO_ANSWER = {Outcome.LATE: "did not answer in time", Outcome.GONE: "cannot be reached"}


class Landed(NamedTuple):
    """Result of a fetch: leading tokens and blocks copied, and blocks from each tier.

    `outcome` and `reason` tell why blocks are missing, if any are.
    """

    tokens: int
    blocks: int
    sources: dict[str, int]
    outcome: Outcome
    reason: str


class KeyPage(NamedTuple):
    """One page of the keys of a namespace, 16 bytes each, in no particular order.

    `next`: where the next page starts; 0 at the end. A page may be empty before the end.
    """

    keys: list[bytes]
    next: int


class SessionBackend(Protocol):
    """The store's side of a session, in terms of chains and rows of bytes.

    `rows`: one memoryview of `slice_copy.row_bytes` bytes for each block of a chain. A backend
    reads or writes them in the caller's thread only, and keeps no reference. Counts are in blocks.
    Every method except `fetch` raises StoreClosedError if the store is closed, and NodeGoneError if
    its node cannot be reached.
    """

    namespace: Namespace
    slice_copy: SliceCopy
    domain_key: bytes
    segment_blocks: int

    @abstractmethod
    def cover(self, keys: Sequence[bytes], deadline_s: float) -> int:
        """Return how many leading blocks are held."""

    @abstractmethod
    def save(self, chain: Chain, rows: Sequence[memoryview], retention: Retention) -> int:
        """Save a chain's blocks; return how many are new."""

    @abstractmethod
    def fetch(self, chain: Chain, rows: Sequence[memoryview], deadline_s: float) -> Landed:
        """Copy the longest held prefix into the leading rows."""

    @abstractmethod
    def list_keys(self, start: int, limit: int) -> KeyPage:
        """Return a page of the keys of the blocks that this store holds itself."""

    def follow(self, session: str, keys: Sequence[bytes]) -> None:
        """Record that a chain belongs to a session."""

    @abstractmethod
    def closed(self, session: str) -> int:
        """Record that a session ended; return how many of its blocks are held."""

    @abstractmethod
    def returns(self, session: str, in_s: float) -> int:
        """Record that a session returns; return how many of its blocks are held."""

    @abstractmethod
    def prestage(self, keys: Sequence[bytes], in_s: float, deadline_s: float) -> int:
        """Promote the held blocks of a chain to memory within `in_s`; return their number."""

    @abstractmethod
    def sync(self, keys: Sequence[bytes], deadline_s: float) -> int:
        """Write the held blocks of a chain to the durable tier; return how many it keeps."""

    @abstractmethod
    def pin(self, keys: Sequence[bytes], ttl_s: float, deadline_s: float) -> int:
        """Keep the held blocks of a chain in memory for `ttl_s`; return their number."""


class Session:
    """Saves and fetches full blocks of one namespace; ignores trailing tokens of a partial block.

    A session of a `LayoutSlice` saves and fetches this part of each portable block, for example the
    heads of one tensor-parallel rank. Its rows have the bytes of the slice.

    Every method except `fetch` raises StoreClosedError if the store is closed, and NodeGoneError if
    its node cannot be reached; `fetch` returns the outcome GONE instead. Deadlines and other times
    are in seconds.
    """

    def __init__(self, backend: SessionBackend) -> None:
        self._backend = backend
        self.namespace = backend.namespace
        self._row_bytes = backend.slice_copy.row_bytes

    def chain(self, tokens: Tokens) -> Chain:
        """Return the keys of the full blocks of a context."""
        namespace, backend = self.namespace, self._backend
        chain = Chain(
            backend.domain_key,
            namespace.fingerprint,
            namespace.block_tokens,
            segment_blocks=backend.segment_blocks,
        )
        chain.extend(tokens)
        return chain

    def cover(self, tokens: Tokens, deadline_s: float = LOOK_S) -> int:
        """Return how many leading tokens are held, on any tier.

        Blocks that are not in this store's index are looked up on shared tiers, for at most
        `deadline_s` and `LOOK_S`. If they do not answer in time, they are left out of the result.
        """
        _check_seconds_argument("cover: deadline_s", deadline_s)
        return self._tokens(self._backend.cover(self.chain(tokens).keys, deadline_s))

    def save(self, tokens: Tokens, blocks: Blocks, retention: Retention = Retention.SESSION) -> int:
        """Save the KV state of a context, one row per full block; return how many blocks are new.

        Raises BlockError if rows or their bytes do not fit the tokens and the layout. Blocks for
        which no slot is free are not saved. `blocks` is read in the caller's thread only, so a save
        that an exception interrupts publishes nothing that the caller may change afterwards.

        A session of a slice saves its part of each block, and the sessions of other slices theirs,
        in any order and from any process. A block is new, and readers find it, when its last part
        is saved. If that does not happen within 30 s, or a process ends in the middle of a save,
        the block is not saved. What ranks hold copies of is saved by the first of them.
        """
        if not isinstance(retention, Retention):
            raise BlockError(f"save: retention is {retention!r}; pass a holdfast Retention")
        chain = self.chain(tokens)
        rows = self._rows(blocks, len(chain))
        return self._backend.save(chain, rows, retention) if self._backend.slice_copy.writes else 0

    def fetch(self, tokens: Tokens, into: Blocks, deadline_s: float = FETCH_S) -> Landed:
        """Copy the longest held prefix into the leading rows of `into`; other rows do not change.

        One exception: if the lease on the blocks ends while they are copied, the result has 0
        blocks (LATE or GONE), and the rows of that prefix may have changed. The same holds if the
        call raises, and if the node goes away during the copy. Use `blocks` rows, and no others.
        `into` has one row per full block of `tokens`, contiguous and writable. It is written in
        the caller's thread only, so never after this method has returned or raised. Blocks that
        are not in this store's index are looked up on shared tiers, for at most half of the
        deadline and `LOOK_S`; the rest of the deadline is for the fetch. If the tiers do not
        answer, the blocks of the index are fetched, and the outcome is LATE or GONE. It is also
        GONE if the store is closed or its node cannot be reached. A node fetches for at most 60 s.
        """
        _check_seconds_argument("fetch: deadline_s", deadline_s)
        chain = self.chain(tokens)
        rows = self._rows(into, len(chain))
        if rows and rows[0].readonly:
            raise BlockError("fetch: `into` is read-only; pass memory that can be written to")
        return self._backend.fetch(chain, rows, deadline_s)

    def list_keys(self, start: int = 0, limit: int = LIST_KEYS_MAX) -> KeyPage:
        """Return a page of the keys of this session's namespace, in no particular order.

        Begin with `start` 0, and go on with the `next` of each page until it is 0. A block that is
        held all the while is listed once; one that is saved or evicted meanwhile may be left out,
        or listed twice. Blocks that only shared tiers hold are not listed. At most `limit` keys,
        which is from 1 to 4,096.
        """
        _check_number_argument("list_keys: start", start, 0, ROWS_MAX)
        _check_number_argument("list_keys: limit", limit, 1, LIST_KEYS_MAX)
        return self._backend.list_keys(start, limit)

    def follow(self, tokens: Tokens, session: str) -> None:
        """Record that this context belongs to a session, which `closed` and `returns` refer to."""
        _check_name_argument("follow: session", session)
        self._backend.follow(session, self.chain(tokens).keys)

    def closed(self, session: str) -> int:
        """Hint: a session ended; return how many of its blocks are held."""
        _check_name_argument("closed: session", session)
        return self._backend.closed(session)

    def returns(self, session: str, in_s: float) -> int:
        """Hint: a session returns in `in_s` seconds; return how many of its blocks are held.

        Other blocks are looked up on shared tiers, for at most `LOOK_S`.
        """
        _check_name_argument("returns: session", session)
        _check_seconds_argument("returns: in_s", in_s)
        return self._backend.returns(session, in_s)

    def prestage(self, tokens: Tokens, in_s: float = 0.0, deadline_s: float = LOOK_S) -> int:
        """Hint: promote the held blocks of a context to memory in `in_s`; return their tokens.

        Other blocks are looked up on shared tiers, for at most `deadline_s` and `LOOK_S`.
        """
        _check_seconds_argument("prestage: in_s", in_s)
        _check_seconds_argument("prestage: deadline_s", deadline_s)
        return self._tokens(self._backend.prestage(self.chain(tokens).keys, in_s, deadline_s))

    def pin(self, tokens: Tokens, ttl_s: float, deadline_s: float = PIN_S) -> int:
        """Keep the held blocks of a context in memory for `ttl_s`; return their tokens.

        `ttl_s` is at most 3,600. Waits up to `deadline_s` until the blocks are read, also from
        shared tiers. A node waits at most `PIN_S`.
        """
        _check_seconds_argument("pin: ttl_s", ttl_s, PIN_TTL_S_MAX)
        _check_seconds_argument("pin: deadline_s", deadline_s)
        return self._tokens(self._backend.pin(self.chain(tokens).keys, ttl_s, deadline_s))

    def sync(self, tokens: Tokens, deadline_s: float = SYNC_S) -> int:
        """Write the held blocks of a context to the durable tier; return how many tokens it keeps.

        Returns when the tier's medium has flushed them, or at the deadline (1 s later if a flush
        hangs), or at once if a flush fails; a node waits for at most `SYNC_S`. The counted tokens
        survive a crash and a loss of power, until the tier evicts them. Raises BlockError, or
        RefusedError by a node, if no tier can flush its records.
        """
        _check_seconds_argument("sync: deadline_s", deadline_s)
        return self._tokens(self._backend.sync(self.chain(tokens).keys, deadline_s))

    def _tokens(self, blocks: int) -> int:
        return blocks * self.namespace.block_tokens

    def _rows(self, given: Blocks, count: int) -> list[memoryview]:
        """Return a view of each block in the caller's memory; raise BlockError for a wrong size."""
        blocks = _as_array(given)
        if blocks.ndim == 0 or len(blocks) != count:
            have = len(blocks) if blocks.ndim else "no rows of"
            raise BlockError(f"{have} blocks given, but the tokens fill {count}")
        if not blocks.flags.c_contiguous:
            raise BlockError("blocks must be contiguous; pass numpy.ascontiguousarray(blocks)")
        if blocks.dtype.hasobject:
            raise BlockError(
                f"blocks are of dtype {blocks.dtype}, which holds references; pass their bytes, "
                "in an array of numbers"
            )
        size = self._row_bytes
        if count and blocks.nbytes != count * size:
            raise BlockError(f"a block has {blocks.nbytes // count} bytes, the layout says {size}")
        if not count:
            return []
        flat = blocks.reshape(-1).view("u1").data
        return [flat[i * size : (i + 1) * size] for i in range(count)]


def nothing_held(*, recovering: bool) -> str:
    """Return the reason of a fetch of which nothing is held."""
    return f"{NOTHING_HELD}; {RECOVERING}" if recovering else NOTHING_HELD


def name_unanswered(landed: Landed, unanswered: Mapping[str, Outcome]) -> Landed:
    """Return the result of a fetch before which these shared tiers did not answer a lookup.

    They may hold the next block, so OK and MISS become LATE or GONE, and the reason names them.
    """
    if not unanswered or landed.outcome not in (Outcome.OK, Outcome.MISS):
        return landed
    outcome = Outcome.LATE if Outcome.LATE in unanswered.values() else Outcome.GONE
    tiers = ", ".join(f"{tier} {_NO_ANSWER[said]}" for tier, said in unanswered.items())
    return landed._replace(outcome=outcome, reason=f"{landed.reason}; {tiers}")


def check_session(fingerprint: Any, domain: Any, layout_slice: Any) -> None:  # noqa: ANN401  # what a caller passes
    """Raise BlockError unless the arguments of `session` have the right types and fit together."""
    if not isinstance(fingerprint, Fingerprint):
        raise BlockError(
            f"session: fingerprint is of type {type(fingerprint).__name__}; pass a "
            "holdfast.Fingerprint"
        )
    if not isinstance(domain, str):
        raise BlockError(
            f"session: domain is of type {type(domain).__name__}; pass the domain's name"
        )
    if layout_slice is None:
        return
    if not isinstance(layout_slice, LayoutSlice):
        raise BlockError(
            f"session: layout_slice is of type {type(layout_slice).__name__}; pass a slice of the "
            "fingerprint's layout, such as layout.rank(0, 2)"
        )
    if layout_slice.layout != fingerprint.representation:
        raise BlockError(
            "session: layout_slice is a slice of another layout than the fingerprint's; pass a "
            "slice of fingerprint.representation, which must be portable"
        )


def _check_seconds_argument(what: str, seconds: Any, most: float = SECONDS_MAX) -> None:  # noqa: ANN401  # what a caller passes
    """Raise BlockError unless the argument is a number of seconds from 0 to `most`."""
    if isinstance(seconds, bool) or not isinstance(seconds, Real):
        raise BlockError(
            f"{what} is of type {type(seconds).__name__}; pass a number of seconds from 0 to "
            f"{most:g}"
        )
    check_seconds(what, float(seconds), most)


def _check_number_argument(what: str, value: Any, least: int, most: int) -> None:  # noqa: ANN401  # what a caller passes
    """Raise BlockError unless the argument is an integer within the bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise BlockError(f"{what} is {value!r}; pass an integer from {least} to {most}")


def check_seconds(what: str, seconds: float, most: float) -> None:
    """Raise BlockError unless `seconds` is from 0 to `most`."""
    if not 0 <= seconds <= most:
        raise BlockError(f"{what}: {seconds:g} is not from 0 to {most:g} seconds")


def _check_name_argument(what: str, name: Any) -> None:  # noqa: ANN401  # what a caller passes
    """Raise BlockError unless the argument is a string that can name a session."""
    if not isinstance(name, str):
        raise BlockError(f"{what} is of type {type(name).__name__}; pass the session's name")
    check_name(name)


def check_name(session: str) -> None:
    """Raise BlockError for an invalid session name."""
    if not 0 < len(session) <= NAME_CHARS_MAX:
        raise BlockError(
            f"session: a name of {len(session)} characters is not from 1 to {NAME_CHARS_MAX}"
        )


def _as_array(blocks: Blocks) -> npt.NDArray[np.generic]:
    """Return blocks as a numpy array over the same memory; raise BlockError for other types."""
    import numpy as np

    torch = sys.modules.get("torch")  # a caller with a tensor has imported it
    if torch is not None and isinstance(blocks, torch.Tensor):
        tensor: Any = blocks
        try:
            if not tensor.is_contiguous():
                raise BlockError("blocks must be contiguous; pass blocks.contiguous()")
            # As bytes, because numpy has no bfloat16.
            array: npt.NDArray[np.generic] = tensor.detach().view(torch.uint8).numpy()
        except (RuntimeError, TypeError, NotImplementedError, AttributeError) as error:
            raise BlockError(
                f"blocks are a torch tensor on {tensor.device}, {tensor.layout}, {tensor.dtype}, "
                f"whose memory cannot be used: {error}; pass a dense tensor on the CPU"
            ) from error
        return array
    if isinstance(blocks, np.ndarray):
        refuse_mask("blocks", blocks)
        return np.asarray(blocks)  # a subclass may redefine indexing
    raise BlockError(
        f"blocks are of type {type(blocks).__name__}; pass a numpy array or a torch tensor on the "
        "CPU with one row for each block, for example numpy.stack(blocks)"
    )
