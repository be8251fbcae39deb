"""Hints in a request's `kv_transfer_params` about the future use of its context.

    {"kv_transfer_params": {"holdfast": {"session": "chat-7", "returns_in_s": 20}}}

Invalid hints are ignored with a line in the log; the request is served.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from holdfast.errors import printable
from holdfast.prepared import prepared
from holdfast.session import NAME_CHARS_MAX
from holdfast.wire.local.messages import Closed, Pin, Request, Returns

FIELD = "holdfast"

_log = logging.getLogger(__name__)


@prepared
class RequestHint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The hints of a request; `closed`, `returns_in_s` and `pin_s` apply from its end.

    A request with `bypass` is neither looked up nor saved, and its other hints are not sent.
    `tokens`, `chain` and `durable_tokens` are no hints: a proxy passes on what another engine
    returned.
    """

    session: Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)] = ""
    retention: Literal["ephemeral", "session", "durable"] = "session"
    closed: bool = False
    returns_in_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] | None = None
    pin_s: Annotated[float, msgspec.Meta(ge=0, le=3_600)] | None = None
    bypass: bool = False
    tokens: int = 0
    durable_tokens: int = 0
    chain: Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)] = ""


NO_HINT = RequestHint()
DURABLE = "durable"
"""Retention of a request whose blocks are acknowledged."""


def hint_of(request: Any) -> tuple[RequestHint, bool]:
    """Return a request's hints, and whether they are valid; of invalid ones only `bypass`."""
    raw = (getattr(request, "kv_transfer_params", None) or {}).get(FIELD)
    session = str(getattr(request, "session_id", None) or "")[:NAME_CHARS_MAX]
    try:
        hint = NO_HINT if raw is None else msgspec.convert(raw, RequestHint)
        if session and not hint.session:
            hint = msgspec.structs.replace(hint, session=session)
        hint.session.encode()
    except ValueError as error:  # includes the UnicodeEncodeError of a lone surrogate in a name
        _log.warning("kv_transfer_params.%s is ignored: %s", FIELD, printable(error))
        bypass = isinstance(raw, Mapping) and bool(raw.get("bypass"))
        return RequestHint(bypass=bypass), False
    return hint, True


def at_end(hint: RequestHint, keys: bytes) -> list[Request]:
    """Return the messages to send to the node at the end of a request; `keys`: its chain."""
    messages: list[Request] = []
    if hint.session and hint.returns_in_s is not None and not hint.closed:
        messages.append(Returns(hint.session, hint.returns_in_s, keys))
    if hint.pin_s is not None and keys:
        messages.append(Pin(keys, hint.pin_s))
    if hint.session and hint.closed:
        messages.append(Closed(hint.session))
    return messages
