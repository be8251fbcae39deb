"""One interface to the stores that are measured, each driven by the client that its users use.

Redis through redis-py with hiredis, Mooncake Store through its own package, and both as tiers of
Holdfast. A get includes the copy of the record into the caller's buffer.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from holdfast.blocks.key import SEGMENT_BYTES
from holdfast.blocks.namespace import Namespace, namespace_digest
from holdfast.errors import HoldfastError, Outcome
from holdfast.limits import MIB
from holdfast.tiers.base import SharedTier, TierGet, TierPut, segment_place
from holdfast_bench.peers import mooncake_server, valkey_server

PREFIX = "holdfast"
"""Key prefix, the same as the tiers', so that a tier finds a record put by the peer's client."""


class MeasuredPeer(Protocol):
    """A store as its users use it. A failure raises, so a failed transfer has no figure."""

    def put(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> None:
        """Store records."""

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        """Read records into the buffers `into`."""

    @abstractmethod
    def exist(self, keys: Sequence[bytes]) -> int:
        """Return how many of the keys are held."""

    def forget(self, keys: Sequence[bytes]) -> None:
        """Make sure that the next put of the keys transfers data; not measured."""

    def clear(self) -> None:
        """Empty the store."""

    def close(self) -> None:
        """Close the connections."""


class RedisPeer:
    """redis-py with its defaults; pipelines without transactions."""

    def __init__(self, port: int, namespace: Callable[[], Namespace]) -> None:
        import redis

        self._namespace = namespace
        self._redis: Any = redis.Redis(host=valkey_server.HOST, port=port)

    def put(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        for name, record in zip(_redis_names(self._namespace(), keys), records, strict=True):
            pipeline.set(name, record)
        _expect(all(pipeline.execute()), "Redis did not store a record")

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        for name in _redis_names(self._namespace(), keys):
            pipeline.get(name)
        for found, place in zip(pipeline.execute(), into, strict=True):
            place[:] = found

    def exist(self, keys: Sequence[bytes]) -> int:
        """Query each key in one pipeline, because a cache needs to know which keys are held."""
        pipeline = self._redis.pipeline(transaction=False)
        for name in _redis_names(self._namespace(), keys):
            pipeline.exists(name)
        return sum(pipeline.execute())

    def forget(self, keys: Sequence[bytes]) -> None:
        """Delete the keys: a tier does not write a record that the server holds."""
        self._redis.unlink(*_redis_names(self._namespace(), keys))

    def clear(self) -> None:
        self._redis.flushall()

    def close(self) -> None:
        self._redis.close()


class MooncakePeer:
    """Mooncake's own client, with both memory pools registered."""

    def __init__(
        self, master: str, memories: Sequence[memoryview], namespace: Callable[[], Namespace]
    ) -> None:
        from mooncake.store import MooncakeDistributedStore

        host = mooncake_server.HOST
        self._namespace = namespace
        with _stderr_discarded():
            self._store: Any = MooncakeDistributedStore()
            done = self._store.setup(host, "P2PHANDSHAKE", 0, 16 * MIB, "tcp", "", master)
        for memory in memories:
            done = done or self._store.register_buffer(_address(memory), len(memory))
        _expect(not done, f"Mooncake's client cannot set up: {done}")

    def put(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> None:
        codes = self._store.batch_put_from(*_batch(self._namespace(), keys, records))
        _expect(not any(codes), f"Mooncake did not store a record: {codes}")

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        codes = self._store.batch_get_into(*_batch(self._namespace(), keys, into))
        _expect(
            codes == [len(place) for place in into],
            f"Mooncake did not return every record: {codes}",
        )

    def exist(self, keys: Sequence[bytes]) -> int:
        return sum(self._store.batch_is_exist(_mooncake_names(self._namespace(), keys)))

    def forget(self, keys: Sequence[bytes]) -> None:
        """Remove the keys: a put of a key that is held does nothing."""
        self._store.batch_remove(_mooncake_names(self._namespace(), keys), force=True)

    def clear(self) -> None:
        self._store.remove_all(force=True)

    def close(self) -> None:
        with _stderr_discarded():
            self._store.close()


class TierPeer:
    """A shared tier of Holdfast on the peer's servers; `peer` is the peer's own client."""

    def __init__(
        self, tier: SharedTier, namespace: Callable[[], Namespace], peer: MeasuredPeer
    ) -> None:
        self._tier = tier
        self._namespace = namespace
        self._peer = peer

    def put(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> None:
        puts = [
            TierPut(segment_place(key[:SEGMENT_BYTES]), record)
            for key, record in zip(keys, records, strict=True)
        ]
        outcomes = set(self._tier.write(puts))
        _expect(outcomes == {Outcome.OK}, f"{self._tier.name} did not store a record: {outcomes}")

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        gets = [
            TierGet(segment_place(key[:SEGMENT_BYTES]), key, place, self._namespace())
            for key, place in zip(keys, into, strict=True)
        ]
        outcomes = set(self._tier.read(gets))
        _expect(
            outcomes == {Outcome.OK}, f"{self._tier.name} did not return every record: {outcomes}"
        )

    def exist(self, keys: Sequence[bytes]) -> int:
        """Return the length of the leading run of keys that are held."""
        return self._tier.held(self._namespace(), keys, 0)

    def forget(self, keys: Sequence[bytes]) -> None:
        self._peer.forget(keys)

    def clear(self) -> None:
        self._peer.clear()

    def close(self) -> None:
        self._tier.close()


@contextmanager
def _stderr_discarded() -> Iterator[None]:
    """Discard everything that this process writes to standard error."""
    stderr = os.dup(2)
    with Path(os.devnull).open("wb") as null:
        os.dup2(null.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def _batch(
    namespace: Namespace, keys: Sequence[bytes], memories: Sequence[memoryview]
) -> tuple[list[str], list[int], list[int]]:
    addresses = [_address(memory) for memory in memories]
    return _mooncake_names(namespace, keys), addresses, [len(memory) for memory in memories]


def _mooncake_names(namespace: Namespace, keys: Sequence[bytes]) -> list[str]:
    return [f"{PREFIX}:{namespace_digest(namespace).hex()}:{key.hex()}" for key in keys]


def _redis_names(namespace: Namespace, keys: Sequence[bytes]) -> list[str]:
    digest = namespace_digest(namespace).hex()
    return [
        f"{PREFIX}:{{{segment_place(key[:SEGMENT_BYTES]):016x}}}:{digest}:{key.hex()}"
        for key in keys
    ]


def _address(memory: memoryview) -> int:
    return np.frombuffer(memory, np.uint8).ctypes.data


def _expect(ok: object, message: str) -> None:
    if not ok:
        raise HoldfastError(message)
