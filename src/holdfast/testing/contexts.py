"""Contexts of a store in this process: chains saved and read, every byte of them checked."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

import numpy as np

from holdfast.blocks.world import World
from holdfast.codec.pack import payload
from holdfast.store.store import Store
from holdfast.testing.payloads import payload_of
from holdfast.tiers.base import NOWHERE

FINGERPRINT = b"campaign-print-1"
BLOCK_TOKENS = 128
PATIENCE_S = 30.0


def chain_of(name: str, blocks: int) -> list[bytes]:
    """Return the keys of a made-up context."""
    return [hashlib.blake2b(f"{name}/{i}".encode(), digest_size=16).digest() for i in range(blocks)]


class WrongByteError(AssertionError):
    """A byte was served that is not the one that was saved."""


def check_payload(key: bytes, found: memoryview) -> None:
    """Raise WrongByteError unless these are the bytes of a test block."""
    right = np.frombuffer(payload_of(key, len(found)), np.uint8)
    # Comparing memoryviews goes item by item.
    if not np.array_equal(np.frombuffer(found, np.uint8), right):
        raise WrongByteError(f"block {key.hex()} was served wrong")


class Contexts:
    """Saves and reads chains in one world; raises WrongByteError for a byte that is not right."""

    def __init__(self, store: Store, payload_bytes: int, domain: str = "default") -> None:
        self.store = store
        _, domain_id = store.domain(domain)
        self.world = World(FINGERPRINT, domain_id, payload_bytes, BLOCK_TOKENS)
        self._arena = store.arena(domain_id).view

    def await_recovery(self) -> None:
        """Wait until the store has found what earlier lives left."""
        self.store.recovery.wait(PATIENCE_S)
        if self.store.recovery.seconds is None:
            raise AssertionError(f"recovery did not end within {PATIENCE_S:g} s")

    def save(self, keys: Sequence[bytes]) -> int:
        """Save a chain; return how many blocks are new."""
        reserved = self.store.reserve(self.world, keys, self.world.fingerprint, 0)
        for key, place in zip(keys, reserved.places, strict=True):
            if place != NOWHERE:
                self._slot(place)[:] = payload_of(key, self.world.payload_bytes)
        return self.store.commit(reserved.ticket)

    def read(self, keys: Sequence[bytes], deadline_s: float = 10.0) -> int:
        """Fetch a chain, check every byte, release; return how many blocks landed."""
        fetched = self.store.fetch(self.world, keys, deadline_s)
        try:
            for key, place in zip(keys, fetched.places, strict=False):
                check_payload(key, self._slot(place))
        finally:
            self.store.release(fetched.lease)
        return len(fetched.places)

    def record(self, key: bytes) -> memoryview:
        """Return the record of a block where it lies in the arena, to be looked at or damaged."""
        states = self.store.states
        with states.lock:
            place = states.index.places[0][states.index.find(key)]
        return self._arena[place : place + self.world.record_bytes]

    def leave_host(self, keys: Sequence[bytes]) -> None:
        """Take blocks out of memory; the tiers below keep them."""
        states = self.store.states
        with states.lock:
            for key in keys:
                row = states.index.find(key)
                if row >= 0:
                    states.vacate(row, 0)

    def settle(self) -> None:
        """Wait until everything saved is written below."""
        end = time.monotonic() + PATIENCE_S
        while self.store.states.unwritten():
            if time.monotonic() > end:
                raise AssertionError(f"not written below within {PATIENCE_S:g} s")
            self.store.ladder.wake()
            time.sleep(0)

    def _slot(self, place: int) -> memoryview:
        return payload(self._arena[place:], self.world.payload_bytes)
