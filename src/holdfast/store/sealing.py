"""Sealing: which records are sealed when they leave the host, and which are trusted on return.

Records in the host arena are plain, because their domain's engines map it. A domain whose blocks
are sealed trusts sealed records only, because any process with access to a tier can write a plain
one. A record of a foreign domain is kept as received; its reader verifies it.
"""

from __future__ import annotations

import enum
import logging
import math
import secrets
from array import array
from collections import Counter
from collections.abc import Callable, Container, Sequence

from holdfast.blocks.envelope import (
    NONCE_BYTES,
    SEAL_AES_GCM,
    SEAL_NONE,
    Header,
    read_header,
)
from holdfast.blocks.namespace import Namespace
from holdfast.buffers import aligned_buffer
from holdfast.clock import Clock
from holdfast.codec.pack import lengths_agree, matches
from holdfast.codec.seal import DataKey, Sealer
from holdfast.errors import FormatError, Outcome, UnknownFormatError
from holdfast.keys.keyring import KeyRing
from holdfast.keys.keyring_watch import KeyRingWatch

UNREADABLE_LOG_S = 60.0
"""Shortest time between two log lines about unreadable records of one domain, in seconds."""

LOOK_AGAIN_S = 1.0
"""Shortest time between two readings of the ring's file for the same missing key, in seconds."""

UNKNOWN_EPOCH = 0
"""The copy is not sealed, or another node sealed it: epochs count from 1."""

_log = logging.getLogger("holdfast.store")


class Openable(enum.Enum):
    """Whether a record can be opened.

    NEVER: its data key was destroyed, or it is plain although its domain is sealed.
    WITH_ANOTHER_RING: it is sealed with a key that this ring never had.
    """

    NOW = "now"
    WITH_ANOTHER_RING = "with another ring"
    NEVER = "never"


class Sealing:
    """Seals and opens the records of one store, for the domains that are enrolled on its ring.

    `ours`: ids of the domains whose arenas are here. With an empty `ring`, nothing is sealed.
    `unreadable`: by domain, the number of whole records that could not be opened here, or are not
    trusted.
    """

    def __init__(self, ours: Container[bytes], ring: KeyRing, clock: Clock) -> None:
        self._ours = ours
        self.unreadable = Counter[bytes]()
        self._logged_s: dict[bytes, float] = {}
        self._looked_s: dict[tuple[bytes, int, bytes], float] = {}
        """The last missing data key for which the ring's file was read, and when."""
        self._clock = clock
        self.ring = ring
        self.watch = KeyRingWatch(ring, clock)
        self._sealed = frozenset(ring.enrolled())

    def seals(self, domain: bytes) -> bool:
        """Return whether blocks of a domain leave this host sealed."""
        return domain in self._sealed

    def is_away(self, domain: bytes) -> bool:
        """Return whether a domain's keys are unavailable: its blocks are not served or judged."""
        return domain in self._sealed and self.ring.is_away(domain)

    def sealer(self, record: memoryview, domain: bytes) -> Sealer | Outcome:
        """Return the sealer of a plain record: CORRUPT for a damaged header, GONE without a key.

        A caller that seals several records makes all sealers first.
        """
        key = self.ring.current(domain)
        if key is None:
            return Outcome.GONE
        return key.sealer(record, secrets.token_bytes(NONCE_BYTES)) or Outcome.CORRUPT

    def sealed_copies(self, records: Sequence[memoryview], domain: bytes) -> list[memoryview]:
        """Return sealed copies of leading records, in memory of their own, up to a damaged one."""
        sealers = [self.sealer(record, domain) for record in records]
        copies = []
        for record, sealer in zip(records, sealers, strict=True):
            into = aligned_buffer(len(record))
            if isinstance(sealer, Outcome) or sealer.seal(record, into) is not Outcome.OK:
                break
            copies.append(into)
        return copies

    def check_and_open(self, record: memoryview, key: bytes, namespace: Namespace) -> Outcome:
        """Check a record from below the host and open it in place.

        OK: the requested block, plain if its domain is ours. MISS: another block. UNREADABLE:
        sealed with a key that is not on the ring, plain although its domain is sealed, or of a
        record format that this build does not know. The first two are counted, and logged at most
        once in `UNREADABLE_LOG_S` per domain. CORRUPT: anything else. The record may be encoded,
        before and after.
        """
        return self._check(record, key, namespace, DataKey.open)

    def check_and_decrypt(self, record: memoryview, key: bytes, namespace: Namespace) -> Outcome:
        """Check and decrypt like `check_and_open`, but write no tag: the record is decoded next."""
        return self._check(record, key, namespace, DataKey.decrypt)

    def _check(
        self,
        record: memoryview,
        key: bytes,
        namespace: Namespace,
        unseal: Callable[[DataKey, memoryview], Outcome],
    ) -> Outcome:
        try:
            header, _ = read_header(record)
        except UnknownFormatError:
            return Outcome.UNREADABLE
        except FormatError:
            return Outcome.CORRUPT
        wanted = (key, namespace.fingerprint, namespace.domain)
        if (header.key, header.fingerprint, header.domain) != wanted:
            return Outcome.MISS
        if header.raw_bytes != namespace.raw_bytes or not lengths_agree(header):
            return Outcome.CORRUPT
        if header.seal == SEAL_NONE:
            return self._check_plain(record, header)
        return self._open(record, header, unseal)

    def _check_plain(self, record: memoryview, header: Header) -> Outcome:
        if not matches(record, header):
            return Outcome.CORRUPT
        if self.seals(header.domain):
            return self._note_unreadable(header, "not sealed")
        return Outcome.OK

    def _open(
        self,
        record: memoryview,
        header: Header,
        unseal: Callable[[DataKey, memoryview], Outcome],
    ) -> Outcome:
        """Open a sealed record in place; a record of a foreign domain is left as it is."""
        if header.seal != SEAL_AES_GCM or len(record) < header.stored_bytes:
            return Outcome.CORRUPT
        if header.domain not in self._ours:
            return Outcome.OK
        if not self._sealed:
            return self._note_unreadable(header, "sealed, and this host has no key ring")
        data_key = self._find_key(header)
        if data_key is None:
            name = f"epoch {header.epoch}, key id {header.key_id.hex()}"
            why = f"sealed with a data key ({name}) that is not on this host's key ring"
            return self._note_unreadable(header, why)
        return unseal(data_key, record)

    def _find_key(self, header: Header) -> DataKey | None:
        """Return the data key that a header names, reading the ring's file for one that is missing.

        Records in a row that name the same missing key read the file once in `LOOK_AGAIN_S`.
        """
        named, now_s = (header.domain, header.epoch, header.key_id), self._clock.now()
        found = self.ring.find(*named)
        if found is None and now_s >= self._looked_s.get(named, -math.inf) + LOOK_AGAIN_S:
            self.watch.look_briefly()  # another node may just have begun this epoch
            if self.watch.read_at >= now_s:  # the file was read, and not only begun to be
                self._looked_s = {named: now_s}  # the latest only: a record may name any key
            found = self.ring.find(*named)
        return found

    def _note_unreadable(self, header: Header, why: str) -> Outcome:
        """Count a whole record that cannot be used here, and log it at most once in a while."""
        domain, now_s = header.domain, self._clock.now()
        self.unreadable[domain] += 1
        last_s = self._logged_s.get(domain)
        if last_s is None or now_s >= last_s + UNREADABLE_LOG_S:
            self._logged_s[domain] = now_s
            name = self.ring.name(domain) if self.seals(domain) else ""
            _log.warning(
                "records of domain %s are misses here, %d so far: %s; tiers keep them until they "
                "need the space. Give all hosts that share a tier the same `keyring` file and the "
                "same `seal` for the domain",
                repr(name) if name else domain.hex(), self.unreadable[domain], why,
            )  # fmt: skip
        return Outcome.UNREADABLE

    def erasures(self, domain: bytes) -> int:
        """Return how many erasures of a domain the ring has recorded."""
        return self.ring.erasures.seen.get(domain, 0)

    def must_open(self, header: Header) -> bool:
        """Return whether a received record must be opened: it or its domain is sealed, and ours."""
        return header.domain in self._ours and (
            header.seal != SEAL_NONE or self.seals(header.domain)
        )

    def is_retired(self, domain: bytes, epoch: int) -> bool:
        """Return whether the data key of an epoch is off the ring, so that its records are lost.

        False while the ring is unavailable, and for epoch 0, which no key has.
        """
        if not epoch or self.ring.is_away(domain):
            return False
        return not self.ring.opens(domain, epoch)

    def predates_sealing(self, header: Header) -> bool:
        """Return whether a record is plain, from before its domain was sealed."""
        return header.seal == SEAL_NONE and self.seals(header.domain)

    def openable(self, header: Header) -> Openable:
        """Return whether a record can be opened here, judging by its header alone."""
        if header.domain not in self._ours or self.is_away(header.domain):
            return Openable.NOW
        if header.seal == SEAL_NONE:
            return Openable.NEVER if self.seals(header.domain) else Openable.NOW
        if self.ring.find(header.domain, header.epoch, header.key_id) is not None:
            return Openable.NOW
        destroyed = self.ring.has_destroyed(header.domain, header.epoch)
        return Openable.NEVER if destroyed else Openable.WITH_ANOTHER_RING


class CopyEpochs:
    """The epoch of the data key that each copy is sealed with, on `tiers` lower tiers from 1.

    A copy whose key was destroyed cannot be opened. The record's header names the epoch, but
    reading every header of a tier takes minutes, so it is kept here: 4 bytes for each row and tier.

    Not thread-safe: the store calls it under its lock. The entry of a row holds until another copy
    is noted there, so ask only about copies that the index has.
    """

    def __init__(self, tiers: int) -> None:
        self._epochs = [array("I") for _ in range(tiers)]

    def note(self, row: int, tier: int, epoch: int) -> None:
        """Record the epoch of a copy that was just published."""
        epochs = self._epochs[tier - 1]
        if row >= len(epochs):
            if epoch == UNKNOWN_EPOCH:
                return
            epochs.extend([UNKNOWN_EPOCH] * (row + 1 - len(epochs)))
        epochs[row] = epoch

    def of(self, row: int, tier: int) -> int:
        """Return the epoch of the copy that the index has of a row on a tier."""
        epochs = self._epochs[tier - 1]
        return epochs[row] if row < len(epochs) else UNKNOWN_EPOCH
