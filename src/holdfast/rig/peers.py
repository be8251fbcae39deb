"""Other stores behind one face, each with the client that its users have, to be measured.

Redis through redis-py with hiredis, Mooncake Store through its own package; and both again as
tiers of Holdfast. A get is done when the record lies where it is wanted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from holdfast.blocks.key import SEGMENT_BYTES
from holdfast.blocks.world import World
from holdfast.errors import HoldfastError, Outcome
from holdfast.limits import MIB
from holdfast.rig import mooncake_server, valkey_server
from holdfast.tiers.base import Get, Put, Shared, segment_place

PREFIX = "holdfast"
"""As the tiers have it, so that a record put by one is found by the other."""


class Peer(Protocol):
    """A store as its users use it. Failures are exceptions: then there is no figure."""

    def put(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> None:
        """Store records."""
        ...

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        """Bring records to their places."""
        ...

    def exist(self, keys: Sequence[bytes]) -> int:
        """Count those that are held."""
        ...

    def forget(self, keys: Sequence[bytes]) -> None:
        """Make the next put a real one; not measured."""
        ...

    def clear(self) -> None:
        """Empty the store."""
        ...

    def close(self) -> None:
        """Close the connections."""
        ...


class RedisPeer:
    """redis-py as it comes, pipelines without transactions."""

    def __init__(self, port: int) -> None:
        import redis

        self._redis: Any = redis.Redis(host=valkey_server.HOST, port=port)

    def put(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> None:
        """Set all in one pipeline."""
        pipeline = self._redis.pipeline(transaction=False)
        for name, record in zip(_tagged(keys), records, strict=True):
            pipeline.set(name, record)
        _expect(all(pipeline.execute()), "Redis did not take a record")

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        """Get all in one pipeline, then copy each to its place."""
        pipeline = self._redis.pipeline(transaction=False)
        for name in _tagged(keys):
            pipeline.get(name)
        for found, place in zip(pipeline.execute(), into, strict=True):
            place[:] = found

    def exist(self, keys: Sequence[bytes]) -> int:
        """Ask for each in one pipeline: which ones, not just how many."""
        pipeline = self._redis.pipeline(transaction=False)
        for name in _tagged(keys):
            pipeline.exists(name)
        return sum(pipeline.execute())

    def forget(self, keys: Sequence[bytes]) -> None:
        """Nothing: a record is set again as if it were new."""

    def clear(self) -> None:
        """Empty the server."""
        self._redis.flushall()

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()


class MooncakePeer:
    """Mooncake's own client, with both memories registered."""

    def __init__(self, master: str, memories: Sequence[memoryview]) -> None:
        from mooncake.store import MooncakeDistributedStore

        host = mooncake_server.HOST
        with _hushed():
            self._store: Any = MooncakeDistributedStore()
            done = self._store.setup(host, "P2PHANDSHAKE", 0, 16 * MIB, "tcp", "", master)
        for memory in memories:
            done = done or self._store.register_buffer(_address(memory), len(memory))
        _expect(not done, f"Mooncake's client can not set up: {done}")

    def put(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> None:
        """Put all in one call."""
        codes = self._store.batch_put_from(*_named(keys, records))
        _expect(not any(codes), f"Mooncake did not take a record: {codes}")

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        """Get all in one call."""
        codes = self._store.batch_get_into(*_named(keys, into))
        _expect(codes == [len(place) for place in into], f"Mooncake did not bring all: {codes}")

    def exist(self, keys: Sequence[bytes]) -> int:
        """Ask for all in one call."""
        return sum(self._store.batch_is_exist(_names(keys)))

    def forget(self, keys: Sequence[bytes]) -> None:
        """Remove them: a put of what is there does nothing."""
        self._store.batch_remove(_names(keys), force=True)

    def clear(self) -> None:
        """Remove everything."""
        self._store.remove_all(force=True)

    def close(self) -> None:
        """Close the client."""
        with _hushed():
            self._store.close()


class TierPeer:
    """A shared tier of Holdfast over the same servers."""

    def __init__(self, tier: Shared, world: Callable[[], World], beside: Peer) -> None:
        self._tier = tier
        self._world = world
        self._beside = beside

    def put(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> None:
        """Write a batch."""
        puts = [
            Put(segment_place(key[:SEGMENT_BYTES]), record)
            for key, record in zip(keys, records, strict=True)
        ]
        outcomes = set(self._tier.write(puts))
        _expect(outcomes == {Outcome.OK}, f"{self._tier.name} did not take a record: {outcomes}")

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        """Read a batch."""
        gets = [
            Get(segment_place(key[:SEGMENT_BYTES]), key, place, self._world())
            for key, place in zip(keys, into, strict=True)
        ]
        outcomes = set(self._tier.read(gets))
        _expect(outcomes == {Outcome.OK}, f"{self._tier.name} did not bring all: {outcomes}")

    def exist(self, keys: Sequence[bytes]) -> int:
        """Ask for the leading run."""
        return self._tier.held(self._world(), keys, 0)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Forget by the store's own client."""
        self._beside.forget(keys)

    def clear(self) -> None:
        """Empty the store by its own client."""
        self._beside.clear()

    def close(self) -> None:
        """Close the tier."""
        self._tier.close()


@contextmanager
def _hushed() -> Iterator[None]:
    """Send what a library writes to standard error nowhere."""
    kept = os.dup(2)
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _named(
    keys: Sequence[bytes], memories: Sequence[memoryview]
) -> tuple[list[str], list[int], list[int]]:
    return _names(keys), [_address(memory) for memory in memories], [len(m) for m in memories]


def _names(keys: Sequence[bytes]) -> list[str]:
    return [f"{PREFIX}:{key.hex()}" for key in keys]


def _tagged(keys: Sequence[bytes]) -> list[str]:
    return [f"{PREFIX}:{{{segment_place(key[:SEGMENT_BYTES]):016x}}}:{key.hex()}" for key in keys]


def _address(memory: memoryview) -> int:
    address: int = np.frombuffer(memory, np.uint8).ctypes.data
    return address


def _expect(went_well: bool, words: str) -> None:  # noqa: FBT001  # a finding, not a switch
    if not went_well:
        raise HoldfastError(words)
