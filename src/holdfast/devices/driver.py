"""The interface of a GPU's driver: the calls that a device makes, with addresses and handles.

`holdfast.testing.simulated_driver` implements it without a GPU, in an order that a seed chooses.
A call raises `DriverError` if the GPU's own driver refuses it, or has failed before.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple, Protocol, TypeAlias

from holdfast.buffers import Registrar
from holdfast.devices.base import DeviceError

Stream: TypeAlias = Any
"""A queue of work on the GPU, which runs in its order."""

Event: TypeAlias = Any
"""A point in a stream, which ends when all work before it has ended."""


class DriverError(DeviceError):
    """A call that the driver refused; the message names the call and the driver's reason."""


class Copies(NamedTuple):
    """A batch of copies between the host and the GPU, in any order: `nbytes` from `source` to `to`.

    All copies of a batch have one direction.
    """

    to: list[int]
    source: list[int]
    nbytes: list[int]


class PageTable(NamedTuple):
    """Layers whose pages have one size, as a kernel finds them.

    `bases` is the address, on the GPU, of one 64-bit address per layer. A page of a layer starts
    at its base + page * `stride_bytes`.
    """

    bases: int
    layers: int
    stride_bytes: int
    page_bytes: int
    aligned_bytes: int
    """A power of two, at most 16, that divides the page size and every address of a page."""


class PageCopy(NamedTuple):
    """One launch: pages of some layers, to or from a stage `[block][layer][page][word]`.

    `rows` is the address, in locked host memory, of `entries` pairs of 32-bit integers: a page, and
    its slot, which is block * pages_per_block + page of the block. `stage` is the address of the
    first layer of block 0, and `block_bytes` the distance of two blocks there.
    """

    table: PageTable
    rows: int
    entries: int
    stage: int
    block_bytes: int
    pages_per_block: int
    to_pages: bool
    first_layer: int = 0
    layers: int = 0
    """Layers to copy from `first_layer` on; the stage has only these."""


class PageConversion(NamedTuple):
    """One launch: pages of some layers, to or from a stage `[block][layer][head][token][byte]`.

    It copies one state, keys or values: a layer of `table` begins with its first element, and the
    layers of a block are `matrix_bytes` apart in the stage. For the other fields see `PageCopy`.
    """

    table: PageTable
    rows: int
    entries: int
    stage: int
    block_bytes: int
    pages_per_block: int
    to_pages: bool
    matrix_bytes: int
    heads: int
    tokens: int
    head_bytes: int
    """Bytes of one token of one head."""
    head_stride_bytes: int
    token_stride_bytes: int
    first_layer: int = 0
    layers: int = 0


class Driver(Registrar, Protocol):
    """The calls of one GPU's driver.

    `copy`, `launch`, `record`, `wait` and `query` take microseconds, keep the GIL and never wait;
    `bounce`, `synchronise`, `register` and `unregister` wait without the GIL.
    """

    @abstractmethod
    def create_stream(self, *, urgent: bool) -> Stream:
        """Return a new stream; work of an urgent one that uses the cores runs before others'."""

    @abstractmethod
    def engine_stream(self) -> Stream:
        """Return the stream on which the engine's calling thread queues its work."""

    @abstractmethod
    def create_event(self) -> Event:
        """Return a new event, which counts as ended until it is recorded."""

    @abstractmethod
    def allocate(self, nbytes: int) -> int:
        """Return the address of new GPU memory, at a multiple of 256, until `close`."""

    @abstractmethod
    def allocate_locked(self, nbytes: int) -> memoryview:
        """Return new locked memory of the host, which kernels can read, until `close`."""

    @abstractmethod
    def write(self, address: int, content: bytes) -> None:
        """Copy content to GPU memory, and wait for the end."""

    @abstractmethod
    def copy(self, copies: Copies, stream: Stream, *, source_complete: bool) -> None:
        """Queue copies between GPU memory and locked memory of the host.

        With `source_complete` the sources may be read at once, before earlier work of the stream.
        """

    @abstractmethod
    def bounce(self, copies: Copies, stream: Stream) -> None:
        """Copy between GPU memory and any memory of the host, in the order of the stream.

        Returns or raises when the host's memory is no longer read or written.
        """

    @abstractmethod
    def launch(self, work: PageCopy | PageConversion, stream: Stream) -> None:
        """Queue a kernel that copies or converts pages."""

    @abstractmethod
    def pause(self, stream: Stream) -> None:
        """Queue a kernel that does next to nothing: other streams' copies can go first there."""

    @abstractmethod
    def record(self, event: Event, stream: Stream) -> None:
        """Record an event at the end of the work that is queued on a stream."""

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """Let later work of a stream start after an event, as it was last recorded."""

    @abstractmethod
    def query(self, event: Event) -> bool:
        """Return, without blocking, whether an event has ended."""

    @abstractmethod
    def synchronise(self, event: Event) -> None:
        """Wait until an event has ended."""

    @abstractmethod
    def close(self) -> None:
        """Wait for all queued work, and free what was created and allocated."""
