"""Hints of a request about the future use of its context.

A request carries them as a mapping, where its engine permits: `{"session": "chat-7",
"returns_in_s": 20}`. A request with invalid hints is served without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from holdfast.errors import printable
from holdfast.prepared import prepared
from holdfast.session import NAME_CHARS_MAX
from holdfast.wire.local.messages import Closed, Pin, Request, Returns


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


def parse_hint(raw: object, session: str = "") -> tuple[RequestHint, str]:
    """Return a request's hints, and why they are invalid; of invalid ones only `bypass`.

    `raw`: what the request carries, None: no hints. `session`: the engine's own name of its
    session, for hints without one.
    """
    session = session[:NAME_CHARS_MAX]
    try:
        hint = NO_HINT if raw is None else msgspec.convert(raw, RequestHint)
        if session and not hint.session:
            hint = msgspec.structs.replace(hint, session=session)
        hint.session.encode()
    except ValueError as error:  # includes the UnicodeEncodeError of a lone surrogate in a name
        bypass = isinstance(raw, Mapping) and bool(raw.get("bypass"))
        return RequestHint(bypass=bypass), printable(error)
    return hint, ""


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
