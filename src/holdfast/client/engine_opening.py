"""Open the engine client of a store that `holdfast.open` returned: embedded, or a node's."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from holdfast.blocks.payload_part import SliceCopy
from holdfast.client.connection import StoreClient
from holdfast.client.embedded_client import EmbeddedClient
from holdfast.client.engine import EngineGroup
from holdfast.client.session import NodeStore
from holdfast.client.store_engine import StoreEngine
from holdfast.errors import BlockError, NodeGoneError, RefusedError
from holdfast.store.store import Store
from holdfast.version import __version__
from holdfast.wire.local import messages as m
from holdfast.wire.local.reconnecting_client import ReconnectingClient

CONNECT_S = 5.0
"""Timeout of the first session with a node."""

SEVERAL_GROUPS = "blocks stay exact, because the model has several KV groups; a codec takes one"

_log = logging.getLogger(__name__)


def open_engine(
    store: Store | NodeStore,
    groups: Sequence[EngineGroup],
    domain: str | None = None,
    peer: str = f"python {__version__}",
) -> StoreEngine:
    """Return the engine client of a store that `holdfast.open` returned.

    `groups`: all KV groups of the model. `peer`: the engine's name, then its version. Close it, or
    use it in a `with` block. Raises NodeGoneError if the node does not answer, and RefusedError or
    BlockError for a group that the store does not take.
    """
    if not groups:
        raise BlockError("open_engine: no KV group given; pass those of the model")
    if isinstance(store, Store):
        name = domain or "default"
        groups = _quantised(store, name, groups)
        fingerprints = [group.fingerprint for group in groups]
        client = EmbeddedClient(store, _hello(groups, name, peer), fingerprints)
        return StoreEngine(client, client, groups)
    name = store.domain if domain is None else domain
    connection, first = _connected(store.address, _hello(groups, name, peer))
    welcome = first.welcome
    if welcome.exact_because:
        _log.warning("node %s: %s", store.address, welcome.exact_because)
    if welcome.codec and len(groups) == 1:  # every reconnection keeps what is chosen here
        connection.close()
        only = groups[0]
        chosen = only.fingerprint.quantised(welcome.codec, welcome.codec_version)
        groups = [only._replace(fingerprint=chosen)]
        connection, first = _connected(store.address, _hello(groups, name, peer))
    elif welcome.codec:
        _log.warning("node %s: %s", store.address, SEVERAL_GROUPS)
    return StoreEngine(connection, first, groups)


def _connected(address: str, hello: m.Hello) -> tuple[ReconnectingClient, StoreClient]:
    """Return a connection to a node, and the client of its first session."""
    connection = ReconnectingClient(address, hello, CONNECT_S)
    client = connection.wait(CONNECT_S)
    if client is None:
        connection.close()
        error = RefusedError if connection.refused else NodeGoneError
        raise error(connection.failure)
    return connection, client


def _quantised(store: Store, domain: str, groups: Sequence[EngineGroup]) -> Sequence[EngineGroup]:
    """Return the groups as the store keeps them: quantised, if its domain asks for that."""
    choice = store.quantise.choose(domain, groups[0].fingerprint)
    if choice.why:
        _log.warning("%s", choice.why)
    if choice.fingerprint == groups[0].fingerprint:
        return groups
    if len(groups) > 1:
        _log.warning("%s", SEVERAL_GROUPS)
        return groups
    return [groups[0]._replace(fingerprint=choice.fingerprint)]


def _hello(groups: Sequence[EngineGroup], domain: str, peer: str) -> m.Hello:
    """Return the greeting that names the groups."""
    first, *others = [_group_hello(group) for group in groups]
    return m.Hello(
        protocol=m.PROTOCOL,
        peer=peer,
        fingerprint=first.fingerprint,
        raw_bytes=first.raw_bytes,
        block_tokens=first.block_tokens,
        domain=domain,
        description=msgspec.json.encode(groups[0].fingerprint).decode(),
        part=first.part,
        element_bytes=first.element_bytes,
        attention=first.attention,
        window=first.window,
        more_groups=others,
    )


def _group_hello(group: EngineGroup) -> m.GroupHello:
    layout, rule = group.fingerprint.representation, group.rule
    return m.GroupHello(
        fingerprint=group.fingerprint.digest(),
        raw_bytes=layout.raw_bytes,
        block_tokens=layout.block_tokens,
        attention=rule.attention,
        window=rule.window,
        part=SliceCopy(layout.raw_bytes, group.layout_slice).part,
        element_bytes=layout.element_bytes,
    )
