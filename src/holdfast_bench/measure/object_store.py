"""Measure an object tier on SeaweedFS and on a bare target, beside the same client without a tier.

Both sides move the same bytes to and from the same server with 8 requests at a time: segments of
64 MiB in one put each, and ranges of 8 MiB. Our side seals each record before a write, and verifies
and opens it after a read. A put to SeaweedFS mostly measures SeaweedFS, one to the bare target
measures the client.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import obstore

from holdfast.blocks.key import KEY_BYTES
from holdfast.blocks.namespace import Namespace
from holdfast.buffers import aligned_buffer
from holdfast.codec.pack import pack
from holdfast.codec.seal import DataKey
from holdfast.errors import HoldfastError, Outcome
from holdfast.limits import BLOCK_TOKENS, MIB
from holdfast.report import Row, at_most
from holdfast.testing.payloads import header_of
from holdfast.tiers.base import NOWHERE, TierGet, TierPut
from holdfast.tiers.kind import TierContext
from holdfast.tiers.object.kind import ObjectOptions, open_object
from holdfast.tiers.segments.tier import SegmentTier
from holdfast_bench.harness.paired_runs import Speed, paired, speed_row, timed
from holdfast_bench.peers.bare_store import BareStore
from holdfast_bench.peers.seaweed_server import BUCKET, SeaweedServer

CONCURRENCY = 8
BLOCK_BYTES = 2 * MIB
SEGMENT_BLOCKS = 32
SEGMENTS = 8
RANGE_BYTES = 8 * MIB
CHAIN_BLOCKS = 2_048
GOAL = 0.85
ANSWER_S = 60.0
LOOKUPS = 20


class _Blocks:
    """Packed records for every segment, memory for their sealed copies, and their data key."""

    def __init__(self) -> None:
        self.namespace = Namespace(
            b"holdfast-bench-o", b"holdfast-bench-d", BLOCK_BYTES, BLOCK_TOKENS
        )
        size = self.namespace.slot_bytes
        count = SEGMENTS * SEGMENT_BLOCKS
        memory, sealed = aligned_buffer(count * size), aligned_buffer(count * size)
        self.records = [memory[at * size : (at + 1) * size] for at in range(count)]
        self.sealed = [sealed[at * size : (at + 1) * size] for at in range(count)]
        self.keys = [b""] * count
        self.data_key = DataKey(bytes(range(32)), 1)
        self._numbers = itertools.count()
        self._nonces = itertools.count()

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return len(self.records) * self.namespace.slot_bytes

    def rename(self) -> None:
        """Give every record a new key."""
        for number, record in enumerate(self.records):
            name = next(self._numbers).to_bytes(8, "big")
            self.keys[number] = hashlib.blake2b(name, digest_size=KEY_BYTES).digest()
            pack(record, header_of(self.namespace, self.keys[number], depth=number))

    def seal(self, numbers: Sequence[int]) -> list[TierPut]:
        """Seal records; return the writes of the sealed copies."""
        for number in numbers:
            nonce = next(self._nonces).to_bytes(12, "big")
            sealer = self.data_key.sealer(self.records[number], nonce)
            if not sealer or sealer.seal(self.records[number], self.sealed[number]) != Outcome.OK:
                raise HoldfastError("a record could not be sealed")
        return [TierPut(NOWHERE, self.sealed[number]) for number in numbers]

    def gets(self, numbers: Sequence[int]) -> list[TierGet]:
        """Return reads of records into the memory of their sealed copies."""
        return [
            TierGet(NOWHERE, self.keys[number], self.sealed[number], self.namespace)
            for number in numbers
        ]


class _Bench(NamedTuple):
    """The tier and the client, and the threads that call them."""

    tier: SegmentTier
    client: Any
    blocks: _Blocks
    callers: ThreadPoolExecutor

    def write(self) -> Speed:
        """Seal all records under new keys and write them, a segment a call."""
        self.blocks.rename()
        return timed(self.blocks.nbytes, lambda: self._each_segment(self._write_segment))

    def write_plain(self) -> float:
        """Put the same bytes with the client alone, an object of a segment's size a call."""
        parts = self._segment_views()

        def put(number: int) -> None:
            obstore.put(self.client, f"plain/{number}", parts[number], use_multipart=False)

        return timed(self.blocks.nbytes, lambda: self._each_segment(put)).gb_per_s

    def read(self) -> Speed:
        """Read all records, verify and open them."""
        return timed(self.blocks.nbytes, lambda: self._each_segment(self._read_segment))

    def read_plain(self) -> float:
        """Get the same bytes with the client alone, in ranges of 8 MiB."""
        starts = range(0, SEGMENT_BLOCKS * self.blocks.namespace.slot_bytes, RANGE_BYTES)
        ranges = [(number, start) for number in range(SEGMENTS) for start in starts]

        def get(wanted: tuple[int, int]) -> int:
            number, start = wanted
            end = min(start + RANGE_BYTES, SEGMENT_BLOCKS * self.blocks.namespace.slot_bytes)
            return len(obstore.get_range(self.client, f"plain/{number}", start=start, end=end))

        def work() -> None:
            if sum(self.callers.map(get, ranges)) != self.blocks.nbytes:
                raise HoldfastError("the client returned other lengths than it wrote")

        return timed(self.blocks.nbytes, work).gb_per_s

    def lookup(self) -> tuple[float, int]:
        """Return the milliseconds of a lookup of a long chain, and the requests that it caused."""
        keys = (self.blocks.keys * (CHAIN_BLOCKS // len(self.blocks.keys) + 1))[:CHAIN_BLOCKS]
        before = self._requests()

        def ask() -> None:
            for _ in range(LOOKUPS):
                if self.tier.held(self.blocks.namespace, keys, 0) != CHAIN_BLOCKS:
                    raise HoldfastError("the chain is not held")

        began_s = time.perf_counter()
        ask()
        milliseconds = 1e3 * (time.perf_counter() - began_s) / LOOKUPS
        return milliseconds, self._requests() - before

    def single(self) -> int:
        """Return the requests that reading one block causes."""
        before = self._requests()
        if self.tier.read(self.blocks.gets([5])) != [Outcome.OK]:
            raise HoldfastError("a block could not be read")
        return self._requests() - before

    def _write_segment(self, number: int) -> None:
        puts = self.blocks.seal(_numbers(number))
        if set(self.tier.write(puts)) != {Outcome.OK}:
            raise HoldfastError(f"a segment was not written: {self.tier.describe()['writes']}")

    def _read_segment(self, number: int) -> None:
        gets = self.blocks.gets(_numbers(number))
        if set(self.tier.read(gets)) != {Outcome.OK}:
            raise HoldfastError(f"a segment was not read: {self.tier.describe()['reads']}")
        for get in gets:
            if self.blocks.data_key.decrypt(get.into) is not Outcome.OK:
                raise HoldfastError("a record does not verify")

    def _each_segment(self, work: Callable[[int], None]) -> None:
        list(self.callers.map(work, range(SEGMENTS)))

    def _segment_views(self) -> list[memoryview]:
        size = SEGMENT_BLOCKS * self.blocks.namespace.slot_bytes
        whole = aligned_buffer(size)
        return [whole] * SEGMENTS

    def _requests(self) -> int:
        requests: dict[str, int] = self.tier.describe()["medium"]["requests"]
        return sum(requests.values())


def object_rows(folder: Path, rounds: int, tell: Callable[[str], None]) -> Iterator[Row]:
    """Start SeaweedFS in `folder`, and yield the rows of writes, reads and lookups.

    Then yield those of writes and reads on a bare target, which takes little of the time.
    """
    tell("SeaweedFS starts")
    server = SeaweedServer(folder / "seaweed", volume_mb=1_024, volumes=rounds + 8)
    with _opened(server, folder) as bench:
        yield from _speeds("object", bench, rounds, tell)
        milliseconds, requests = bench.lookup()
        yield at_most(f"object.lookup.{CHAIN_BLOCKS}", milliseconds, "ms")
        yield at_most(f"object.lookup.{CHAIN_BLOCKS}.requests", requests, "requests", 0)
        yield at_most("object.read.2MiB.requests", bench.single(), "requests", 1)
    tell("a bare target starts")
    with _opened(BareStore(folder / "bare"), folder) as bench:
        yield from _speeds("object.bare", bench, rounds, tell)


@contextmanager
def _opened(server: SeaweedServer | BareStore, folder: Path) -> Iterator[_Bench]:
    """Start a server, and open a tier on it; end both at the end."""
    with closing(server):
        server.start()
        options = ObjectOptions(
            url=f"s3://{BUCKET}/bench",
            endpoint=server.endpoint,
            credentials_file=str(server.write_credentials(folder / "credentials")),
            connections=CONCURRENCY,
            write_connections=CONCURRENCY,
            deadline_s=ANSWER_S,
            write_s=ANSWER_S,
            ask_s=ANSWER_S,
            poll_s=3_600.0,
        )
        opened = open_object(options, TierContext("bench", "object", 512))
        with closing(opened) as tier, ThreadPoolExecutor(CONCURRENCY) as callers:
            yield _Bench(tier, server.store(), _Blocks(), callers)


def _speeds(name: str, bench: _Bench, rounds: int, tell: Callable[[str], None]) -> Iterator[Row]:
    """Yield the rows of writes and reads, each in turns with the client alone."""
    tell(f"{name}: writes")
    bench.write()
    bench.write_plain()
    pairs = paired(rounds, bench.write, bench.write_plain)
    yield speed_row(f"{name}.write.64MiBx8", pairs, GOAL)
    tell(f"{name}: reads")
    pairs = paired(rounds, _opened_reads(bench), bench.read_plain)
    yield speed_row(f"{name}.read.64MiBx8", pairs, GOAL)


def _opened_reads(bench: _Bench) -> Callable[[], Speed]:
    """Return the read of all records, first once without timing."""
    bench.read()
    return bench.read


def _numbers(segment: int) -> range:
    return range(segment * SEGMENT_BLOCKS, (segment + 1) * SEGMENT_BLOCKS)
