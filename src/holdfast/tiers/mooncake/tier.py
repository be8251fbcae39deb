"""The Mooncake tier: records under `prefix:namespace:key` in an existing Mooncake Store.

The namespace is 32 hex digits of a hash of fingerprint and domain (`namespace_digest`): the
records of one domain neither hide nor replace those of another.

Records are copied once in each direction, through memory shared with the process of Mooncake's
client. A call that ends late therefore never accesses the caller's buffers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from holdfast.address import tcp_endpoint
from holdfast.blocks.envelope import header_of_record
from holdfast.blocks.namespace import Namespace, namespace_digest, namespace_of
from holdfast.buffers import ALIGNMENT
from holdfast.clock import Clock, SystemClock
from holdfast.errors import ConfigError, Outcome
from holdfast.limits import MIB
from holdfast.tiers.base import (
    AnsweringTier,
    HeldAnswer,
    TierGet,
    TierPut,
    TierUsage,
)
from holdfast.tiers.child_process import (
    ChildLane,
    ChildLimits,
    ChildProgram,
    LaneProcess,
    SupervisedChild,
)
from holdfast.tiers.gate import MediumGate
from holdfast.tiers.mooncake.client import ClientRequest, ClientSettings, RecordSpan
from holdfast.tiers.reachability import ServerBackoff
from holdfast.tiers.transfer_counts import TransferCounts
from holdfast.tiers.unverified_records import UnverifiedRecords, check_again
from holdfast.wire.remote.buffer_pool import copy_parts
from holdfast.wire.remote.stream import Deadline, dial
from holdfast.workers import parallel, workers

if TYPE_CHECKING:
    from holdfast.tiers.mooncake.kind import MooncakeOptions

LANES = 4
"""Concurrent calls to Mooncake's client."""

LIMITS = ChildLimits(setup_s=15.0, starting_s=5.0, hung_s=1.0)
"""Time limits of the client's process; the client itself gives up connecting after about 4 s."""

PIECE_BYTES = 16 * MIB
"""Approximate size of the pieces of a batch: one piece is copied during another's transfer."""

REQUEST_KEYS_MAX = 1_000
"""Most keys in one request, so that it fits into the buffer of a local connection."""

NO_ROOM, WRONG_LENGTH, NOT_FOUND = -200, -600, -704
EXPECTED = (NO_ROOM, WRONG_LENGTH, NOT_FOUND)
"""Mooncake's error codes in normal operation: they do not count as failures."""

_STORED = {0: Outcome.OK, NO_ROOM: Outcome.FULL}


class _Item(NamedTuple):
    """One record of a batch: its index in the batch, its name, and the caller's buffer."""

    number: int
    key: str
    memory: memoryview


class MooncakeTier(AnsweringTier):
    """See `holdfast.tiers.base.SharedTier`. Opens even if no master answers yet.

    The constructor raises ConfigError if Mooncake's client is not installed.
    """

    def __init__(
        self, options: MooncakeOptions, clock: Clock | None = None, name: str = "mooncake"
    ) -> None:
        if find_spec("mooncake") is None:
            raise ConfigError(
                "Mooncake's client is not installed: pip install 'holdfast-kv[mooncake]', or, on a "
                "machine with CUDA, mooncake-transfer-engine"
            )
        self.name = name
        self.options = options
        self._backoff = ServerBackoff(f"mooncake master {options.master}", clock or SystemClock())
        self._gate = MediumGate()
        self._unverified = UnverifiedRecords()
        self._threads = workers(LANES, f"holdfast-{name}")
        self._child = SupervisedChild("Mooncake's client", self._start)
        self._counts = TransferCounts()

    def write(self, batch: Sequence[TierPut]) -> list[Outcome]:
        """Copy records to shared memory and store them; FULL if the store has no room."""
        deadline = Deadline.within(self.options.deadline_s)
        outcomes = [Outcome.GONE] * len(batch)
        items: list[_Item] = []
        replaced: dict[str, tuple[Namespace, bytes]] = {}
        for number, put in enumerate(batch):
            header = header_of_record(put.record)
            if header is None:
                outcomes[number] = Outcome.CORRUPT
                continue
            namespace = namespace_of(header)
            items.append(_Item(number, self._name(namespace, header.key), put.record))
            if self._unverified.is_replaced_by(namespace, header):
                replaced[items[-1].key] = namespace, header.key
        deleted = self._delete([*replaced], deadline)  # Mooncake does not overwrite a record
        pieces = self._pieces(items, outcomes, Outcome.FULL)
        self._parallel(pieces, lambda piece: self._write(piece, outcomes, deadline))
        for item in items:
            if item.key in deleted and outcomes[item.number] is Outcome.OK:
                self._unverified.unmark(*replaced[item.key])
        return outcomes

    def read(self, batch: Sequence[TierGet]) -> list[Outcome]:
        """Read records into shared memory and copy them to their buffers."""
        outcomes = [Outcome.GONE] * len(batch)
        items = [
            _Item(n, self._name(get.namespace, get.key), get.into) for n, get in enumerate(batch)
        ]
        deadline = Deadline.within(self.options.deadline_s)
        pieces = self._pieces(items, outcomes, Outcome.MISS)
        self._parallel(pieces, lambda piece: self._read(piece, outcomes, deadline))
        return outcomes

    def ask(
        self, namespace: Namespace, keys: Sequence[bytes], start: int, within_s: float = math.inf
    ) -> HeldAnswer:
        """Look up `REQUEST_KEYS_MAX` keys at a time, up to the first missing block.

        OK if the store has answered that the first missing block is not held.
        """
        deadline = Deadline.within(min(self.options.ask_s, within_s))
        found = 0
        while start + found < len(keys):
            some = keys[start + found : start + found + REQUEST_KEYS_MAX]
            names = [self._name(namespace, key) for key in some]
            ended, codes = self._request(ClientRequest("exist", names), deadline)
            self._counts.add(failures=ended is not Outcome.OK)
            run = next((at for at, code in enumerate(codes) if code != 1), len(codes))
            found += run
            if run < len(some):
                failed = run < len(codes) and codes[run] < 0 and codes[run] not in EXPECTED
                return HeldAnswer(found, Outcome.GONE if failed else ended)
        return HeldAnswer(found, Outcome.OK)

    def delete_corrupt(self, batch: Sequence[TierGet]) -> None:
        """Read the records again, and delete those that fail a check without a key."""
        self.delete(check_again(self.read, batch, self._unverified))

    def delete(self, batch: Sequence[TierGet]) -> None:
        """Delete records, even while they are being read."""
        names = [self._name(get.namespace, get.key) for get in batch]
        self._delete(names, Deadline.within(self.options.ask_s))

    def reachable(self) -> bool:
        """Return whether the circuit breaker permits a call to the master."""
        return self._backoff.allows()

    def describe(self) -> dict[str, Any]:
        """Return the master's address and health."""
        member = {"id": "master", "address": self.options.master, "share": 1.0, "tiers": []}
        return {"tier": self.name, "members": [member | self._backoff.health()]}

    def usage(self) -> TierUsage:
        """Return the bytes read and written and the failures; the store's usage is unknown."""
        return self._counts.usage()

    def close(self) -> None:
        """Wait for calls in progress, which end by their deadlines, and kill the process."""
        self._gate.shut()
        self._threads.shutdown(wait=True)
        self._child.close()

    def _name(self, namespace: Namespace, key: bytes) -> str:
        return f"{self.options.prefix}:{namespace_digest(namespace).hex()}:{key.hex()}"

    def _delete(self, names: Sequence[str], deadline: Deadline) -> set[str]:
        """Delete the first `REQUEST_KEYS_MAX` records; return the names that have none now."""
        some = list(names[:REQUEST_KEYS_MAX])
        if not some:
            return set()
        _, codes = self._request(ClientRequest("remove", some), deadline)
        return {name for name, code in zip(some, codes, strict=False) if code in (0, NOT_FOUND)}

    def _pieces(
        self, items: Sequence[_Item], outcomes: list[Outcome], too_large: Outcome
    ) -> Iterator[list[_Item]]:
        """Divide a batch into pieces that fit into a lane and can be transferred in parallel."""
        piece: list[_Item] = []
        left_bytes = piece_bytes = min(PIECE_BYTES, self.options.lane)
        for item in items:
            if len(item.memory) > self.options.lane:
                outcomes[item.number] = too_large
                self._backoff.record_refusal(
                    f"a record has {len(item.memory)} bytes, a lane {int(self.options.lane)}; "
                    "raise the tier's lane"
                )
                continue
            if piece and (len(item.memory) > left_bytes or len(piece) == REQUEST_KEYS_MAX):
                yield piece
                piece, left_bytes = [], piece_bytes
            piece.append(item)
            left_bytes -= len(item.memory)
        if piece:
            yield piece

    def _parallel(
        self, pieces: Iterable[Sequence[_Item]], act: Callable[[Sequence[_Item]], None]
    ) -> None:
        """Call `act` on all pieces, unless the tier is closed; return when all have ended."""
        with self._gate.enter() as admitted:
            if admitted:
                parallel(act, [*pieces], self._threads)

    def _write(self, piece: Sequence[_Item], outcomes: list[Outcome], deadline: Deadline) -> None:
        def work(lane: ChildLane) -> list[int]:
            spans = _spans(piece, lane)
            copy_parts([item.memory for item in piece], [lane.view(*span) for span in spans])
            codes = _ask(lane, ClientRequest("put", [item.key for item in piece], spans), deadline)
            for item, code in zip(piece, codes, strict=True):
                outcomes[item.number] = _STORED.get(code, Outcome.GONE)
                if code == 0:
                    self._counts.add(written_bytes=len(item.memory))
            return codes

        self._finish(self._call(work, deadline), piece, outcomes)

    def _read(self, piece: Sequence[_Item], outcomes: list[Outcome], deadline: Deadline) -> None:
        def work(lane: ChildLane) -> list[int]:
            spans = _spans(piece, lane)
            codes = _ask(lane, ClientRequest("get", [item.key for item in piece], spans), deadline)
            for item, span, code in zip(piece, spans, codes, strict=True):
                if 0 < code <= span.nbytes and not code % ALIGNMENT:
                    copy_parts([lane.view(*span)[:code]], [item.memory[:code]])
                    self._counts.add(read_bytes=code)
                    outcomes[item.number] = Outcome.OK
                elif code >= 0 or code in EXPECTED:
                    outcomes[item.number] = Outcome.MISS
            return codes

        self._finish(self._call(work, deadline), piece, outcomes)

    def _request(self, request: ClientRequest, deadline: Deadline) -> tuple[Outcome, list[int]]:
        """Send a request without records; return the outcome of the call, and the codes if OK."""
        codes: list[int] = []

        def work(lane: ChildLane) -> list[int]:
            codes.extend(_ask(lane, request, deadline))
            return codes

        with self._gate.enter() as admitted:
            return self._call(work, deadline) if admitted else Outcome.GONE, codes

    def _call(self, work: Callable[[ChildLane], list[int]], deadline: Deadline) -> Outcome:
        """Call `work` with a lane; OK if it returns, whatever its codes."""

        def attempt() -> str:
            codes = self._child.call(work, deadline)
            bad = next((code for code in codes if code < 0 and code not in EXPECTED), 0)
            self._counts.add(failures=bool(bad))
            return f"error {bad} of its client" if bad else ""

        return self._backoff.call(attempt, deadline)

    def _start(self, deadline: Deadline) -> LaneProcess:
        """Start the client, if the master accepts a connection."""
        endpoint = tcp_endpoint(self.options.master)
        with dial(endpoint, deadline) as connected:
            host = self.options.host or connected.getsockname()[0]
        settings = ClientSettings(
            "{}:{}".format(*endpoint), host, self.options.protocol, self.options.devices
        )
        return LaneProcess(
            client_program(self.options.lane), msgspec.json.encode(settings).decode()
        )

    def _finish(self, ended: Outcome, piece: Sequence[_Item], outcomes: list[Outcome]) -> None:
        if ended is not Outcome.OK:
            self._counts.add(failures=1)
            for item in piece:
                outcomes[item.number] = ended


def client_program(lane_bytes: int) -> ChildProgram:
    """Return the program of Mooncake's client, for records of at most `lane_bytes`."""
    return ChildProgram(
        module="holdfast.tiers.mooncake.client",
        label="Mooncake's client",
        memory_name="holdfast-mooncake",
        lanes=LANES,
        lane_bytes=lane_bytes,
        limits=LIMITS,
    )


def _ask(lane: ChildLane, request: ClientRequest, deadline: Deadline) -> list[int]:
    """Return one code for each key of a request."""
    answer = lane.ask(msgspec.msgpack.encode(request), deadline)
    return msgspec.msgpack.decode(answer, type=list[int])


def _spans(piece: Sequence[_Item], lane: ChildLane) -> list[RecordSpan]:
    """Return consecutive spans of a lane's memory for the records of a piece."""
    spans, offset = [], lane.offset
    for item in piece:
        spans.append(RecordSpan(offset, len(item.memory)))
        offset += len(item.memory)
    return spans
