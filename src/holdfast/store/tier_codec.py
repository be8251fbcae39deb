"""The codec of one lower tier: encode records for it, decode them from it, choose, and count.

The choice is for new records only. A reader follows each record's header, so a tier may hold raw
and encoded records, and the choice may change at any time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Self

from holdfast.blocks.envelope import header_of_record
from holdfast.blocks.namespace import Namespace
from holdfast.clock import Clock
from holdfast.codec.codec import Codec, CodecMode, codec_named
from holdfast.codec.coded import MISMATCH, NOT_SHORTER, decode_verified, encode_record
from holdfast.errors import Outcome
from holdfast.plan.codec_choice import (
    CodecRates,
    DecodeMeter,
    DeliveryComparison,
    decode_threads,
    worth_encoding,
)
from holdfast.plan.meter import QueueMeter
from holdfast.status import CodecStatus

AUTO_CODEC = "planes"

_RAW_TRIES = 4
_RETRY_EVERY = 32
"""After `_RAW_TRIES` records of a namespace that did not shrink, every 32nd is tried."""

_NAMESPACES_MAX = 1_024


class DecodeSlots:
    """Bounds how many threads of a store decode at once, so that decoding leaves cores to engines.

    `threads`: by default half of this process's cores, at most four.
    """

    def __init__(self, threads: int = 0) -> None:
        self.threads = threads or decode_threads(len(os.sched_getaffinity(0)))
        self._slots = threading.BoundedSemaphore(self.threads)

    def __enter__(self) -> Self:
        self._slots.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._slots.release()


class TierCodec:
    """Encodes and decodes the records of one lower tier. Thread-safe.

    `mode`: the tier's option. `slots`: shared by the tiers of a store. `lossy_codec` returns the
    codec of namespaces whose blocks are quantised, which is used in any mode; it loses nothing of
    such a block.
    """

    def __init__(
        self,
        tier: str,
        mode: CodecMode,
        clock: Clock,
        slots: DecodeSlots,
        lossy_codec: Callable[[Namespace], Codec | None] = lambda _: None,
    ) -> None:
        self._lossy_codec = lossy_codec
        self._tier = tier
        self._mode = mode
        self._clock = clock
        self._codec = codec_named(AUTO_CODEC if mode in ("auto", "off") else mode)
        self._slots = slots
        self._lock = threading.Lock()
        self._reads = QueueMeter()
        self._decodes = DecodeMeter()
        self._deliveries = DeliveryComparison()
        self._encodes = mode not in ("auto", "off")
        self._raw_in_a_row: dict[Namespace, int] = {}
        self._encoded = self._decoded = self._kept_raw = self._mismatches = self._undecodable = 0
        self._raw_bytes = self._stored_bytes = self._quantised = 0

    def wants(self, namespace: Namespace) -> bool:
        """Return whether the next record of a namespace should be encoded."""
        if self._lossy_codec(namespace) is not None:
            return True
        with self._lock:
            if self._mode == "off" or not self._choose():
                return False
            raw = self._raw_in_a_row.get(namespace, 0)
            if raw < _RAW_TRIES or raw % _RETRY_EVERY == 0:
                return True
            self._raw_in_a_row[namespace] = raw + 1
            self._kept_raw += 1
            return False

    def encode(
        self, record: memoryview, namespace: Namespace, into: memoryview, element_bytes: int
    ) -> int:
        """Encode a packed raw record into `into`; see `codec.coded.encode_record`.

        A block that the lossy codec of its namespace left exact is encoded as the mode says.
        """
        lossy, stored = self._lossy_codec(namespace), NOT_SHORTER
        if lossy is not None:
            stored = encode_record(record, lossy, into, element_bytes)
        if stored == NOT_SHORTER and (lossy is None or self._encodes_now()):
            stored = encode_record(record, self._codec, into, element_bytes)
            lossy = None
        with self._lock:
            self._quantised += lossy is not None and stored > NOT_SHORTER
            if stored > NOT_SHORTER:
                self._encoded += 1
                self._raw_bytes += len(record)
                self._stored_bytes += stored
                self._raw_in_a_row.pop(namespace, None)
            elif stored == MISMATCH:
                self._mismatches += 1
            elif stored == NOT_SHORTER:
                self._kept_raw += 1
                if len(self._raw_in_a_row) >= _NAMESPACES_MAX:
                    self._raw_in_a_row.clear()
                self._raw_in_a_row[namespace] = self._raw_in_a_row.get(namespace, 0) + 1
        return stored

    def decode(self, record: memoryview, into: memoryview) -> Outcome:
        """Decode a verified record into `into`; see `codec.coded.decode_verified`."""
        with self._slots:
            start_s = time.perf_counter()
            outcome = decode_verified(record, into)
            seconds = time.perf_counter() - start_s
        header = header_of_record(record)
        with self._lock:
            if outcome is Outcome.OK and header is not None:
                self._decoded += 1
                self._decodes.observe(header.raw_bytes, seconds)
            else:
                self._undecodable += 1
        return outcome

    def asked(self, stored_bytes: int) -> None:
        """Record that a read of stored bytes from the tier begins."""
        with self._lock:
            self._reads.asked(stored_bytes, self._clock.now())

    def arrived(self, stored_bytes: int, of: int, *, failed: bool = False) -> None:
        """Record that a read for which `of` bytes were asked ended, and its stored bytes.

        These are fewer if records are shorter than the index knew. `failed`: some did not come, so
        the time says nothing.
        """
        with self._lock:
            now = self._clock.now()
            if not failed and 0 < stored_bytes < of:
                self._reads.dropped(of - stored_bytes, now)
                of = stored_bytes
            self._reads.arrived(0 if failed else stored_bytes, of, now)

    def delivered(self, raw_bytes: int, seconds: float, *, encoded: bool) -> None:
        """Record how long a batch took that was all encoded or all raw, until it was verified."""
        with self._lock:
            self._deliveries.observe(raw_bytes, seconds, encoded=encoded)

    def status(self, held_raw_bytes: int = 0, held_bytes: int = 0) -> CodecStatus:
        """Return mode, choice, rates and counters, with the bytes that the tier holds now."""
        with self._lock:
            rates = self._rates()
            return CodecStatus(
                tier=self._tier,
                mode=self._mode,
                encodes=self._mode != "off" and self._choose(),
                encoded=self._encoded,
                decoded=self._decoded,
                quantised=self._quantised,
                kept_raw=self._kept_raw,
                mismatches=self._mismatches,
                undecodable=self._undecodable,
                raw_bytes=self._raw_bytes,
                stored_bytes=self._stored_bytes,
                held_raw_bytes=held_raw_bytes,
                held_bytes=held_bytes,
                read_bytes_per_s=rates.stored,
                decode_bytes_per_s=rates.decoded,
                threads=self._slots.threads,
            )

    def _encodes_now(self) -> bool:
        with self._lock:
            return self._mode != "off" and self._choose()

    def _choose(self) -> bool:
        if self._mode == "auto":
            pays = worth_encoding(self._rates(), encodes=self._encodes)
            compared = self._deliveries
            self._encodes = pays and compared.knows_raw and not compared.encoded_is_slower
        return self._encodes

    def _rates(self) -> CodecRates:
        stored = self._reads.fit.estimate().bytes_per_s
        return CodecRates(stored, self._decodes.bytes_per_s, self._slots.threads)
