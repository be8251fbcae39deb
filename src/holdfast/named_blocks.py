"""Blocks that an engine names by hashes of its own, because it provides no tokens.

Such blocks are independent of each other: each is looked up, read and written by itself, and each
has an outcome of its own. They are a world of their own: their fingerprint says how they are named
(`Meaning.naming`), so no block that is named by tokens, or by another engine, is ever found as one
of them. A `NamedBackend` reaches the store: `holdfast.store.named_blocks` one in this process,
`holdfast.client.named_blocks` that of a node.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

from holdfast.blocks.fingerprint import TOKENS, Fingerprint
from holdfast.blocks.key import named_key
from holdfast.errors import BlockError, HoldfastError, Outcome
from holdfast.limits import CHAIN_BLOCKS_MAX
from holdfast.policy.retention import Retention
from holdfast.session import FETCH_S, LOOK_S, LOOKUP_SHARE

BlockMemory: TypeAlias = Sequence[tuple[int, int]]
"""The memory of one block: ranges (address, bytes), one after another, of a payload's length."""

SAVE_BLOCKS = 128
"""Blocks of one reservation: the others of a batch find the slots that eviction has freed."""

SAVE_S = 30.0
"""Default deadline of a put, in seconds."""

_log = logging.getLogger("holdfast.named")


class PrefixPosition(NamedTuple):
    """Where the blocks of a put are in a prefix: behind the block named `parent`, at `depth`.

    It orders eviction only: a block that others follow is evicted after them.
    """

    parent: bytes = b""
    depth: int = 0


FIRST = PrefixPosition()
"""The beginning of a prefix, and the position of blocks of which the engine tells none."""


class FoundBlocks(NamedTuple):
    """One byte per key, 1 if the block is held on any tier, and the tiers that did not answer.

    `unanswered` has LATE or GONE by name of a shared tier that may hold the blocks not found.
    """

    held: bytes
    unanswered: Mapping[str, Outcome] = MappingProxyType({})


class LoadedRun(NamedTuple):
    """How many leading blocks were copied, and the outcome of the next one."""

    blocks: int
    outcome: Outcome


class KeyedRun(NamedTuple):
    """Keys of blocks to save, which follow each other behind `parent`, the first at `depth`."""

    keys: Sequence[bytes]
    parent: bytes
    depth: int


class NamedAccess(Protocol):
    """A store that answers now, in terms of keys. Every method may raise HoldfastError."""

    domain_key: bytes

    @abstractmethod
    def find(self, keys: Sequence[bytes], deadline_s: float) -> FoundBlocks:
        """Return which of these blocks are held; asks shared tiers about the others."""

    @abstractmethod
    def load(
        self, keys: Sequence[bytes], memory: Sequence[BlockMemory], deadline_s: float
    ) -> LoadedRun:
        """Copy the longest leading run that can be read and verified by the deadline."""

    @abstractmethod
    def save(
        self, run: KeyedRun, memory: Sequence[BlockMemory], retention: Retention, deadline_s: float
    ) -> list[Outcome]:
        """Copy blocks into the store and publish them; return OK for each that is held now."""


class NamedBackend(Protocol):
    """Reaches the store of named blocks."""

    @abstractmethod
    def access(self) -> NamedAccess:
        """Return the store; raise HoldfastError if it does not answer now. Never waits long."""

    @abstractmethod
    def close(self) -> None:
        """End the connection, if there is one."""


class NamedSession:
    """The blocks of one fingerprint in one domain that an engine names itself; thread-safe.

    A name is the engine's collision-safe hash of a block, of 16 to 256 bytes, with whatever else
    tells apart the blocks of one engine (the number of a KV group, a rank). Each method returns one
    outcome for each name and never raises for the state of the store, of a node or of a tier:
    OK, MISS, FULL, LATE, CORRUPT, UNREADABLE, or GONE if the store does not answer. It raises
    BlockError for arguments that do not fit each other, and for names that may collide. Deadlines
    are in seconds.
    """

    def __init__(self, backend: NamedBackend, fingerprint: Fingerprint) -> None:
        check_named(fingerprint)
        self._backend = backend
        self._digest = fingerprint.digest()
        self.raw_bytes = fingerprint.representation.raw_bytes
        """Bytes of one block."""
        self._failure = ""

    def exists(self, names: Sequence[bytes], deadline_s: float = LOOK_S) -> list[Outcome]:
        """Return for each block OK if it is held on any tier, else MISS.

        LATE or GONE instead of MISS: a shared tier that may hold the block did not answer.
        """
        if not names:
            return []
        try:
            access = self._backend.access()
            found = access.find(self._keys(access, names), deadline_s)
        except HoldfastError as error:
            return self._gone(error, len(names))
        return _looked_up(found)

    def get(
        self,
        names: Sequence[bytes],
        memory: Sequence[BlockMemory],
        deadline_s: float = FETCH_S,
    ) -> list[Outcome]:
        """Copy each block that is held into its memory, verified; return its outcome.

        Memory of a block whose outcome is not OK may have been written to, too. The caller keeps
        the memory valid until this call returns.
        """
        self._check_memory(names, memory)
        if not names:
            return []
        until_s = time.monotonic() + deadline_s
        outcomes = [Outcome.GONE] * len(names)
        try:
            access = self._backend.access()
            keys = self._keys(access, names)
            # Engines ask for what they have looked up: most batches are held whole.
            whole = access.load(keys, memory, deadline_s)
            outcomes[: whole.blocks] = [Outcome.OK] * whole.blocks
            left = list(range(whole.blocks, len(names)))
            if left and whole.outcome in (Outcome.CORRUPT, Outcome.UNREADABLE):
                outcomes[left.pop(0)] = whole.outcome
            if left:
                left_s = max(0.0, until_s - time.monotonic())
                asked = access.find([keys[i] for i in left], LOOKUP_SHARE * left_s)
                found = dict(zip(left, _looked_up(asked), strict=True))
                left = [i for i, outcome in found.items() if outcome is Outcome.OK]
                for i, outcome in found.items():
                    outcomes[i] = Outcome.LATE if outcome is Outcome.OK else outcome
            while left and (left_s := until_s - time.monotonic()) > 0:
                loaded = access.load([keys[i] for i in left], [memory[i] for i in left], left_s)
                for i in left[: loaded.blocks]:
                    outcomes[i] = Outcome.OK
                left = left[loaded.blocks :]
                if loaded.blocks or not left:
                    continue
                unread = _unread(access, [(i, keys[i]) for i in left], loaded.outcome, left_s)
                for i, outcome in unread.items():
                    outcomes[i] = outcome
                left = [i for i in left if i not in unread]
        except HoldfastError as error:
            gone = self._gone(error, len(names))
            return [
                was if was is Outcome.OK else now for was, now in zip(outcomes, gone, strict=True)
            ]
        return outcomes

    def put(
        self,
        names: Sequence[bytes],
        memory: Sequence[BlockMemory],
        after: PrefixPosition = FIRST,
        retention: Retention = Retention.SESSION,
        deadline_s: float = SAVE_S,
    ) -> list[Outcome]:
        """Save blocks from their memory; return OK for each that is held now, saved or before.

        `names` follow each other in a prefix, behind `after`, as far as the engine knows. FULL: no
        slot is free. The memory is read during this call only.
        """
        self._check_memory(names, memory)
        outcomes = list[Outcome]()
        try:
            until_s, access = time.monotonic() + deadline_s, self._backend.access()
            keys = self._keys(access, names)
            parent = self._keys(access, [after.parent])[0] if after.parent else self._digest
            for first in range(0, len(keys), SAVE_BLOCKS):
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    break
                part = keys[first : first + SAVE_BLOCKS]
                depth = min(after.depth + first, CHAIN_BLOCKS_MAX - len(part))
                run = KeyedRun(part, keys[first - 1] if first else parent, depth)
                blocks = memory[first : first + len(part)]
                outcomes += access.save(run, blocks, retention, left_s)
        except HoldfastError as error:
            return outcomes + self._gone(error, len(names) - len(outcomes))
        return outcomes + [Outcome.LATE] * (len(names) - len(outcomes))

    def close(self) -> None:
        """End the connection, if there is one."""
        self._backend.close()

    def _keys(self, access: NamedAccess, names: Sequence[bytes]) -> list[bytes]:
        domain_key, digest = access.domain_key, self._digest
        return [named_key(domain_key, digest, name) for name in names]

    def _check_memory(self, names: Sequence[bytes], memory: Sequence[BlockMemory]) -> None:
        if len(names) != len(memory):
            raise BlockError(f"{len(memory)} blocks of memory given for {len(names)} names")
        for ranges in memory:
            nbytes = sum(length for _, length in ranges)
            if nbytes != self.raw_bytes:
                raise BlockError(
                    f"memory of {nbytes} bytes given for a block of {self.raw_bytes} bytes; "
                    "give ranges that have together the bytes of the fingerprint's layout"
                )

    def _gone(self, error: HoldfastError, count: int) -> list[Outcome]:
        """Log a failure once; return GONE for each block. A BlockError is the caller's."""
        if isinstance(error, BlockError):
            raise error
        if str(error) != self._failure:
            self._failure = str(error)
            _log.warning("%s; blocks are recomputed meanwhile", error)
        return [Outcome.GONE] * count


def check_named(fingerprint: Any) -> None:  # noqa: ANN401  # what a caller passes
    """Raise BlockError unless this is a fingerprint of blocks that are not named by tokens."""
    if not isinstance(fingerprint, Fingerprint):
        raise BlockError(
            f"named_session: fingerprint is of type {type(fingerprint).__name__}; pass a "
            "holdfast.Fingerprint"
        )
    if fingerprint.meaning.naming == TOKENS:
        raise BlockError(
            "named_session: blocks of this fingerprint are named by tokens; write in "
            "meaning.naming what names them, such as 'vllm sha256_cbor', or open a "
            "session(fingerprint)"
        )


def memory_of(row: Any) -> BlockMemory:  # noqa: ANN401  # whatever numpy takes as a buffer
    """Return the memory of a contiguous buffer, which the caller keeps."""
    import numpy as np

    array = np.frombuffer(row, np.uint8)
    return [(array.ctypes.data, array.nbytes)]


def rows_of(payload: int, memory: BlockMemory) -> Iterator[tuple[int, int, int]]:
    """Yield the address of each range of a block in a payload, in its memory, and its bytes."""
    for address, nbytes in memory:
        yield payload, address, nbytes
        payload += nbytes


def saved_outcomes(
    places: Sequence[int], reserved: Outcome, published: int, find: Callable[[], FoundBlocks]
) -> list[Outcome]:
    """Return the outcome of each block of a reservation that was committed.

    A place below 0: the block was held, or got no slot. `find` is called only if it is not known
    which blocks are held now.
    """
    if reserved is Outcome.OK and published == sum(place >= 0 for place in places):
        return [Outcome.OK] * len(places)
    lost = Outcome.FULL if reserved is Outcome.FULL else Outcome.GONE
    return [Outcome.OK if held else lost for held in find().held]


def _looked_up(found: FoundBlocks) -> list[Outcome]:
    """Return the outcome of looking up each block."""
    said = found.unanswered.values()
    missing = Outcome.MISS
    if said:
        missing = Outcome.LATE if Outcome.LATE in said else Outcome.GONE
    return [Outcome.OK if held else missing for held in found.held]


def _unread(
    access: NamedAccess, left: Sequence[tuple[int, bytes]], failed: Outcome, within_s: float
) -> dict[int, Outcome]:
    """Return the outcome of blocks that cannot be read, by number, after none of `left` was.

    `left`: number and key of each block that was held, and `failed` why the first one was not read.
    The blocks that are left out may be read if they are asked for again.
    """
    numbers = [number for number, _ in left]
    if failed is Outcome.FULL:
        return dict.fromkeys(numbers, failed)
    if failed is not Outcome.LATE:
        return {numbers[0]: Outcome.MISS if failed is Outcome.OK else failed}
    # The store also says so if a shared tier has lost a block since it was looked up.
    found = _looked_up(access.find([key for _, key in left], LOOKUP_SHARE * within_s))
    lost = dict[int, Outcome]()
    lost |= {n: said for n, said in zip(numbers, found, strict=True) if said is not Outcome.OK}
    return lost or dict.fromkeys(numbers, Outcome.LATE)
