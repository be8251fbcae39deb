"""An engine whose device pins the node's memory, for tests: it checks every byte that it loads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from holdfast.blocks.envelope import HEADER_BYTES
from holdfast.errors import ProtocolError
from holdfast.testing.payloads import is_payload_of, payload_of
from holdfast.testing.pinned_device import PinnedDevice
from holdfast.wire.local.client import Client
from holdfast.wire.local.locked_memory import LockedMemory
from holdfast.wire.local.messages import (
    PROTOCOL,
    Commit,
    Committed,
    Fetch,
    Fetched,
    Hello,
    Release,
    Released,
    Reserve,
    Reserved,
)

FINGERPRINT = b"locking-engine-1"
BLOCK_TOKENS = 128
_FETCH_S = 10.0


class LockingEngine:
    """Saves and loads blocks whose payload follows from their key, through pinned memory if it can.

    `counts`: blocks by "saved", "loaded" and "wrong", copies by "locked" and "bounced". Raises
    NodeGoneError when the session has ended, and OSError where io_uring is forbidden.
    """

    def __init__(self, address: str, domain: str, raw_bytes: int, timeout_s: float = 60.0) -> None:
        self.counts = Counter[str]()
        self.device = PinnedDevice()
        self._nbytes = raw_bytes
        self._timeout_s = timeout_s
        hello = Hello(PROTOCOL, "locking engine", FINGERPRINT, raw_bytes, BLOCK_TOKENS, domain)
        self.client = Client(address, hello, timeout_s)
        self.memory = LockedMemory(self.client, self.device)
        if self.client.arena is None:
            raise ProtocolError(f"node {address} sent no arena")
        self._arena = self.client.arena

    def save(self, keys: Sequence[bytes]) -> int:
        """Save a chain of blocks; return how many are new."""
        reserve = Reserve(b"".join(keys), FINGERPRINT, 0)
        reserved = self.client.call(reserve, Reserved, self._timeout_s)
        for key, place in zip(keys, reserved.places, strict=True):
            if place >= 0:
                self._copy_in(place + HEADER_BYTES, bytes(payload_of(key, self._nbytes)))
        committed = self.client.call(Commit(reserved.ticket), Committed, self._timeout_s)
        self.counts["saved"] += committed.blocks
        return committed.blocks

    def load(self, keys: Sequence[bytes]) -> int:
        """Load a chain's leading blocks, and check them; return how many there are.

        Bytes count, and are checked, only if the node confirms the lease after the copies.
        """
        fetch = Fetch(b"".join(keys), _FETCH_S)
        fetched = self.client.call(fetch, Fetched, self._timeout_s)
        found = [self._copy_out(place + HEADER_BYTES) for place in fetched.places]
        if not found:
            return 0
        released = self.client.call(Release(fetched.lease), Released, self._timeout_s)
        if not released.valid:
            return 0
        for key, payload in zip(keys, found, strict=False):
            self.counts["wrong"] += not is_payload_of(key, memoryview(payload))
        self.counts["loaded"] += len(found)
        return len(found)

    def close(self) -> None:
        """End the session and all locks."""
        self.memory.close()
        self.client.close()
        self.device.close()

    def _copy_in(self, at: int, payload: bytes) -> None:
        ranges = [(at, self._nbytes)]
        if self.memory.use(ranges):
            self.device.save(self._arena.address + at, payload)
            self.memory.done(ranges)
            self.counts["locked"] += 1
        else:
            self._arena.view[at : at + self._nbytes] = payload
            self._bounced(ranges)

    def _copy_out(self, at: int) -> bytes:
        ranges = [(at, self._nbytes)]
        if self.memory.use(ranges):
            payload = self.device.load(self._arena.address + at, self._nbytes)
            self.memory.done(ranges)
            self.counts["locked"] += 1
            return payload
        self._bounced(ranges)
        return bytes(self._arena.view[at : at + self._nbytes])

    def _bounced(self, ranges: Sequence[tuple[int, int]]) -> None:
        self.memory.want(ranges)
        self.counts["bounced"] += 1
