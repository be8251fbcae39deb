"""What the engine client needs of a connection to a store: messages out, replies in, the arena.

There are two: the client of a node, over a Unix socket (`wire.local`), and that of a store in this
process (`client.embedded_client`). Both take the same messages, so all code above them is one.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol, TypeVar

from holdfast.buffers import SharedMapping
from holdfast.wire.local.messages import Reply, Request, Welcome

T = TypeVar("T")


class StoreClient(Protocol):
    """A session with a store; any thread may call any method.

    Methods raise NodeGoneError if the store does not answer any more, and RefusedError with its
    reason if it refuses a request.
    """

    address: str
    welcome: Welcome
    arena: SharedMapping | None
    """The arena of the session's domain. Places are offsets in it."""

    @abstractmethod
    def connected(self) -> bool:
        """Return whether the session stands; never waits."""

    @abstractmethod
    def send(self, message: Request) -> int:
        """Send a request; return its id for `poll`, `expect`, `wait` or `forget`."""

    @abstractmethod
    def poll(self, request_id: int) -> Reply | None:
        """Return the reply if it has arrived, else None; never waits."""

    @abstractmethod
    def expect(self, request_id: int, within_s: float) -> Reply | None:
        """Return the reply if it arrives within this short time, else None."""

    @abstractmethod
    def wait(self, request_id: int, timeout_s: float) -> Reply:
        """Return the reply; raise NodeGoneError if it does not arrive within `timeout_s`."""

    @abstractmethod
    def call(self, message: Request, kind: type[T], timeout_s: float) -> T:
        """Send a request and return its reply; raise ProtocolError if that is not a `kind`."""

    @abstractmethod
    def node_is_runnable(self) -> bool:
        """Return whether the store computes or waits for a processor, as far as is known."""

    @abstractmethod
    def forget(self, request_id: int) -> None:
        """Discard a reply; what it grants is returned to the store."""


class Connection(Protocol):
    """A way to a store that may be away for a while."""

    address: str
    refused: bool
    """Whether the store refused the last session."""

    @abstractmethod
    def client(self) -> StoreClient | None:
        """Return the client of the present session; None if there is none. Never waits."""

    @abstractmethod
    def close(self) -> None:
        """End the session."""
