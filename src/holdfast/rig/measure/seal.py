"""Measure what sealing costs: a core beside plain AES-256-GCM, a disk beside one not sealed."""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.blocks.envelope import NONCE_BYTES, TAG_BYTES, Header
from holdfast.blocks.key import DOMAIN_KEY_BYTES
from holdfast.buffers import aligned_buffer
from holdfast.codec.pack import pack
from holdfast.codec.seal import DataKey, missing
from holdfast.errors import ConfigError
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
from holdfast.rig.pace import Speed, paired, speed_row, timed
from holdfast.rig.report import Row, at_least, share
from holdfast.store.keyring import KeyRing
from holdfast.store.store import Store
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.tier import DiskTier

CORE_GOAL = 5.0
"""GB/s that one core must seal, and open."""

DISK_GOAL = 0.90
"""Share of the unsealed throughput that is left."""

DISK_BYTES = 2 * GIB
CONTEXTS = 16
BLOCKS = 32


def need_cipher() -> None:
    """Raise ConfigError where nothing can be sealed."""
    if lack := missing():
        raise ConfigError(lack)


def core_rows(rounds: int) -> list[Row]:
    """Seal and open blocks on one core, beside the cipher alone; in processor time."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    size = WORLD.record_bytes
    header = Header(FINGERPRINT, FINGERPRINT, FINGERPRINT, WORLD.domain, 0, 1, PAYLOAD_BYTES, 0)
    plain = [aligned_buffer(size) for _ in range(BLOCKS)]
    sealed = [aligned_buffer(size) for _ in range(BLOCKS)]
    for record in plain:
        pack(record, header)
    key, nonce = DataKey(os.urandom(DOMAIN_KEY_BYTES), 1), os.urandom(NONCE_BYTES)
    cipher, about = AESGCM(os.urandom(DOMAIN_KEY_BYTES)), bytes(112)
    texts = [aligned_buffer(size)[:PAYLOAD_BYTES] for _ in range(BLOCKS)]
    ciphered = [aligned_buffer(size)[: PAYLOAD_BYTES + TAG_BYTES] for _ in range(BLOCKS)]
    pairs: dict[str, list[tuple[float, float]]] = {"seal.seal": [], "seal.open": []}
    for _ in range(rounds):
        pairs["seal.seal"].append(
            (
                _per_core(lambda i: key.seal(plain[i], sealed[i], nonce)),
                _per_core(lambda i: cipher.encrypt_into(nonce, texts[i], about, ciphered[i])),
            )
        )
        pairs["seal.open"].append(
            (
                _per_core(lambda i: key.open(sealed[i])),
                _per_core(lambda i: cipher.decrypt_into(nonce, ciphered[i], about, texts[i])),
            )
        )
    rows = [_core_row(what, speeds) for what, speeds in pairs.items()]
    slowest = min(row.value or 0.0 for row in rows)
    return [*rows, at_least("seal.core", slowest, "GB/s", CORE_GOAL)]


def _core_row(what: str, speeds: list[tuple[float, float]]) -> Row:
    value = statistics.median(ours for ours, _ in speeds)
    return share(what, value, "GB/s", statistics.median(limit for _, limit in speeds))


def disk_rows(folder: Path, rounds: int) -> list[Row]:
    """Write behind saves and fetch from a disk tier, sealed and not, in turns."""
    with (
        _store(folder / "sealed", KeyRing(None)) as sealed,
        _store(folder / "plain", None) as plain,
    ):
        rows = [_pair("seal.disk.write", rounds, _writing(sealed), _writing(plain))]
        for store in (sealed, plain):
            for context in range(CONTEXTS):
                _write(store, -2 - context)
        rows.append(_pair("seal.disk.fetch", rounds, _fetching(sealed), _fetching(plain)))
    return rows


def _pair(what: str, rounds: int, ours: Callable[[], Speed], plain: Callable[[], Speed]) -> Row:
    pairs = paired(PASSES * rounds, ours, lambda: plain().gb_per_s)
    return speed_row(what, pairs, DISK_GOAL, limit_is="the same, not sealed")


@contextlib.contextmanager
def _store(folder: Path, ring: KeyRing | None) -> Iterator[Store]:
    """A store whose arena is far smaller than what it holds, so that every fetch climbs."""
    tier = DiskTier(DiskConfig(path=str(folder), capacity_bytes=DISK_BYTES))
    with Store(4 * BATCH * PAYLOAD_BYTES, [tier], {"bench": SECRET}) as store:
        if ring is not None:
            ring.enrol("bench", SECRET)
            store.seal_with(ring)
        store.start()
        yield store


def _writing(store: Store) -> Callable[[], Speed]:
    seeds = itertools.count(1)
    return lambda: _write(store, next(seeds))


def _write(store: Store, seed: int) -> Speed:
    """Save a context; time from its commit until all of it is written below."""
    keys = chain_of(seed & 0xFFFF, BATCH).keys
    reserved = store.reserve(WORLD, keys, FINGERPRINT, 0)
    fill(store, keys, reserved.places)
    return timed(BATCH * PAYLOAD_BYTES, lambda: _commit(store, reserved.ticket))


def _commit(store: Store, ticket: int) -> None:
    if store.commit(ticket) != BATCH:
        raise RuntimeError("a block found no room in memory")
    while store.states.unwritten():
        time.sleep(0.0005)


def _fetching(store: Store) -> Callable[[], Speed]:
    turn = itertools.count()

    def fetch() -> Speed:
        keys = chain_of(-2 - next(turn) % CONTEXTS & 0xFFFF, BATCH).keys
        leases = []
        speed = timed(
            BATCH * PAYLOAD_BYTES, lambda: leases.append(store.fetch(WORLD, keys, FETCH_S))
        )
        for lease in leases:
            store.release(lease.lease)
            if lease.sources != {"disk": BATCH}:
                raise RuntimeError(f"expected {BATCH} blocks from disk, got {lease}")
        return speed

    return fetch


def _per_core(work: Callable[[int], object]) -> float:
    """Work on every block; return GB of payload for each second of processor time."""
    start_s = time.process_time()
    for number in range(BLOCKS):
        work(number)
    return BLOCKS * PAYLOAD_BYTES / (time.process_time() - start_s) / GB
