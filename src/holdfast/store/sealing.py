"""What is sealed when it leaves the host, and what may be believed of what comes back.

Records in the host arena are plain: their domain's engines map it. A domain whose blocks are
sealed believes sealed records only, since anybody can write a plain one. A record of a domain that
is not ours is kept as it came: its reader checks it.
"""

from __future__ import annotations

import secrets
from collections.abc import Container, Sequence

from holdfast.blocks.envelope import (
    CODEC_NONE,
    NONCE_BYTES,
    SEAL_AES_GCM,
    SEAL_NONE,
    Header,
    read_header,
)
from holdfast.blocks.world import World
from holdfast.buffers import aligned_buffer
from holdfast.clock import Clock, SystemClock
from holdfast.codec.pack import verify
from holdfast.codec.seal import Sealer
from holdfast.errors import FormatError, Outcome
from holdfast.store.keyring import KeyRing
from holdfast.store.ring_watch import RingWatch


class Sealing:
    """Seals and opens the records of one store. Seals nothing until `begin`.

    `ours` holds the ids of the domains whose arenas are here.
    """

    def __init__(self, ours: Container[bytes]) -> None:
        self._ours = ours
        self._sealed: frozenset[bytes] = frozenset()
        self.ring: KeyRing | None = None
        self.watch: RingWatch | None = None

    def begin(self, ring: KeyRing, clock: Clock | None = None) -> None:
        """Seal the blocks of every domain enrolled on the ring."""
        self.ring, self.watch = ring, RingWatch(ring, clock or SystemClock())
        self._sealed = frozenset(ring.enrolled())

    def seals(self, domain: bytes) -> bool:
        """Return whether blocks of a domain leave this host sealed."""
        return domain in self._sealed

    def is_away(self, domain: bytes) -> bool:
        """Return whether a domain's keys are away for now: nothing of it is served or judged."""
        return domain in self._sealed and self.ring is not None and self.ring.is_away(domain)

    def sealer(self, record: memoryview, domain: bytes) -> Sealer | Outcome:
        """Return what seals a plain record: CORRUPT if its header is damaged, GONE without a key.

        Whoever seals several records makes all their sealers first.
        """
        key = self.ring.current(domain) if self.ring else None
        if key is None:
            return Outcome.GONE
        return key.sealer(record, secrets.token_bytes(NONCE_BYTES)) or Outcome.CORRUPT

    def twins(
        self, records: Sequence[memoryview], sealers: Sequence[Sealer | Outcome]
    ) -> list[memoryview]:
        """Return sealed twins of leading records, in memory of their own: up to a damaged one."""
        twins = []
        for record, sealer in zip(records, sealers, strict=True):
            into = aligned_buffer(len(record))
            if isinstance(sealer, Outcome) or sealer.seal(record, into) is not Outcome.OK:
                break
            twins.append(into)
        return twins

    def land(self, record: memoryview, key: bytes, world: World) -> Outcome:
        """Check a record from below the host and open it where it lies.

        OK: it is the one wanted, plain if its domain is ours. MISS: another block, or sealed with
        a key that is not on the ring. CORRUPT: anything else.
        """
        try:
            header, _ = read_header(record)
        except FormatError:
            return Outcome.CORRUPT
        named = _named(header, key, world)
        if named is not Outcome.OK:
            return named
        if header.seal == SEAL_NONE and not self.seals(world.domain):
            return verify(record, key, world.fingerprint, world.payload_bytes)
        if header.seal != SEAL_AES_GCM or len(record) < world.record_bytes:
            return Outcome.CORRUPT
        return self._open(record, header) if world.domain in self._ours else Outcome.OK

    def _open(self, record: memoryview, header: Header) -> Outcome:
        if self.ring is None or self.watch is None:
            return Outcome.MISS
        key = self.ring.find(header.domain, header.epoch, header.key_id)
        if key is None:
            self.watch.glance()  # another node may just have begun this epoch
            key = self.ring.find(header.domain, header.epoch, header.key_id)
        return key.open(record) if key else Outcome.MISS

    def erasures(self, domain: bytes) -> int:
        """Return how many erasures of a domain the ring has seen."""
        return self.ring.erasures(domain) if self.ring else 0

    def checks(self, header: Header) -> bool:
        """Return whether a record that arrived whole must land, too: sealed, or in such a domain.

        Only for domains that are ours; nobody else could.
        """
        return header.domain in self._ours and (
            header.seal != SEAL_NONE or self.seals(header.domain)
        )

    def disowns(self, header: Header) -> bool:
        """Return whether a record lies in the clear, from before its domain was sealed."""
        return header.seal == SEAL_NONE and self.seals(header.domain)

    def may_open(self, header: Header) -> bool:
        """Return whether a record with this header could land here, going by its header alone."""
        if header.domain not in self._ours or self.is_away(header.domain):
            return True
        if header.seal == SEAL_NONE:
            return not self.seals(header.domain)
        key = self.ring and self.ring.find(header.domain, header.epoch, header.key_id)
        return key is not None


def _named(header: Header, key: bytes, world: World) -> Outcome:
    """Return whether a header is that of the block wanted."""
    if (header.key, header.fingerprint, header.domain) != (key, world.fingerprint, world.domain):
        return Outcome.MISS
    readable = header.payload_bytes == world.payload_bytes and header.codec == CODEC_NONE
    return Outcome.OK if readable else Outcome.CORRUPT
