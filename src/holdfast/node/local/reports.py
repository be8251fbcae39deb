"""Answers to operators' requests about the node: status, blocks, verification, domains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from holdfast.node.recent import RecentRequests
from holdfast.node.validation import scrub_request
from holdfast.status import NodeStatus
from holdfast.store.store import Store
from holdfast.tier_totals import capacities
from holdfast.wire.local import messages as m


def report(
    store: Store,
    request: m.Request,
    recent: RecentRequests | None = None,
    status: Callable[[], NodeStatus] | None = None,
) -> dict[str, Any]:
    """Return the data that an operator's request asks for; `status` is by default the store's."""
    match request:
        case m.List():
            return {"blocks": store.listing()}
        case m.Members():
            return store.shared()
        case m.Verify():
            return store.verify(scrub_request(request))
        case m.Drop():
            drop = store.would_drop if request.step else store.drop
            return drop(request.fingerprint)
        case m.Domains():
            return _domains(store, request)
        case m.ReplaceMedium():
            if request.step == "preview":
                return store.would_lose(request.tier)
            if request.action == "detach":
                return store.detach_medium(request.tier)
            return store.replace_medium(request.tier, request.path)
        case m.Curve():
            recent = recent or RecentRequests()
            found: dict[str, Any] = msgspec.to_builtins(recent.curve(capacities(store.status())))
            return found
        case _:
            read_status = status or store.status
            data: dict[str, Any] = msgspec.to_builtins(read_status())
            return data


def _domains(store: Store, request: m.Domains) -> dict[str, Any]:
    match request.action, request.step:
        case "rotate", _:
            return store.rotate(request.name)
        case "retire", "preview":
            return store.would_retire(request.name)
        case "retire", step:
            return store.retire(request.name, allow_loss=step == "confirmed")
        case "erase", "preview":
            return store.would_erase(request.name)
        case "erase", _:
            return store.erase(request.name)
        case _:
            return store.domains()
