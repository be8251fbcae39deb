"""Hints of a request: what its sender says about what comes next, in `kv_transfer_params`.

    {"kv_transfer_params": {"holdfast": {"session": "chat-7", "returns_in_s": 20}}}

A hint that makes no sense costs a line in the log, never a request.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec

from holdfast.errors import NodeGoneError
from holdfast.prepared import prepared
from holdfast.wire.client import Client
from holdfast.wire.frame import plain
from holdfast.wire.messages import Closed, Pin, Request, Returns

FIELD = "holdfast"
NAME_CHARS_MAX = 256

_log = logging.getLogger("vllm.holdfast")


@prepared
class Hint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a request says of itself; `closed`, `returns_in_s` and `pin_s` count from its end.

    A request with `bypass` is neither asked about nor saved, and its other hints are not told.
    """

    session: Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)] = ""
    retention: Literal["ephemeral", "session", "durable"] = "session"
    closed: bool = False
    returns_in_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] | None = None
    pin_s: Annotated[float, msgspec.Meta(ge=0, le=3_600)] | None = None
    bypass: bool = False


NOTHING = Hint()
BYPASS = Hint(bypass=True)


def hint_of(request: Any) -> Hint | None:
    """Return what a request says of itself; None if that makes no sense.

    What wants to be left alone is, whatever else makes no sense.
    """
    said = (getattr(request, "kv_transfer_params", None) or {}).get(FIELD)
    session = str(getattr(request, "session_id", None) or "")[:NAME_CHARS_MAX]
    try:
        hint = NOTHING if said is None else msgspec.convert(said, Hint)
        if session and not hint.session:
            hint = msgspec.structs.replace(hint, session=session)
        hint.session.encode()
    except ValueError as error:  # of which half a surrogate in a name is one, too
        _log.warning("kv_transfer_params.%s is ignored: %s", FIELD, plain(error))
        return BYPASS if isinstance(said, Mapping) and said.get("bypass") else None
    return hint


def at_end(hint: Hint, keys: bytes) -> list[Request]:
    """Return what the node is to be told when a request with this chain has ended."""
    told: list[Request] = []
    if hint.session and hint.returns_in_s is not None and not hint.closed:
        told.append(Returns(hint.session, hint.returns_in_s, keys))
    if hint.pin_s is not None and keys:
        told.append(Pin(keys, hint.pin_s))
    if hint.session and hint.closed:
        told.append(Closed(hint.session))
    return told


def tell(client: Client, messages: Sequence[Request]) -> None:
    """Send hints; nobody waits for what comes of them."""
    with suppress(NodeGoneError):
        for message in messages:
            client.forget(client.send(message))
