"""Fields of requests that are out of range are refused by name."""

import asyncio
import math
from collections.abc import Awaitable

import pytest
from msgspec import inspect as types

from holdfast.errors import HoldfastError
from holdfast.node.local.sessions import NodeContext, NodeSession
from holdfast.node.local.threads import NodeThreads
from holdfast.node.local.users import PermittedUsers
from holdfast.store.store import Store
from holdfast.wire.local import messages as m
from holdfast.wire.local.peer_check import ROOT, ConnectedPeer

FLOATS = [
    (kind.cls, field.name)
    for kind in types.type_info(m.Request).types
    for field in kind.fields
    if isinstance(field.type, types.FloatType)
]


@pytest.fixture(scope="module")
def session():
    store, threads = Store(16 << 20, [], {"default": bytes(32)}), NodeThreads()
    hello = m.Hello(m.PROTOCOL, "test", b"f" * 16, 4096, 16)
    context = NodeContext(store, threads, PermittedUsers(ROOT, {}))
    yield NodeSession(context, hello, ConnectedPeer(0, ROOT))
    threads.close()
    store.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize(
    ("kind", "field"), FLOATS, ids=lambda part: getattr(part, "__name__", part)
)
def test_a_time_out_of_range_is_refused_by_name(session, kind, field, value):
    needed = {"keys": b"", "session": "name", "deadline_s": 1.0, "in_s": 1.0, "ttl_s": 1.0}
    named = {name: needed[name] for name in kind.__struct_fields__ if name in needed}

    async def answer():
        reply = session.answer(kind(**{**named, field: value}))
        return await reply if isinstance(reply, Awaitable) else reply

    with pytest.raises(
        HoldfastError, match=rf"{kind.__struct_config__.tag}.*{field.split('_')[0]}"
    ):
        asyncio.run(answer())
