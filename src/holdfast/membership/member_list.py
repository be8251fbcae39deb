"""Decode and validate lists of members, and their addresses, from plain data."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from holdfast.address import PORT_MAX, tcp_endpoint
from holdfast.errors import ConfigError, MembershipError
from holdfast.membership.members import Member, MemberState

MEMBERS_MAX = 1024
WEIGHT_MAX = 10_000.0
WORD_CHARACTERS_MAX = 253
"""Longest id, zone, incarnation or TLS name: as long as a DNS name."""

_WORD = re.compile(r"[A-Za-z0-9\[][A-Za-z0-9._:\[\]-]*")


def read_members(data: object, at: str) -> tuple[Member, ...]:
    """Decode `{"members": [...]}`; `at` (a file's path) is the prefix of every error.

    Raises MembershipError with path, key, value, limit and remedy.
    """
    if not isinstance(data, Mapping):
        raise MembershipError(f"{at}: holds {_kind(data)}, not a mapping; write members: [...]")
    _refuse_unknown(data, ("members",), f"{at}: ")
    entries = data.get("members")
    if not isinstance(entries, Sequence) or isinstance(entries, str | bytes):
        raise MembershipError(f"{at}: members: {_kind(entries)}, not a list; write members: [...]")
    if len(entries) > MEMBERS_MAX:
        raise MembershipError(
            f"{at}: members: {len(entries)} given, at most {MEMBERS_MAX}; split the pool"
        )
    members = tuple(
        read_member(entry, f"{at}: members.{number}") for number, entry in enumerate(entries)
    )
    refuse_twice(members, at)
    return members


def read_member(data: object, at: str) -> Member:
    """Decode one member from a mapping with the fields of `Member`; raises MembershipError."""
    if not isinstance(data, Mapping):
        raise MembershipError(f"{at}: {data!r:.80} is {_kind(data)}; write id: and address:")
    _refuse_unknown(data, list(_READERS), f"{at}.")
    for field in ("id", "address"):
        if field not in data:
            raise MembershipError(f"{at}.{field}: missing; add it")
    fields = {name: _READERS[name](value, f"{at}.{name}") for name, value in data.items()}
    return Member(**fields)


def as_data(member: Member) -> dict[str, object]:
    """Return the plain data that `read_member` decodes, without the fields at their default."""
    return {
        field.name: value
        for field in msgspec.structs.fields(member)
        if (value := getattr(member, field.name)) != field.default
    }


def refuse_twice(members: Iterable[Member], at: str) -> None:
    """Raise MembershipError if two members have one id or one address."""
    ids: dict[str, int] = {}
    addresses: dict[str, int] = {}
    for number, member in enumerate(members):
        for seen, field in ((ids, "id"), (addresses, "address")):
            value = getattr(member, field)
            first = seen.setdefault(value, number)
            if first != number:
                raise MembershipError(
                    f"{at}: members.{number}.{field}: {value!r} is also that of members.{first}; "
                    "give each member its own"
                )


def _address(value: object, at: str) -> str:
    address = value if isinstance(value, str) else repr(value)
    try:
        tcp_endpoint(address, port_min=1)
    except ConfigError as error:
        raise MembershipError(
            f"{at}: {address!r:.300} is not an address with a port from 1 to {PORT_MAX}; "
            "write tcp://host:port or tcp://[v6]:port, where the member listens for other nodes"
        ) from error
    return address


def _weight(value: object, at: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= WEIGHT_MAX:
        raise MembershipError(
            f"{at}: {value!r:.80} is not above 0 and at most {WEIGHT_MAX:g}; correct it "
            "(state: draining takes a member out)"
        )
    return float(value)


def _word(value: object, at: str, least: int = 1) -> str:
    if (
        not isinstance(value, str)
        or not least <= len(value) <= WORD_CHARACTERS_MAX
        or (value and not _WORD.fullmatch(value))
    ):
        raise MembershipError(
            f"{at}: {value!r:.80} is not {least} to {WORD_CHARACTERS_MAX} of A-Z a-z 0-9 . _ : - "
            "in quotes; correct it"
        )
    return value


def _state(value: object, at: str) -> MemberState:
    if not isinstance(value, str) or value not in list(MemberState):
        known = ", ".join(MemberState)
        raise MembershipError(f"{at}: {value!r:.80} is not a state; use one of: {known}")
    return MemberState(value)


_READERS: dict[str, Callable[[object, str], Any]] = {
    "id": _word,
    "address": _address,
    "weight": _weight,
    "zone": partial(_word, least=0),
    "state": _state,
    "incarnation": partial(_word, least=0),
    "tls_name": partial(_word, least=0),
}
"""Functions that check and convert the fields of a member: of the value and its key path."""


def _refuse_unknown(data: Mapping[object, object], known: Sequence[str], at: str) -> None:
    for key in data:
        if key not in known:
            raise MembershipError(
                f"{at}{key}: unknown key; remove it; known here: {', '.join(known)}"
            )


def _kind(value: object) -> str:
    return "nothing" if value is None else type(value).__name__
