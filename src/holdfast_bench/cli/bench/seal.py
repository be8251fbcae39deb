"""`holdfast bench seal`: the cost of sealing on a core, a disk and a pool.

The pool is also measured behind a link of 10 Gbit/s, as between two hosts. Over unlimited loopback
both ends of an unsealed transfer keep both cores of a small machine busy, so that any other work
reduces the throughput; a network card is slower than that. For this, the file is executed as a
module in a network namespace whose loopback interface is limited with tc-tbf, and prints its rows
as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from holdfast.blocks.envelope import NONCE_BYTES, TAG_BYTES
from holdfast.buffers import aligned_buffer
from holdfast.clock import SystemClock
from holdfast.codec.pack import pack
from holdfast.codec.seal import DATA_KEY_BYTES, missing
from holdfast.errors import ConfigError, HoldfastError, Outcome
from holdfast.keys.keyring import KeyRing
from holdfast.limits import GIB
from holdfast.membership.members import Member
from holdfast.report import Row, at_least, not_measured, share
from holdfast.store.options import StoreOptions
from holdfast.store.sealing import Sealing
from holdfast.store.store import Store
from holdfast.store.write_batches import LOCAL_SEAL
from holdfast.testing.payloads import header_of
from holdfast.tiers.base import Tier
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.tier import DiskTier
from holdfast.tiers.pool.tier import PoolTier, PoolTierOptions
from holdfast.wire.remote.client import TargetClient
from holdfast_bench.cli import measuring
from holdfast_bench.cli.progress import Steps
from holdfast_bench.harness.hardware_limits import GB
from holdfast_bench.harness.lifetime import owned
from holdfast_bench.harness.paired_runs import Speed, paired, speed_row
from holdfast_bench.harness.pool import ManualMembers
from holdfast_bench.measure.disk import (
    BATCH,
    FETCH_S,
    FINGERPRINT,
    NAMESPACE,
    PASSES,
    PAYLOAD_BYTES,
    SECRET,
    SEED_OFFSET,
    BenchedStore,
)
from holdfast_bench.measure.pool import TargetUnderTest

ALSO = ("cpu_s_per_gb", "plain_cpu_s_per_gb", "why")

CORE_GOAL = 5.0
"""GB/s that one core must seal, and must open."""

TIER_GOAL = 0.90
"""Sealed throughput of a disk or a pool, as a share of the unsealed throughput."""

DISK_BYTES = 2 * GIB
DISK_CONTEXTS = 16
DISK_PASSES = 2 * PASSES
"""Passes per round: the disk's own speed varies by 0.5 GB/s between passes."""

POOL_CONTEXTS = 7
"""Contexts of each of the two stores: one target's memory holds them all, a store's arena does not.
"""

BLOCKS = 32

GBIT_PER_S = 10
_LINK_PROGRAMS = ("unshare", "ip", "tc")
_LINK_LIMIT_S = 600.0
_PACED = f"""\
ip link set lo up
tc qdisc add dev lo root tbf rate {GBIT_PER_S}gbit burst 4mb latency 100ms
exec "$@"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    measuring.add_rounds_argument(parser, 15)
    measuring.add_folder_argument(parser, "scratch files, 4 GiB")
    measuring.add_quick_argument(parser, "a core only")


def measure(args: argparse.Namespace, steps: Steps) -> Iterator[Row]:
    """Yield the figures."""
    need_cipher()
    steps.plan(1 if args.quick else 4)
    steps.begin("a core beside plain AES-256-GCM")
    yield from core_rows(args.rounds)
    if args.quick:
        return
    steps.begin("a disk tier, sealed beside not sealed")
    with measuring.scratch(args.folder) as scratch:
        yield from disk_rows(scratch, args.rounds)
        steps.begin("a target over TCP, sealed beside not sealed")
        yield from pool_rows(scratch, args.rounds)
        steps.begin(f"a target behind {GBIT_PER_S} Gbit/s, sealed beside not sealed")
        yield from link_rows(scratch, args.rounds)


def need_cipher() -> None:
    """Raise ConfigError if the cryptography library is missing."""
    if lack := missing():
        raise ConfigError(lack)


def core_rows(rounds: int) -> list[Row]:
    """Measure sealing and opening of blocks on one core, and the cipher alone, in CPU time.

    Blocks are sealed in batches into the rotating buffers that a store uses for its disk, and are
    opened in place.
    """
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    size = NAMESPACE.slot_bytes
    plain = [aligned_buffer(size) for _ in range(BLOCKS)]
    sealed = [aligned_buffer(size) for _ in range(BLOCKS)]
    for record in plain:
        pack(record, header_of(NAMESPACE, FINGERPRINT))
    ring = KeyRing(None)
    ring.enrol("bench", SECRET)
    sealing = Sealing({NAMESPACE.domain}, ring, SystemClock())
    key = ring.current(NAMESPACE.domain)
    assert key is not None, "a new key ring has no data key"
    cipher, nonce, about = AESGCM(os.urandom(DATA_KEY_BYTES)), os.urandom(NONCE_BYTES), bytes(112)
    texts = [aligned_buffer(size)[:PAYLOAD_BYTES] for _ in range(BLOCKS)]
    ciphered = [aligned_buffer(size)[: PAYLOAD_BYTES + TAG_BYTES] for _ in range(BLOCKS)]
    staged_records = LOCAL_SEAL.groups * LOCAL_SEAL.group_bytes_max // PAYLOAD_BYTES
    stages = [aligned_buffer(size) for _ in range(staged_records)]
    staged = [stage[: PAYLOAD_BYTES + TAG_BYTES] for stage in stages]

    def seal(into: Sequence[memoryview]) -> None:
        sealers = [sealing.sealer(record, NAMESPACE.domain) for record in plain]
        for i, sealer in enumerate(sealers):
            if (
                isinstance(sealer, Outcome)
                or sealer.seal(plain[i], into[i % len(into)]) is not Outcome.OK
            ):
                raise RuntimeError("a block cannot be sealed")

    def encrypt(into: Sequence[memoryview]) -> None:
        for i in range(BLOCKS):
            cipher.encrypt_into(nonce, texts[i], about, into[i % len(into)])

    def decrypt() -> None:
        for i in range(BLOCKS):
            cipher.decrypt_into(nonce, ciphered[i], about, texts[i])

    def open_all() -> None:
        if any(key.open(record) is not Outcome.OK for record in sealed):
            raise RuntimeError("a block cannot be opened")

    pairs: dict[str, list[tuple[float, float]]] = {"seal.seal": [], "seal.open": []}
    for _ in range(PASSES * rounds):
        speeds = _per_core(lambda: seal(stages)), _per_core(lambda: encrypt(staged))
        pairs["seal.seal"].append(speeds)
        seal(sealed)
        encrypt(ciphered)
        speeds = _per_core(open_all), _per_core(decrypt)
        pairs["seal.open"].append(speeds)
    rows = [_core_row(what, speeds) for what, speeds in pairs.items()]
    slowest = min(row.value or 0.0 for row in rows)
    return [*rows, at_least("seal.core", slowest, "GB/s", CORE_GOAL)]


def _core_row(what: str, speeds: list[tuple[float, float]]) -> Row:
    value = statistics.median(ours for ours, _ in speeds)
    return share(what, value, "GB/s", statistics.median(limit for _, limit in speeds))


def disk_rows(folder: Path, rounds: int) -> list[Row]:
    """Measure write-behind to a disk tier and fetches from it, sealed and unsealed."""

    def disk(name: str) -> DiskTier:
        return DiskTier(DiskConfig(path=str(folder / name), capacity_bytes=DISK_BYTES))

    with _store(disk("sealed"), KeyRing(None)) as sealed, _store(disk("plain"), None) as plain:
        sides = BenchedStore(sealed), BenchedStore(plain)
        # Fill both logs once: the first write to a part of the file takes longer.
        for _ in range(DISK_BYTES // (BATCH * PAYLOAD_BYTES)):
            for side in sides:
                side.write()
        return _rows("seal.disk", DISK_PASSES * rounds, sides, DISK_CONTEXTS)


def pool_rows(folder: Path, rounds: int, what: str = "seal.pool") -> list[Row]:
    """Measure write-behind to a target over TCP and fetches from it, sealed and unsealed."""
    with TargetUnderTest(folder) as target:

        def pool() -> PoolTier:
            members = ManualMembers([Member(id="target", address=target.peer_address)])
            options = PoolTierOptions(deadline_s=FETCH_S)  # a call that is late is measured, too
            return PoolTier(members, lambda member: TargetClient(member.address), options)

        with _store(pool(), KeyRing(None)) as sealed, _store(pool(), None) as plain:
            sides = BenchedStore(sealed), BenchedStore(plain, SEED_OFFSET)
            return _rows(what, PASSES * rounds, sides, POOL_CONTEXTS)


def link_rows(folder: Path, rounds: int) -> list[Row]:
    """Measure what `pool_rows` does, over the limited link.

    One row without a value if this needs root or programs that are missing.
    """
    if os.geteuid() != 0 or not all(map(shutil.which, _LINK_PROGRAMS)):
        why = f"a limited link needs root and the programs {', '.join(_LINK_PROGRAMS)}"
        return [not_measured("seal.link", why)]
    ours = [sys.executable, "-m", "holdfast_bench.cli.bench.seal", str(folder), str(rounds)]
    try:
        done = subprocess.run(
            owned(behind_link(ours)),
            capture_output=True,
            text=True,
            check=False,
            timeout=_LINK_LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise HoldfastError(
            f"a paced link: not measured within {_LINK_LIMIT_S:.0f} s; lower --rounds"
        ) from error
    if done.returncode:
        raise HoldfastError(f"a paced link: {done.stderr.strip()[-500:] or done.returncode}")
    return msgspec.json.decode(done.stdout, type=list[Row])


def behind_link(argv: Sequence[str]) -> list[str]:
    """Return the command that runs `argv` in a network namespace with a limited loopback link."""
    return ["unshare", "--net", "sh", "-ec", _PACED, "sh", *argv]


def _rows(
    what: str, passes: int, sides: tuple[BenchedStore, BenchedStore], contexts: int
) -> list[Row]:
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
    """Open a store over one tier; it seals if `ring` is given."""
    if ring is not None:
        ring.enrol("bench", SECRET)
    options = StoreOptions(ring=ring)
    with Store(4 * BATCH * PAYLOAD_BYTES, [tier], {"bench": SECRET}, options) as store:
        store.start()
        yield store


def _per_core(work: Callable[[], object]) -> float:
    """Run `work`, which processes every block; return GB of payload per CPU second."""
    start_s = time.process_time()
    work()
    return BLOCKS * PAYLOAD_BYTES / (time.process_time() - start_s) / GB


if __name__ == "__main__":
    found = pool_rows(Path(sys.argv[1]), int(sys.argv[2]), "seal.link")
    sys.stdout.buffer.write(msgspec.json.encode(found))
