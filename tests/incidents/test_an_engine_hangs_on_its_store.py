"""The store is down or slow, and the engine waits for it until a watchdog ends it.

LMCache: without its lookup server, or during a large retrieve, the engine hung until a watchdog of
1,800 s. Mooncake: clients needed two minutes to find a new master, and nothing could be read.
Threads: https://github.com/LMCache/LMCache/issues/1491 https://github.com/LMCache/LMCache/issues/4759
https://github.com/kvcache-ai/Mooncake/issues/3740
"""

import socket

import pytest

from holdfast.errors import NodeGoneError, Outcome
from holdfast.testing.payloads import key_of, namespace_of
from holdfast.wire.local.client import Client
from holdfast.wire.local.messages import PROTOCOL, Hello
from holdfast.wire.remote.client import TargetClient


def test_a_silent_node_is_gone_at_the_deadline(tmp_path):
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(f"{tmp_path}/node.sock")
        mute.listen()
        with pytest.raises(NodeGoneError):
            Client(f"unix://{tmp_path}/node.sock", Hello(PROTOCOL, "engine"), 0.2)


def test_a_silent_target_is_late():
    namespace = namespace_of(4_000)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        target = TargetClient("tcp://{}:{}".format(*mute.getsockname()))
        held = target.exist(namespace, [key_of(1)], 0.2)
        assert held.outcome is Outcome.LATE
        target.close()


def test_a_target_that_refuses_connections_is_gone():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = "tcp://{}:{}".format(*closed.getsockname())
    target = TargetClient(address)
    assert target.exist(namespace_of(4_000), [key_of(1)], 60.0).outcome is Outcome.GONE
    target.close()
