"""Acknowledgements of an engine's durable requests: which of their blocks the durable tier keeps.

The node is asked while a request runs, about the blocks saved so far, and once more at its end: in
each KV group about those that a resume after all of them needs. At most one question of a request
is on its way. No call waits.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence

from holdfast.blocks.key import KEY_BYTES
from holdfast.errors import NodeGoneError, RefusedError
from holdfast.wire.local.client import Client
from holdfast.wire.local.messages import Hinted, Sync

SYNC_S = 20.0
"""Time that the node has to write and flush the blocks of one question."""

AGAIN_S = 0.5
"""Shortest time between two questions of a running request."""

IDLE_S = 1.0
"""Time for which an idle engine goes on to ask for acknowledgements of requests that have ended."""


_log = logging.getLogger(__name__)


class _DurableRequest:
    """One durable request: its clients, one for each rank, and the blocks saved so far.

    `needed`: by KV group, the keys that a resume after `blocks` leading blocks needs. `asked`:
    leading blocks of the question under way, 0 without one; `counts`: those of each group that it
    names. `replies`: acknowledged ones of each group, the fewest of all ranks. `kept`: leading
    blocks that are acknowledged.
    """

    def __init__(self) -> None:
        self.clients: Sequence[Client] = ()
        self.needed: Mapping[int, tuple[bytes, ...]] = {}
        self.blocks = 0
        self.waiting: list[tuple[Client, int, int]] = []
        self.asked = self.kept = 0
        self.counts: dict[int, int] = {}
        self.replies: dict[int, int] = {}
        self.asked_at_s = 0.0
        self.ended_at_s: float | None = None

    def ask(self, now_s: float) -> None:
        """Ask about all blocks so far; raises NodeGoneError."""
        self.asked, self.asked_at_s = self.blocks, now_s
        self.counts = {group: len(keys[0]) // KEY_BYTES for group, keys in self.needed.items()}
        self.replies = dict(self.counts)
        for group, every_rank in self.needed.items():
            for client, keys in zip(self.clients, every_rank, strict=True):
                sync = Sync(keys, SYNC_S, group, saving=True)
                self.waiting.append((client, client.send(sync), group))

    def poll(self) -> bool:
        """Read replies; return whether the answer is complete. Raises what `Client.poll` does."""
        still = list[tuple[Client, int, int]]()
        for client, request_id, group in self.waiting:
            reply = client.poll(request_id)
            if reply is None:
                still.append((client, request_id, group))
            else:
                blocks = reply.blocks if isinstance(reply, Hinted) else 0
                self.replies[group] = min(self.replies[group], blocks)
        self.waiting = still
        return not still

    @property
    def acknowledged(self) -> int:
        """Leading blocks that the complete answer acknowledges.

        A resume after fewer blocks than asked about needs other ones, unless the only group was
        asked about all its blocks from the first one on.
        """
        if self.replies == self.counts:
            return self.asked
        return min(self.replies.values()) if [*self.counts.values()] == [self.asked] else 0

    def forget(self) -> None:
        """Ignore replies that are on their way."""
        for client, request_id, _ in self.waiting:
            with contextlib.suppress(NodeGoneError):
                client.forget(request_id)
        self.waiting, self.asked = [], 0


class DurableRequests:
    """The durable requests of one engine whose blocks are not all acknowledged."""

    def __init__(self) -> None:
        self._requests: dict[str, _DurableRequest] = {}
        self._was_refused = False

    def saved(
        self,
        request_id: str,
        clients: Sequence[Client],
        blocks: int,
        needed: Mapping[int, tuple[bytes, ...]],
    ) -> None:
        """Note that workers save `blocks` leading blocks of a durable request.

        `needed`: by KV group, the keys that a resume after them needs, one string per rank.
        """
        request = self._requests.setdefault(request_id, _DurableRequest())
        request.clients, request.blocks, request.needed = clients, blocks, needed

    def blocks(self, request_id: str) -> int:
        """Return how many blocks of a request are noted."""
        request = self._requests.get(request_id)
        return request.blocks if request is not None else 0

    def kept(self, request_id: str) -> int:
        """Return how many leading blocks of a request are acknowledged."""
        request = self._requests.get(request_id)
        return request.kept if request is not None else 0

    def ended(self, request_id: str, now_s: float) -> None:
        """Note that a request has ended, after its last `saved`."""
        if (request := self._requests.get(request_id)) is not None:
            request.ended_at_s = now_s

    def is_awaited(self, now_s: float) -> bool:
        """Return whether an idle engine should go on to poll."""
        return any(
            request.ended_at_s is not None and now_s - request.ended_at_s < IDLE_S
            for request in self._requests.values()
        )

    def poll(self, now_s: float) -> Iterator[tuple[str, int]]:
        """Read replies and ask again; yield `kept` and `late` with numbers of blocks to count.

        Blocks are late if the node did not acknowledge them in time, or cannot.
        """
        for request_id, request in list(self._requests.items()):
            before = request.kept
            try:
                is_settled = self._advance(request, now_s)
            except (NodeGoneError, RefusedError) as error:
                request.forget()
                is_settled = True
                if isinstance(error, RefusedError) and not self._was_refused:
                    self._was_refused = True
                    _log.warning("durable blocks are not acknowledged: %s", error)
            yield "kept", request.kept - before
            if is_settled and request.ended_at_s is not None:
                yield "late", request.blocks - request.kept
                del self._requests[request_id]

    @staticmethod
    def _advance(request: _DurableRequest, now_s: float) -> bool:
        """Read replies, or ask; return whether nothing is on its way, or to be asked."""
        if request.asked:
            if not request.poll():
                return False
            request.kept = max(request.kept, request.acknowledged)
            was_whole = request.asked == request.blocks
            request.asked = 0
            if was_whole:
                return True
        is_due = request.ended_at_s is not None or now_s - request.asked_at_s >= AGAIN_S
        if request.kept < request.blocks and is_due:
            request.ask(now_s)
            return False
        return True

    def forget(self, request_id: str) -> None:
        """Stop waiting for a request's acknowledgements."""
        if (request := self._requests.pop(request_id, None)) is not None:
            request.forget()
