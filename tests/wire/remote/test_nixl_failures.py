"""Whatever NIXL raises is a ProtocolError, after which records go over TCP."""

import sys
from types import SimpleNamespace

import pytest

from holdfast.errors import ProtocolError
from holdfast.wire.remote.nixl import MemorySpan, NixlAgent

OURS = [memoryview(bytearray(8))]
THEIRS = [MemorySpan(2**63, 8)]


class NixlError(Exception):
    """An error of NIXL's, whose classes have no common base."""


class FailingAgent:
    """NIXL's agent of which one method raises."""

    backends = ("UCX",)

    def __init__(self, fails):
        self._fails = fails

    def __getattr__(self, name):
        def method(*_, **__):
            if name == self._fails:
                raise NixlError(name)
            return "peer"

        return method


@pytest.fixture
def agent_that_fails_in(monkeypatch):
    def make(method):
        api = SimpleNamespace(
            nixl_agent_config=lambda **_: None,
            nixl_thread_sync_t=SimpleNamespace(NIXL_THREAD_SYNC_STRICT=0),
            nixl_agent=lambda *_: FailingAgent(method),
        )
        monkeypatch.setitem(sys.modules, "nixl._api", api)
        return NixlAgent("test")

    return make


@pytest.mark.parametrize(
    ("method", "act"),
    [
        ("register_memory", lambda agent: agent.register(OURS[0])),
        ("deregister_memory", lambda agent: agent.deregister(None)),
        ("add_remote_agent", lambda agent: agent.add_peer(b"metadata")),
        ("remove_remote_agent", lambda agent: agent.remove_peer(agent.add_peer(b"metadata"))),
        ("get_new_notifs", lambda agent: agent.progress()),
        ("get_xfer_descs", lambda agent: agent.move("READ", "peer", THEIRS, OURS)),
        ("initialize_xfer", lambda agent: agent.move("READ", "peer", THEIRS, OURS)),
    ],
)
def test_an_error_of_nixl_is_a_protocol_error_with_its_text(agent_that_fails_in, method, act):
    with pytest.raises(ProtocolError, match=method):
        act(agent_that_fails_in(method))
