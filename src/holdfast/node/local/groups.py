"""The KV groups of one session: a namespace, the part that it writes, and a rule for each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from holdfast.blocks.fingerprint import Attention, KvGroup
from holdfast.blocks.group_rules import GroupRule
from holdfast.blocks.namespace import Namespace
from holdfast.blocks.payload_part import check_part
from holdfast.errors import BlockError, ProtocolError
from holdfast.limits import PAYLOAD_BYTES_MAX
from holdfast.node.validation import (
    BLOCK_TOKENS_MAX,
    ELEMENT_BYTES_MAX,
    check_bytes,
    check_within,
    unpack_chain,
)
from holdfast.store.group_lookup import GroupChain
from holdfast.store.store import Store
from holdfast.wire.local import messages as m


class SessionGroup(NamedTuple):
    """One KV group of a session; `part`: the ranges of each payload that the session writes."""

    namespace: Namespace
    part: bytes
    rule: GroupRule
    element_bytes: int


class SessionGroups:
    """The KV groups that a hello names, in its order."""

    def __init__(self, hello: m.Hello, domain: bytes) -> None:
        """Raises HoldfastError for a field that is out of bounds."""
        first = m.GroupHello(
            fingerprint=hello.fingerprint,
            raw_bytes=hello.raw_bytes,
            block_tokens=hello.block_tokens,
            attention=hello.attention,
            window=hello.window,
            part=hello.part,
            element_bytes=hello.element_bytes,
        )
        named = [("hello", first)]
        named += [
            (f"hello.more_groups[{number}]", group)
            for number, group in enumerate(hello.more_groups)
        ]
        self._groups = [_entered(path, group, domain) for path, group in named]
        fingerprints = {group.namespace.fingerprint for group in self._groups}
        if len(fingerprints) < len(self._groups):
            raise BlockError("hello.more_groups: two groups have one fingerprint; name each once")

    def __iter__(self) -> Iterator[SessionGroup]:
        return iter(self._groups)

    def __getitem__(self, number: int) -> SessionGroup:
        """Return a group by its number; raise BlockError for a number that no group has."""
        if not 0 <= number < len(self._groups):
            raise BlockError(
                f"group {number} requested; the session has named {len(self._groups)}, from 0 on"
            )
        return self._groups[number]

    @property
    def is_plain(self) -> bool:
        """Whether there is one group, with full attention: any leading run of it is a prefix."""
        return len(self._groups) == 1 and self._groups[0].rule.attention == "full"

    def chains(self, request: m.Cover) -> list[GroupChain]:
        """Return the chain of each group in a lookup; raise ProtocolError if one is missing."""
        if len(request.more_keys) != len(self._groups) - 1:
            raise ProtocolError(
                f"cover: chains of {1 + len(request.more_keys)} KV groups, the session has named "
                f"{len(self._groups)}"
            )
        chains = [request.keys, *request.more_keys]
        return [
            GroupChain(group.namespace, group.rule, unpack_chain(keys))
            for group, keys in zip(self._groups, chains, strict=True)
        ]


def _entered(path: str, group: m.GroupHello, domain: bytes) -> SessionGroup:
    """Return a group of a session; raise HoldfastError for a field that is out of bounds."""
    check_bytes(f"{path}.fingerprint", group.fingerprint)
    check_within(f"{path}.raw_bytes", group.raw_bytes, PAYLOAD_BYTES_MAX)
    check_within(f"{path}.block_tokens", group.block_tokens, BLOCK_TOKENS_MAX)
    check_part(group.part, group.raw_bytes)
    check_within(f"{path}.element_bytes", group.element_bytes, ELEMENT_BYTES_MAX)
    attention: Attention = group.attention  # type: ignore[assignment]  # `KvGroup` checks it
    rule = GroupRule.of(KvGroup(attention, group.window, (0,)), group.block_tokens)
    namespace = Namespace(group.fingerprint, domain, group.raw_bytes, group.block_tokens)
    return SessionGroup(namespace, group.part, rule, group.element_bytes)


def check_slots(store: Store, name: str, group: SessionGroup) -> None:
    """Raise BlockError if a block of a group fits neither the host tier nor a quota of its domain.

    `name`: the domain's name in the configuration.
    """
    namespace = group.namespace
    arena = store.arena(namespace.domain)
    if namespace.slot_bytes > arena.nbytes:
        raise BlockError(
            f"hello.raw_bytes: one block takes {namespace.slot_bytes} bytes, the host "
            f"tier has {arena.nbytes}; raise tiers.0.capacity"
        )
    for tier, most in store.quotas(namespace.domain).items():
        if namespace.slot_bytes > most:
            raise BlockError(
                f"hello.raw_bytes: one block takes {namespace.slot_bytes} bytes, the "
                f"quota of domain {name!r} on {tier} is {most}; raise "
                f"domains.{name}.quota_bytes.{tier}"
            )
