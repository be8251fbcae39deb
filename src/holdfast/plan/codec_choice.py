"""Choose whether to encode new records of a tier, from measured rates; pure.

A reader decodes one block while it reads the next. With a ratio r it then delivers
min(r * B, D * n) raw bytes a second: B stored bytes a second from the tier, D raw bytes a second
from each of n decoding threads. Raw records arrive at B. So encoding could pay while B < D * n, but
reading and decoding compete for cores and memory, and the break-even is at about half of it.
"""

from __future__ import annotations

from typing import NamedTuple

BEGIN_BELOW, END_ABOVE = 0.5, 0.7
"""Shares of D * n: encoding begins if the read rate is below the first, and ends above the second.

On two cores, encoded records of a disk arrived 1.2 to 1.3 times as fast as raw ones at 0.4, and 0.7
times as fast at 0.7 (`holdfast bench codec`)."""

DECODE_THREADS_MAX = 4

SLOWER = 1.03
"""Ratio of times from which on encoded records count as slower."""

_BATCHES = 8
"""Batches of a form that are read before its speed counts."""

_RETRY_BATCHES = 2_048
"""Raw batches in a row (16 GiB at 8 MiB each) after which encoded ones are measured anew."""

DECODE_DEFAULT = 2.5e9
"""Raw bytes a second of a decoding thread, until some were measured."""

_HALF_LIFE_BYTES = 256 << 20
_PRIOR_BYTES = 32 << 20


class CodecRates(NamedTuple):
    """Measured rates of one tier, in bytes a second.

    `stored`: records read from the tier. `decoded`: raw payloads out of one decoding thread.
    """

    stored: float
    decoded: float
    threads: int

    @property
    def decoding(self) -> float:
        """Raw bytes a second of all decoding threads."""
        return self.decoded * self.threads


def worth_encoding(rates: CodecRates, *, encodes: bool) -> bool:
    """Return whether new records are encoded from now on; `encodes`: whether they are so far."""
    return rates.stored < rates.decoding * (END_ABOVE if encodes else BEGIN_BELOW)


def decode_threads(cores: int) -> int:
    """Return how many threads decode on a machine: half of its cores, at most four."""
    return max(1, min(DECODE_THREADS_MAX, cores // 2))


class DeliveryComparison:
    """How fast batches of encoded and of raw records were delivered, from the same tier.

    The rates of `CodecRates` do not show everything: decoding may compete with the tier's own
    threads, or with engines, for cores. So raw records are measured first, and once both forms were
    read, the faster one wins. If that is the raw form, the measurement of the encoded one expires
    after `_RETRY_BATCHES` raw batches in a row.
    """

    def __init__(self) -> None:
        self._s_per_byte: dict[bool, float] = {}
        self._seen: dict[bool, int] = {True: 0, False: 0}
        self._raw_since_encoded = 0

    def observe(self, nbytes: int, seconds: float, *, encoded: bool) -> None:
        """Add a batch of raw or encoded records: `nbytes` raw bytes, from request to verified."""
        if nbytes <= 0 or seconds <= 0:
            return
        self._raw_since_encoded = 0 if encoded else self._raw_since_encoded + 1
        if self._raw_since_encoded >= _RETRY_BATCHES:
            self._seen[True], self._raw_since_encoded = 0, 0
            self._s_per_byte.pop(True, None)
        self._seen[encoded] += 1
        rate, known = seconds / nbytes, self._s_per_byte.get(encoded)
        self._s_per_byte[encoded] = rate if known is None else known + (rate - known) / _BATCHES

    @property
    def knows_raw(self) -> bool:
        """Whether enough raw batches were read to compare encoded ones with."""
        return self._seen[False] >= _BATCHES

    @property
    def encoded_is_slower(self) -> bool:
        """Whether encoded records were delivered more slowly than raw ones, measured often."""
        if min(self._seen.values()) < _BATCHES:
            return False
        return self._s_per_byte[True] > self._s_per_byte[False] * SLOWER


class DecodeMeter:
    """The rate of one decoding thread: recent bytes by recent seconds, the newest weigh most."""

    def __init__(self) -> None:
        self._bytes = float(_PRIOR_BYTES)
        self._seconds = _PRIOR_BYTES / DECODE_DEFAULT

    def observe(self, nbytes: int, seconds: float) -> None:
        """Add raw bytes that one thread decoded; an impossible observation is ignored."""
        if nbytes <= 0 or seconds <= 0:
            return
        kept = 0.5 ** (nbytes / _HALF_LIFE_BYTES)
        self._bytes = self._bytes * kept + nbytes
        self._seconds = self._seconds * kept + seconds

    @property
    def bytes_per_s(self) -> float:
        """The rate in raw bytes a second."""
        return self._bytes / self._seconds
