"""Save and read test contexts in a store of this process, and check every byte that is read."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

from holdfast.blocks.key import Chain, Tokens
from holdfast.blocks.namespace import Namespace
from holdfast.codec.pack import payload
from holdfast.errors import HoldfastError
from holdfast.limits import BLOCK_TOKENS
from holdfast.policy.retention import Retention
from holdfast.store.store import Store
from holdfast.testing.payloads import is_payload_of, payload_of
from holdfast.testing.store_control import leave
from holdfast.testing.store_view import HOST, StoreView
from holdfast.tiers.base import NOWHERE

FINGERPRINT = b"campaign-print-1"
WAIT_S = 60.0
"""Longest wait for recovery, and for pending writes."""


def chain_of(name: str, blocks: int) -> list[bytes]:
    """Return the keys of a test context; the same name gives the same keys."""
    return [hashlib.blake2b(f"{name}/{i}".encode(), digest_size=16).digest() for i in range(blocks)]


def keys_of(secret: bytes, tokens: Tokens) -> list[bytes]:
    """Return the keys of a context in the domain with this secret."""
    chain = Chain(secret, FINGERPRINT, BLOCK_TOKENS)
    chain.extend(tokens)
    return chain.keys


def place_of(store: Store, namespace: Namespace, key: bytes, tier: int = HOST) -> int:
    """Return the place of a block's copy on a tier of a store, by the tier's number."""
    return StoreView(store).place(namespace, key, tier)


class WrongByteError(AssertionError):
    """A byte that was read differs from the byte that was saved."""


def check_payload(key: bytes, found: memoryview) -> None:
    """Raise WrongByteError unless these are the bytes of a test block."""
    if not is_payload_of(key, found):
        raise WrongByteError(f"block {key.hex()} was served wrong")


class Contexts:
    """Saves and reads chains in one namespace of a store, and checks every byte read."""

    def __init__(self, store: Store, raw_bytes: int, domain: str = "default") -> None:
        self.store = store
        _, domain_id = store.domain(domain)
        self.namespace = Namespace(FINGERPRINT, domain_id, raw_bytes, BLOCK_TOKENS)
        self._arena = store.arena(domain_id).view

    def await_recovery(self) -> None:
        """Wait until the store has recovered the records of earlier processes.

        Raises HoldfastError after `WAIT_S`.
        """
        self.store.recovery.wait(WAIT_S)
        if self.store.recovery.seconds is None:
            raise HoldfastError(f"recovery did not end within {WAIT_S:g} s")

    def save(self, keys: Sequence[bytes], retention: Retention = Retention.SESSION) -> int:
        """Save the blocks of a chain that the store lacks; return how many are new."""
        reserved = self.store.reserve(self.namespace, keys, self.namespace.fingerprint, 0)
        for key, place in zip(keys, reserved.places, strict=True):
            if place != NOWHERE:
                self._slot(place)[:] = payload_of(key, self.namespace.raw_bytes)
        return self.store.commit(reserved.ticket, retention)

    def read(self, keys: Sequence[bytes], deadline_s: float = 10.0) -> int:
        """Fetch a chain, check every byte and release; return the number of blocks fetched.

        Raises WrongByteError.
        """
        fetched = self.store.fetch(self.namespace, keys, deadline_s)
        try:
            for key, place in zip(keys, fetched.places, strict=False):
                check_payload(key, self._slot(place))
        finally:
            self.store.release(fetched.lease)
        return len(fetched.places)

    def record(self, key: bytes) -> memoryview:
        """Return a writable view of a block's record in the arena."""
        place = place_of(self.store, self.namespace, key)
        return self._arena[place : place + self.namespace.slot_bytes]

    def leave_host(self, keys: Sequence[bytes]) -> None:
        """Remove blocks from the host tier; lower tiers keep their copies."""
        leave(self.store, self.namespace, keys)

    def wait_written(self) -> None:
        """Wait until no write to a lower tier is pending. Raises HoldfastError after `WAIT_S`."""
        end = time.monotonic() + WAIT_S
        view = StoreView(self.store)
        while view.writing():
            if time.monotonic() > end:
                raise HoldfastError(f"blocks are still not written after {WAIT_S:g} s")
            self.store.mover.wake()
            time.sleep(0)

    def _slot(self, place: int) -> memoryview:
        return payload(self._arena[place:], self.namespace.raw_bytes)
