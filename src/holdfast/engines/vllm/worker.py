"""The worker side: pages in and out of the arena, beside the model's steps."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from holdfast.blocks.envelope import HEADER_BYTES
from holdfast.devices.base import Device, Move, Transfer
from holdfast.engines.vllm.counters import Counts
from holdfast.engines.vllm.loader import Ended, Job, Loader
from holdfast.engines.vllm.options import Setting
from holdfast.engines.vllm.patience import Patience
from holdfast.engines.vllm.scheduler import Lender
from holdfast.engines.vllm.work import Load, Said, Save, Work
from holdfast.errors import NodeGoneError, Outcome, ProtocolError, RefusedError
from holdfast.limits import RECLAIM_S
from holdfast.wire.client import Client
from holdfast.wire.messages import Abort, Commit, Committed, Reserve, Reserved

RESERVE_S = 0.1
"""How long a step may wait for slots at its end; they were asked for at its beginning."""

POLL_S = 0.0002
REST_S = 0.002
"""How long a step without a forward leaves the interpreter to loads."""

COMMIT_S = 1.0
"""How long an engine's end waits for the node to take what was saved last."""

DEADLINE_MIN_S = 0.01
"""Less than this is lost to chance on any machine."""

_log = logging.getLogger("vllm.holdfast")


class Asked(NamedTuple):
    """Slots asked for: the save they are for, and the request on its way."""

    save: Save
    client: Client
    request_id: int
    at_s: float


class Flying(NamedTuple):
    """Pages on their way to the arena, and what to commit when they are there."""

    transfer: Transfer
    client: Client
    tickets: Sequence[Commit]


class WorkerSide:
    """Moves blocks for one tensor-parallel rank."""

    def __init__(
        self,
        link: Lender,
        device: Device,
        rank: int,
        setting: Setting,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = Counts()
        self._link = link
        self._device = device
        self._rank = rank
        self._deadline_max_s = setting.fetch_deadline_s
        self._now = now
        self._patience = Patience()
        self._loader = Loader(device, link)
        self._asked: list[Asked] = []
        self._flying: list[Flying] = []
        self._committing: list[tuple[Client, int]] = []
        self._failed: set[int] = set()
        self._moving = True  # what the scheduler side was told last; of us it has not heard yet

    def begin(self, work: Work) -> None:
        """Before the forward: ask for the slots that its end will fill."""
        self._land()
        self._read_commits()
        for save in work.saves:
            client = self._link.client()
            if client is None or client.arena is None:
                self.counts.add("gone_saves")
                continue
            try:
                self._asked.append(self._ask(client, save))
            except (NodeGoneError, ProtocolError):
                self.counts.add("gone_saves")

    def start_loads(self, work: Work) -> None:
        """Hand this step's loads to the loading thread."""
        if work.loads:
            after = self._device.mark()
            self._loader.put(
                Job(load, load.keys[self._rank], self._deadline_s(load), after)
                for load in work.loads
            )

    def save(self, work: Work) -> None:
        """After the forward: copy full blocks into their slots."""
        if not work.tokens:
            # Nothing was computed, so vLLM waits for loads or answers and would only spin.
            if not self._loader.rest(REST_S):
                time.sleep(POLL_S)
            self._land()
            return
        asked, self._asked = self._asked, []
        for client, group in _by_client(asked):
            try:
                self._fill(client, group)
            except (NodeGoneError, ProtocolError):
                self.counts.add("gone_saves", len(group))
            except Exception:  # noqa: BLE001  # a device out of memory, say: an engine runs on
                _log.exception("blocks not saved")
                self.counts.add("failed_saves", len(group))
        self._land()

    def ended(self) -> set[str]:
        """Return the requests whose loads are over; `failed_pages` has what did not arrive."""
        ended: list[Ended] = self._loader.take(self.counts)
        for each in ended:
            self._failed.update(each.failed)
        return {each.request for each in ended}

    def failed_pages(self) -> set[int]:
        """Return the pages of ended loads that must be computed; each is reported once."""
        failed, self._failed = self._failed, set()
        return failed

    def said(self, work: Work) -> Said | None:
        """Return what the scheduler side has to know about this step's end, if anything."""
        before, self._moving = self._moving, bool(self._asked or self._flying)
        # The last word counts until the next: that nothing moves any more has to be said, too.
        if not (work.tokens or self._moving or before):
            return None
        return Said(work.tokens > 0, self._moving)

    def close(self) -> None:
        """Stop, with nothing moving any more; what was copied is published before."""
        try:
            self._land_all()
        except Exception:  # noqa: BLE001  # a device that failed: the rest is to end all the same
            _log.exception("blocks not saved")
        self._link.close()
        self._loader.close()
        self._device.close()

    def _ask(self, client: Client, save: Save) -> Asked:
        rank = self._rank
        message = Reserve(save.keys[rank], save.parents[rank], save.depth, save.segments[rank])
        return Asked(save, client, client.send(message), self._now())

    def _fill(self, client: Client, asked: Sequence[Asked]) -> None:
        """Copy the pages of these saves into the slots they were given."""
        moves: list[Move] = []
        tickets: list[Commit] = []
        until_s = self._now() + self._patience.of(RESERVE_S)
        try:
            for each in asked:
                reserved = self._slots(client, each, until_s)
                if reserved is None:
                    continue
                self.counts.add("full_saves", reserved.outcome == Outcome.FULL)
                if reserved.ticket:
                    tickets.append(Commit(reserved.ticket, each.save.retention))
                    moves += self._moves(each.save, reserved.places)
            if tickets and client.arena is not None:
                transfer = self._device.gather(client.arena, moves)
                self._flying.append(Flying(transfer, client, tickets))
        except Exception:  # whatever it was: nobody else would give the slots back
            self._give_back(client, asked, tickets)
            raise

    def _give_back(self, client: Client, asked: Sequence[Asked], tickets: Sequence[Commit]) -> None:
        """Let others have slots that are not filled: without a word they would be ours for ever.

        Only where nothing moves: a device that could not gather has seen to that before it raised.
        """
        with contextlib.suppress(NodeGoneError):  # then the node takes back all that we had
            for each in asked:
                client.forget(each.request_id)
            for commit in tickets:
                client.forget(client.send(Abort(commit.ticket)))

    def _slots(self, client: Client, asked: Asked, until_s: float) -> Reserved | None:
        """Return the slots given, None if they are late or refused."""
        if self._now() - asked.at_s > RECLAIM_S / 2:
            # A very long step: if our domain was erased meanwhile, others get these slots
            # RECLAIM_S later, perhaps while we write to them.
            client.forget(asked.request_id)
            asked = self._ask(client, asked.save)
        try:
            while (reply := client.poll(asked.request_id)) is None:
                if self._now() > until_s:
                    client.forget(asked.request_id)
                    self._patience.lost()
                    self.counts.add("late_saves")
                    return None
                time.sleep(POLL_S)
        except RefusedError as error:
            self.counts.add("refused_saves")
            _log.warning("blocks not saved: %s", error)
            return None
        self._patience.met()
        if not isinstance(reply, Reserved):
            raise ProtocolError(f"Reserve was answered with {type(reply).__name__}")
        return reply

    def _moves(self, save: Save, places: Sequence[int]) -> list[Move]:
        size = self._device.pages.pages_per_block
        return [
            Move(place + HEADER_BYTES, save.pages[at * size : (at + 1) * size])
            for at, place in enumerate(places)
            if place >= 0
        ]

    def _land(self) -> None:
        """Commit what has arrived in the arena."""
        still = []
        for flying in self._flying:
            if not flying.transfer.done():
                still.append(flying)
                continue
            arrived = flying.transfer.wait()
            try:
                for commit in flying.tickets:
                    message = commit if arrived else Abort(commit.ticket)
                    self._committing.append((flying.client, flying.client.send(message)))
            except NodeGoneError:
                self.counts.add("gone_saves", len(flying.tickets))
        self._flying = still

    def _land_all(self) -> None:
        """Commit what is on its way too, and wait a little until the node has taken it in."""
        # First the copies, then the commits: the node seals what lies in a slot at that moment.
        for flying in self._flying:
            flying.transfer.wait()
        self._land()
        until_s = time.monotonic() + COMMIT_S
        for client, request_id in self._committing:
            with contextlib.suppress(NodeGoneError, RefusedError):
                client.wait(request_id, max(0.0, until_s - time.monotonic()))
        self._committing.clear()

    def _read_commits(self) -> None:
        still = []
        for client, request_id in self._committing:
            try:
                reply = client.poll(request_id)
            except (NodeGoneError, RefusedError):
                self.counts.add("gone_saves")
                continue
            if reply is None:
                still.append((client, request_id))
            elif isinstance(reply, Committed):
                self.counts.add("saved_blocks", reply.blocks)
        self._committing = still

    def _deadline_s(self, load: Load) -> float:
        if not load.deadline_s:
            return self._deadline_max_s
        return min(max(load.deadline_s, DEADLINE_MIN_S), self._deadline_max_s)


def _by_client(asked: Sequence[Asked]) -> list[tuple[Client, list[Asked]]]:
    """Group by connection: a new one may have come between two requests of a step."""
    groups: dict[int, tuple[Client, list[Asked]]] = {}
    for each in asked:
        groups.setdefault(id(each.client), (each.client, []))[1].append(each)
    return list(groups.values())
