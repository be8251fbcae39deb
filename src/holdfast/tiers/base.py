"""The tier interface: reserve, write, read and free records, and recover them after a restart.

A tier stores *records* (envelope header, payload, tag, padding to 4 KiB) at *places* it chooses. It
reads only the 128-byte header and leaves the choice of records to the store. A codec shortens
payloads, so records of one namespace have different lengths; none is longer than a slot
(`Namespace.slot_bytes`).
`holdfast.testing.tier_contract` tests the promises of `LocalTier`, and `shared_tier_contract` those
of `SharedTier`, `AnsweringTier`, `Reachable`, `Queryable`, `Indexed` and `Expiring`; a vendor
certifies a tier with one subclass of either. The tests of Holdfast's own tiers cover the other
protocols.

Ownership: the caller keeps the buffers it passes. A tier neither uses nor changes a buffer after
the call returns, except that `write` may update the 16-byte mark of the records it is given.
Threads: every method may be called from any thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, NewType, Protocol, runtime_checkable

import msgspec

from holdfast.blocks.envelope import Header
from holdfast.blocks.key import SEGMENT_BYTES
from holdfast.blocks.namespace import Namespace
from holdfast.errors import Outcome
from holdfast.status import MemberStatus

Place = NewType("Place", int)
"""Location of a record on a tier: a number >= 0 with a meaning to this tier only."""

NOWHERE = Place(-1)
"""No place: the block is not on this tier, or the tier is full."""


class DroppedBlock(NamedTuple):
    """A block that the tier evicted. The caller removes its place from the index before any reuse.

    Key and namespace are those of the record's header. The same key in another namespace is
    another block.
    """

    key: bytes
    place: Place
    namespace: Namespace


class Candidate(NamedTuple):
    """A record that a tier evicts next, if it needs room: its key, place and namespace."""

    key: bytes
    place: Place
    namespace: Namespace


class ReservedPlaces(NamedTuple):
    """Result of `reserve`: a place per requested size (NOWHERE if none), and the evicted blocks."""

    places: list[Place]
    dropped: list[DroppedBlock]


class TierPut(NamedTuple):
    """One record to write: its reserved place and the complete, packed record, no byte more."""

    place: Place
    record: memoryview


class TierGet(NamedTuple):
    """One record to read: its place, its key, an aligned buffer, its namespace.

    The buffer is at least as long as the record; a buffer of a slot's size always is. The record is
    at its start, and the rest is undefined. A record that is longer than the buffer is a MISS.
    `is_use`: False if the record is read to be moved or checked, so that a tier which evicts what
    was not used lately does not take the read for a use.
    """

    place: Place
    key: bytes
    into: memoryview
    namespace: Namespace
    is_use: bool = True


class SurvivingRecord(NamedTuple):
    """A record that a tier holds from an earlier process, and its place."""

    header: Header
    place: Place


class TierUsage(msgspec.Struct, frozen=True):
    """Usage of a tier in bytes and records, and its counters since start.

    `writes_stopped`: why the tier takes no new records for now, as words that follow "writes
    stopped"; empty while it does. `away`: why its medium cannot be used, as words that follow
    "away"; empty while it can. `replaced`: when its medium was replaced, as words that follow
    "replaced"; empty if it was not. `losses`: how often the tier lost its medium. `rebuilt`:
    records computed from others of their row; `parity_bytes`: bytes of the records that make that
    possible, a part of `written_bytes`. `requests`: requests to a medium that is paid by them, by
    verb; `request_dollars`: their list price.
    """

    capacity_bytes: int
    used_bytes: int
    records: int
    read_bytes: int = 0
    written_bytes: int = 0
    failures: int = 0
    writes_stopped: str = ""
    rebuilt: int = 0
    parity_bytes: int = 0
    away: str = ""
    replaced: str = ""
    losses: int = 0
    requests: dict[str, int] = {}
    request_dollars: float = 0.0


class Tier(Protocol):
    """The methods that local and shared tiers have in common.

    The module's docstring states the rules for ownership and threads.
    """

    name: str

    def write(self, batch: Sequence[TierPut]) -> list[Outcome]:
        """Write records to their places; return OK, FULL, GONE or CORRUPT for each.

        A shared tier also returns LATE, if it had no answer by its deadline. A record is readable
        after OK.
        """
        ...

    def read(self, batch: Sequence[TierGet]) -> list[Outcome]:
        """Read records into their buffers; return an outcome for each.

        OK, MISS (record not held) or GONE (I/O error, or no server reached); a shared tier also
        LATE. OK means only that the tier returned the bytes at the place; the caller verifies them.
        """
        ...

    def usage(self) -> TierUsage:
        """Return current usage and counters."""
        ...

    def close(self) -> None:
        """Write state that must survive and release the medium. Later calls return GONE."""
        ...


@runtime_checkable
class LocalTier(Tier, Protocol):
    """A tier that only this store writes to: the store reserves and frees its places.

    A place whose `write` failed is free again and holds nothing. A record of another length than
    was reserved is CORRUPT.
    """

    def reserve(self, sizes: Sequence[int]) -> ReservedPlaces:
        """Allocate places for records of these sizes (bytes, multiples of 4 KiB).

        Does no I/O, so the store may call it under its lock. A size of 0, and one that the tier
        cannot hold, now or ever, gets NOWHERE. A reserved place holds nothing until it is written.
        """
        ...

    def free(self, places: Sequence[Place]) -> None:
        """Release these places. A later read of one is a MISS or another record, never an error."""
        ...

    def survivors(self) -> Iterator[SurvivingRecord]:
        """Yield the records of an earlier process, oldest first; none on a volatile tier.

        Called once, after construction, while the tier already serves other calls. The place of a
        record is given to no other record before the caller takes the next one.
        """
        ...


@runtime_checkable
class Volatile(LocalTier, Protocol):
    """A tier whose contents are lost with the process (memory); writes cause no wear.

    A copy here does not count as persisted: a pending write to a lower tier still happens. Blocks
    promoted from lower tiers are offered to it.
    """

    volatile: ClassVar[Literal[True]]


@runtime_checkable
class NamesCandidates(LocalTier, Protocol):
    """A tier that names the records which it evicts next, so that a store can move them before."""

    def candidates(self, nbytes: int) -> list[Candidate]:
        """Return the records that the tier evicts for `nbytes` more, the next one first.

        Empty while so much fits beside all records; may name some more. Records that cannot be
        evicted now are not named. Only reads state, so the store may call it at any time. The
        records stay readable until a `reserve` evicts them; what is freed, written or read
        meanwhile may change the answer.
        """
        ...


@runtime_checkable
class Erasable(LocalTier, Protocol):
    """A tier whose medium keeps the bytes of freed records, and that can overwrite them."""

    def wipe(self, survivor: SurvivingRecord) -> None:
        """Overwrite a survivor's record; call it before taking the next one from `survivors`.

        If the write fails, the record stays as it is and a failure of the medium is counted.
        """
        ...


@runtime_checkable
class PrefersBatches(Tier, Protocol):
    """A tier that writes the records of a batch together, best about `batch_bytes` of them.

    0 bytes: no preference. `batch_wait_s`: time in seconds for which a store may keep a smaller
    batch back, so that more blocks join it; 0: none. Both stay as they are.
    """

    batch_bytes: int
    batch_wait_s: float


@runtime_checkable
class StopsWrites(LocalTier, Protocol):
    """A tier that stops to take records after its medium failed, and tries again by itself."""

    def accepts_writes(self) -> bool:
        """Return whether the tier would write a record now; fast, no side effects.

        While it returns False, a store prepares no writes, and keeps in mind what is to be written.
        """
        ...


@runtime_checkable
class LosesRecords(Tier, Protocol):
    """A tier that may lose many records at once, and knows which places they had."""

    def lost(self) -> Callable[[Place], bool] | None:
        """Return a test for places that lost records since the last call; None if none did.

        The test may give false positives, whose blocks are written again.
        """
        ...


@runtime_checkable
class Replaceable(LocalTier, LosesRecords, Protocol):
    """A local tier whose medium may go away, and be replaced, while the tier is open.

    While it is away, reads and writes return GONE and `reserve` has no places. A place on a former
    medium is never one on a later medium: a read of it is a MISS, and `free` ignores it.
    """

    def detach(self) -> None:
        """Release the medium, so that it can be taken out. The tier is away until `replace`.

        Another medium that appears at the tier's path is used without `replace`.
        """
        ...

    def replace(self, path: str = "") -> None:
        """Use the medium at `path`; empty: at the present path. The former one is released.

        Raises ConfigError, FormatError or BusyError if the medium cannot be used: it holds foreign
        data, for example. If that is known before the former medium is released, nothing changes.
        """
        ...

    def medium(self) -> bytes:
        """Return the identity of the medium, the same whenever it is in use; empty while away."""
        ...

    def has_survivors(self) -> bool:
        """Return whether the medium was opened again, and `survivors` not called since.

        False until `lost` has told of the loss of the former medium.
        """
        ...


@runtime_checkable
class RecordsFrees(LocalTier, Protocol):
    """A tier that records freed places on its medium now and then, and at once on request."""

    def record_frees(self) -> bool:
        """Record all places freed so far: after a crash their records are no survivors.

        Returns False if the medium failed, or not all survivors were taken yet.
        """
        ...


@runtime_checkable
class Flushable(Tier, Protocol):
    """A tier whose medium keeps records through a loss of power, once they are flushed."""

    def flush(self, places: Sequence[Place]) -> list[bool]:
        """Flush what was written before the call; return for each place whether its record is safe.

        A record is safe if it is on the medium. One that was written before a flush that failed is
        never safe again: the medium may have dropped it, and a later flush does not tell. The
        caller writes it again, to another place. A shared tier, which has no places, leaves it out
        of its answers to `ask`.
        """
        ...


@runtime_checkable
class VerifiesRecovered(Flushable, Protocol):
    """A tier whose records of an earlier process are safe only once they were read and verified."""

    def verify_recovered(self, places: Sequence[Place], within_s: float) -> int:
        """Read and verify what an earlier process wrote; return the leading places that are done.

        No read begins after `within_s` seconds. A place is done if it needs no read, or no more: a
        `flush` then tells whether its record is safe.
        """
        ...


@runtime_checkable
class Lockable(LocalTier, Protocol):
    """A tier that locks its medium for the process that opened it."""

    def give_up_copy(self) -> None:
        """Close the tier's descriptors in a forked child; the lock stays with the parent.

        Takes no lock and writes nothing.
        """
        ...


@runtime_checkable
class SharedTier(Tier, Protocol):
    """A tier that several stores write to, so a store looks up which blocks it holds.

    The stores may serve different domains. A record belongs to the namespace in its header: the
    same key in two namespaces is two records, and neither replaces or hides the other.

    The place of a block is that of its segment (`segment_place`). A `read` may stop at the first
    missing record: records after it in the batch may be a MISS too.
    """

    def held(
        self, namespace: Namespace, keys: Sequence[bytes], start: int, within_s: float = math.inf
    ) -> int:
        """Return the number of consecutive blocks of a chain that are held, from block `start` on.

        `keys` starts with the first block of the chain. Returns within the tier's own limit, or
        within `within_s` seconds if that is shorter; returns 0 if there is no answer.
        """
        ...

    def delete_corrupt(self, batch: Sequence[TierGet]) -> None:
        """Report records that were read and failed verification.

        The remote side, or the tier by reading again, checks each record without a key
        (`codec.coded.check_reported`) and deletes it only if this check fails: a reader with
        another key ring must not delete records that other readers can open. A sealed record that
        passes stays. The next `write` of its block by the reporter replaces it if the new record is
        sealed with the same data key or with one of a later epoch. The buffers' content is
        ignored. Best effort, bounded in time.
        """
        ...

    def delete(self, batch: Sequence[TierGet]) -> None:
        """Delete records unchecked: their domain was erased, or their data key was retired.

        Best effort, bounded in time.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Return plain data about the remote side for display; may query it, bounded in time."""
        ...


class HeldAnswer(NamedTuple):
    """Number of consecutive blocks held, and OK if the tier knows that the next one is missing.

    LATE or GONE: the following blocks may be held too, but the tier had no answer in time (LATE) or
    reached no server (GONE).
    """

    blocks: int
    outcome: Outcome


@runtime_checkable
class AnsweringTier(SharedTier, Protocol):
    """A shared tier that distinguishes "not held" from "no answer"; subclass it for its `held`."""

    def held(
        self, namespace: Namespace, keys: Sequence[bytes], start: int, within_s: float = math.inf
    ) -> int:
        return self.ask(namespace, keys, start, within_s).blocks

    def ask(
        self, namespace: Namespace, keys: Sequence[bytes], start: int, within_s: float = math.inf
    ) -> HeldAnswer:
        """Like `held`, with the outcome of the lookup."""
        ...


@runtime_checkable
class Reachable(SharedTier, Protocol):
    """A shared tier that knows whether its remote side is reachable."""

    def reachable(self) -> bool:
        """Return whether the tier would send a call to any server now; fast, no side effects.

        While it returns False, a store sends no lookups and prepares no writes.
        """
        ...


@runtime_checkable
class Queryable(SharedTier, Protocol):
    """A shared tier that can tell, before a write is prepared, which blocks it already holds."""

    def known(self, batch: Sequence[TierPut]) -> list[bool]:
        """Return for each block whether it is held where `write` would put it, by its header.

        The caller need not seal or write a block that is held. Bounded in time; False if there is
        no answer, or if the tier prefers a write to a query.
        """
        ...


@runtime_checkable
class Indexed(SharedTier, Protocol):
    """A shared tier that has an index of its blocks in memory."""

    def indexed(self, namespace: Namespace, keys: Sequence[bytes]) -> bytes:
        """Return one byte per key, in any order: 1 if the index has the block.

        No I/O, so the answer is there at once. It may be stale, as that of `held`.
        """
        ...


@runtime_checkable
class Expiring(SharedTier, Protocol):
    """A shared tier that deletes records by age, and where other nodes delete records, too."""

    def aged(self, namespace: Namespace, keys: Sequence[bytes]) -> bytes:
        """Return one byte per key: 1 if a new record of the block is kept notably longer. No I/O.

        A block that was written long ago, so it is written again before it counts as durable.
        """
        ...

    def refresh(self, namespace: Namespace, keys: Sequence[bytes], within_s: float) -> bool:
        """Learn which of these blocks other nodes have deleted; False without an answer in time.

        Asks the medium only if a block depends on another node.
        """
        ...


@runtime_checkable
class KeepsDurable(SharedTier, Protocol):
    """A shared tier that deletes records to make room, but durable ones last."""

    def keep_durable(
        self, namespace: Namespace, keys: Sequence[bytes], until_s: float, within_s: float
    ) -> bytes | None:
        """Delete these blocks for no others until `until_s`, in seconds since 1970.

        Returns one byte per key: 0 if the block can be kept only after another `write` of it, by
        this store. None without an answer of the medium in time.
        """
        ...


@runtime_checkable
class Announceable(SharedTier, Protocol):
    """A shared tier whose remote side can read records into its memory before they are read."""

    def announce(
        self, namespace: Namespace, keys: Sequence[bytes], start: int, in_s: float
    ) -> None:
        """Tell the remote side that the blocks from `start` on will be read in `in_s` seconds.

        `keys` starts with the first block of the chain. Best effort, bounded in time.
        """
        ...


@runtime_checkable
class Rebalancing(Reachable, LosesRecords, Protocol):
    """A shared tier whose members join and leave, and that reports which blocks to rewrite.

    A false positive of `lost` costs one query.
    """

    def misplaced(self, namespace: Namespace, keys: Sequence[bytes]) -> set[bytes]:
        """Return the blocks that were last read from a member they no longer belong to; each once.

        Returns at most as many as may be rewritten now, so that a change does not flood the pool.
        """
        ...


@runtime_checkable
class Permitted(SharedTier, Protocol):
    """A shared tier whose credentials may lack the permission to write."""

    def may_write(self) -> bool:
        """Return whether a write is permitted now; fast, asks no server.

        While it returns False, a store prepares no writes.
        """
        ...

    def limits(self) -> str:
        """Return in words what the credentials do not permit; empty if they permit everything."""
        ...


@runtime_checkable
class HealthReporting(Protocol):
    """A shared tier that knows the health of its members from its own requests to them."""

    def member_health(self) -> Sequence[MemberStatus]:
        """Return the health of each member; no I/O. The store reads at most 1,024 members."""
        ...


def is_away(tier: Tier) -> bool:
    """Return whether a tier reports that its remote side is unreachable."""
    return isinstance(tier, Reachable) and not tier.reachable()


def medium_of(tier: Tier) -> bytes:
    """Return the identity of a tier's medium; empty if it is away, or cannot be replaced."""
    return tier.medium() if isinstance(tier, Replaceable) else b""


def takes_writes(tier: Tier) -> bool:
    """Return whether writes may be prepared for a tier: it can be reached, and permits them."""
    if isinstance(tier, StopsWrites) and not tier.accepts_writes():
        return False
    return not is_away(tier) and (not isinstance(tier, Permitted) or tier.may_write())


def segment_place(segment: bytes) -> Place:
    """Return the place of a segment's blocks on a shared tier: its 8 bytes as a number >= 0."""
    return Place(int.from_bytes(segment, "little") >> 1)


def chain_segments(keys: Sequence[bytes], start: int, size: int) -> Iterator[tuple[Place, range]]:
    """Yield the place and the block numbers of each segment of a chain, from block `start` on.

    A segment has `size` blocks and is named for its first one.
    """
    for head in range(start - start % size, len(keys), size):
        blocks = range(max(head, start), min(head + size, len(keys)))
        yield segment_place(keys[head][:SEGMENT_BYTES]), blocks
