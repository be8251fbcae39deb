"""Measure what sealing costs a core, beside plain AES-256-GCM, and a disk and a pool, unsealed."""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from holdfast.blocks.envelope import NONCE_BYTES, TAG_BYTES, Header
from holdfast.buffers import aligned_buffer
from holdfast.codec.pack import pack
from holdfast.codec.seal import DATA_KEY_BYTES, DataKey, missing
from holdfast.errors import ConfigError, Outcome
from holdfast.limits import GIB
from holdfast.rig.limits import GB
from holdfast.rig.measure.disk import (
    BATCH,
    FETCH_S,
    FINGERPRINT,
    PASSES,
    PAYLOAD_BYTES,
    SECRET,
    WORLD,
    chain_of,
    fill,
)
from holdfast.rig.measure.pool import TargetProcess
from holdfast.rig.measure.trouble import Known
from holdfast.rig.pace import Speed, paired, speed_row, timed
from holdfast.rig.report import Row, at_least, share
from holdfast.store.descent import NEAR
from holdfast.store.keyring import KeyRing
from holdfast.store.sealing import Sealing
from holdfast.store.store import Store
from holdfast.tiers.base import Tier
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.tier import DiskTier
from holdfast.tiers.pool.members import Member
from holdfast.tiers.pool.tier import PoolTier
from holdfast.wire.target import Target

CORE_GOAL = 5.0
"""GB/s that one core must seal, and open."""

TIER_GOAL = 0.90
"""Share of the unsealed throughput of a disk or a pool that is left."""

DISK_BYTES = 2 * GIB
DISK_CONTEXTS = 16
DISK_PASSES = 2 * PASSES
"""Of every round: a pass has half a gigabyte a second more or less, whatever is written."""

POOL_CONTEXTS = 7
"""Of each of two stores: what one target's memory holds, and more than either of theirs."""

APART = 1 << 14
"""Contexts of two stores over one target have names that far from each other."""

BLOCKS = 32


def need_cipher() -> None:
    """Raise ConfigError where nothing can be sealed."""
    if lack := missing():
        raise ConfigError(lack)


def core_rows(rounds: int) -> list[Row]:
    """Seal and open blocks on one core, beside the cipher alone; in processor time.

    Sealed batch by batch as a store does, into as much memory in turn as a disk's blocks are, and
    opened where each came to lie.
    """
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    size = WORLD.record_bytes
    header = Header(FINGERPRINT, FINGERPRINT, FINGERPRINT, WORLD.domain, 0, 1, PAYLOAD_BYTES, 0)
    plain = [aligned_buffer(size) for _ in range(BLOCKS)]
    sealed = [aligned_buffer(size) for _ in range(BLOCKS)]
    for record in plain:
        pack(record, header)
    sealing, key = _keys()
    cipher, nonce, about = AESGCM(os.urandom(DATA_KEY_BYTES)), os.urandom(NONCE_BYTES), bytes(112)
    texts = [aligned_buffer(size)[:PAYLOAD_BYTES] for _ in range(BLOCKS)]
    ciphered = [aligned_buffer(size)[: PAYLOAD_BYTES + TAG_BYTES] for _ in range(BLOCKS)]
    staged_records = NEAR.groups * NEAR.group_bytes_max // PAYLOAD_BYTES
    stages = [aligned_buffer(size) for _ in range(staged_records)]
    staged = [stage[: PAYLOAD_BYTES + TAG_BYTES] for stage in stages]

    def seal(into: Sequence[memoryview]) -> None:
        sealers = [sealing.sealer(record, WORLD.domain) for record in plain]
        for i, sealer in enumerate(sealers):
            if (
                isinstance(sealer, Outcome)
                or sealer.seal(plain[i], into[i % len(into)]) is not Outcome.OK
            ):
                raise RuntimeError("a block can not be sealed")

    def encrypt(into: Sequence[memoryview]) -> None:
        for i in range(BLOCKS):
            cipher.encrypt_into(nonce, texts[i], about, into[i % len(into)])

    def decrypt() -> None:
        for i in range(BLOCKS):
            cipher.decrypt_into(nonce, ciphered[i], about, texts[i])

    pairs: dict[str, list[tuple[float, float]]] = {"seal.seal": [], "seal.open": []}
    for _ in range(PASSES * rounds):
        speeds = _per_core(lambda: seal(stages)), _per_core(lambda: encrypt(staged))
        pairs["seal.seal"].append(speeds)
        seal(sealed)
        encrypt(ciphered)
        speeds = _per_core(lambda: [key.open(record) for record in sealed]), _per_core(decrypt)
        pairs["seal.open"].append(speeds)
    rows = [_core_row(what, speeds) for what, speeds in pairs.items()]
    slowest = min(row.value or 0.0 for row in rows)
    return [*rows, at_least("seal.core", slowest, "GB/s", CORE_GOAL)]


def _keys() -> tuple[Sealing, DataKey]:
    """Return what seals blocks of the domain, as a store does, and the key it does it with."""
    ring, sealing = KeyRing(None), Sealing({WORLD.domain})
    ring.enrol("bench", SECRET)
    sealing.begin(ring)
    key = ring.current(WORLD.domain)
    if key is None:
        raise RuntimeError("a new key ring has no data key")
    return sealing, key


def _core_row(what: str, speeds: list[tuple[float, float]]) -> Row:
    value = statistics.median(ours for ours, _ in speeds)
    return share(what, value, "GB/s", statistics.median(limit for _, limit in speeds))


class _Side:
    """A store over one tier whose arena is far smaller than what it holds, so every fetch climbs.

    `first` is the number of the first context that it writes.
    """

    def __init__(self, store: Store, first: int = 1) -> None:
        self._store = store
        self._tier = store.states.lower[0].name
        self._numbers = itertools.count(first)
        self._held: list[list[bytes]] = []
        self._turn = itertools.count()

    def write(self) -> Speed:
        """Save a context; time from its commit until all of it is written below."""
        store, keys = self._store, chain_of(next(self._numbers), BATCH).keys
        reserved = store.reserve(WORLD, keys, FINGERPRINT, 0)
        fill(store, keys, reserved.places)
        self._held.append(keys)
        return timed(BATCH * PAYLOAD_BYTES, lambda: self._commit(reserved.ticket))

    def hold(self, contexts: int) -> None:
        """Save what will be fetched."""
        self._held.clear()
        for _ in range(contexts):
            self.write()

    def fetch(self) -> Speed:
        """Fetch the context that was not for the longest time; time until all of it is here."""
        keys = self._held[next(self._turn) % len(self._held)]
        leases = []
        speed = timed(
            BATCH * PAYLOAD_BYTES, lambda: leases.append(self._store.fetch(WORLD, keys, FETCH_S))
        )
        for lease in leases:
            self._store.release(lease.lease)
            if lease.sources != {self._tier: BATCH}:
                raise RuntimeError(f"expected {BATCH} blocks from {self._tier}, got {lease}")
        return speed

    def _commit(self, ticket: int) -> None:
        if self._store.commit(ticket) != BATCH:
            raise RuntimeError("a block found no room in memory")
        while self._store.states.unwritten():
            time.sleep(0.0005)


def disk_rows(folder: Path, rounds: int) -> list[Row]:
    """Write behind saves and fetch from a disk tier, sealed and not, in turns."""

    def disk(name: str) -> DiskTier:
        return DiskTier(DiskConfig(path=str(folder / name), capacity_bytes=DISK_BYTES))

    with _store(disk("sealed"), KeyRing(None)) as sealed, _store(disk("plain"), None) as plain:
        sides = _Side(sealed), _Side(plain)
        # A log that has gone round once writes over what is there: the first time costs more.
        for _ in range(DISK_BYTES // (BATCH * PAYLOAD_BYTES)):
            for side in sides:
                side.write()
        return _rows("seal.disk", DISK_PASSES * rounds, sides, DISK_CONTEXTS)


def pool_rows(folder: Path, rounds: int, what: str = "seal.pool") -> list[Row]:
    """Write behind saves to a target over TCP and fetch from it, sealed and not, in turns."""
    with TargetProcess(folder) as target:

        def pool() -> PoolTier:
            source = Known()
            tier = PoolTier(source, lambda member: Target(member.address))
            source.told([Member(id="target", address=target.address)])
            return tier

        with _store(pool(), KeyRing(None)) as sealed, _store(pool(), None) as plain:
            sides = _Side(sealed), _Side(plain, APART)
            return _rows(what, PASSES * rounds, sides, POOL_CONTEXTS)


def _rows(what: str, passes: int, sides: tuple[_Side, _Side], contexts: int) -> list[Row]:
    sealed, plain = sides
    rows = [_pair(f"{what}.write", passes, sealed.write, plain.write)]
    for side in sides:
        side.hold(contexts)
    return [*rows, _pair(f"{what}.fetch", passes, sealed.fetch, plain.fetch)]


def _pair(what: str, passes: int, ours: Callable[[], Speed], plain: Callable[[], Speed]) -> Row:
    plain_cpu_s = []

    def limit() -> float:
        speed = plain()
        plain_cpu_s.append(speed.cpu_s_per_gb)
        return speed.gb_per_s

    pairs = paired(passes, ours, limit)
    cpu_s = statistics.median(plain_cpu_s)
    return speed_row(
        what, pairs, TIER_GOAL, limit_is="the same, not sealed", plain_cpu_s_per_gb=cpu_s
    )


@contextlib.contextmanager
def _store(tier: Tier, ring: KeyRing | None) -> Iterator[Store]:
    """Make a store over one tier, sealed with a ring if there is one."""
    with Store(4 * BATCH * PAYLOAD_BYTES, [tier], {"bench": SECRET}) as store:
        if ring is not None:
            ring.enrol("bench", SECRET)
            store.seal_with(ring)
        store.start()
        yield store


def _per_core(work: Callable[[], object]) -> float:
    """Work on every block; return GB of payload for each second of processor time."""
    start_s = time.process_time()
    work()
    return BLOCKS * PAYLOAD_BYTES / (time.process_time() - start_s) / GB
