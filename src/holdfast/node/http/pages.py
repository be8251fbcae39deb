"""What a node answers over HTTP: `/metrics`, `/healthz`, `/readyz`, and the status page at `/`."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from http import HTTPStatus
from importlib import resources

import msgspec

from holdfast.errors import RefusedError
from holdfast.metrics import CONTENT_TYPE, exposition, node_samples, process_samples
from holdfast.node.http.server import Answer, Routes
from holdfast.node.recent import RecentRequests
from holdfast.node.remote.service import TargetService
from holdfast.status import CurveStatus, NodeStatus, PlanAccuracy, PlanStatus
from holdfast.store.store import Store
from holdfast.tier_totals import capacities
from holdfast.wire.remote.peer_user import check_peer

STATUS_MAX_AGE_S = 0.5
"""A status that is younger answers another request, so that many readers cost as much as one."""

CURVE_MAX_AGE_S = 60.0
"""Age from which a live curve is computed again: it takes up to a second of one core."""

EVENT_S = 1.0
"""Seconds between two events of a status page."""

PLANS_SHOWN = 12

_FOR_OTHERS = "present a token (http.token_file), or set http.open: true for every local user"

_PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; frame-ancestors 'none'"
)


class PageStatus(NodeStatus, frozen=True):
    """The status of a node, its last plans, how often plans were right, and its live curve."""

    plans: list[PlanStatus] = msgspec.field(default_factory=list)
    right: PlanAccuracy = PlanAccuracy()
    curve: CurveStatus = CurveStatus()


class NodePages:
    """The routes of one node: its store, and its service for other nodes."""

    def __init__(
        self, store: Store, service: TargetService, recent: RecentRequests | None = None
    ) -> None:
        self._store = store
        self._service = service
        self._recent = recent
        self._curve = CurveStatus()
        self._curve_at_s = float("-inf")
        self._lock = asyncio.Lock()
        self._status = PageStatus()
        self._taken_at_s = float("-inf")

    def routes(self) -> Routes:
        """Return what each path answers."""
        return Routes(
            {
                "/": self._page,
                "/events": self._events,
                "/metrics": self._metrics,
                "/status.json": self._json,
                "/healthz": self._health,
                "/readyz": self._readiness,
            },
            public=frozenset({"/healthz", "/readyz"}),
        )

    def check_client(self, connected: socket.socket) -> None:
        """Raise RefusedError for a client on loopback TCP of another user than the node's or root.

        The refusal is recorded in the audit log.
        """
        try:
            check_peer(connected, "the HTTP client", _FOR_OTHERS)
        except RefusedError as error:
            self.deny("a client of http", str(error))
            raise

    def deny(self, who: str, why: str) -> None:
        """Record a refused client in the audit log."""
        self._store.audit.deny(who, why)

    async def _page(self) -> Answer:
        page = resources.files("holdfast.node.http").joinpath("status.html").read_bytes()
        headers = {"Content-Security-Policy": _PAGE_POLICY, "Referrer-Policy": "no-referrer"}
        return Answer(HTTPStatus.OK, page, "text/html; charset=utf-8", headers)

    async def _metrics(self) -> Answer:
        status = await self._current()
        samples = [*node_samples(status), *process_samples()]
        return Answer(HTTPStatus.OK, exposition(samples).encode(), CONTENT_TYPE)

    async def _json(self) -> Answer:
        body = msgspec.json.encode(await self._current())
        return Answer(HTTPStatus.OK, body, "application/json")

    async def _events(self) -> Answer:
        return Answer(HTTPStatus.OK, self._stream(), "text/event-stream")

    async def _stream(self) -> AsyncIterator[bytes]:
        while True:
            yield b"data: " + msgspec.json.encode(await self._current()) + b"\n\n"
            await asyncio.sleep(EVENT_S)

    async def _health(self) -> Answer:
        """Answer 200 while the store is open."""
        if self._store.gone:
            return Answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{self._store.gone}\n".encode())
        return Answer(HTTPStatus.OK, b"ok\n")

    async def _readiness(self) -> Answer:
        """Answer 200 once the disk tiers are recovered: then what they held is found again."""
        if self._store.gone or not self._store.recovery.wait(0):
            why = self._store.gone or "the disk tiers are being recovered"
            return Answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{why}\n".encode())
        return Answer(HTTPStatus.OK, b"ready\n")

    async def _current(self) -> PageStatus:
        """Return the status, at most `STATUS_MAX_AGE_S` old; taken on another thread."""
        async with self._lock:
            if time.monotonic() - self._taken_at_s > STATUS_MAX_AGE_S:
                loop = asyncio.get_running_loop()
                self._status = await loop.run_in_executor(None, self._take)
                self._taken_at_s = time.monotonic()
            return self._status

    def _take(self) -> PageStatus:
        plans = self._store.plan_log.status()
        status = self._service.node_status()
        if self._recent is not None and time.monotonic() - self._curve_at_s > CURVE_MAX_AGE_S:
            self._curve = self._recent.curve(capacities(status))
            self._curve_at_s = time.monotonic()
        return PageStatus(
            **msgspec.structs.asdict(status),
            plans=plans.plans[:PLANS_SHOWN],
            right=plans.right,
            curve=self._curve,
        )
