"""When records leave NIXL's way to a target, and when they come back to it."""

from types import SimpleNamespace

import pytest

from holdfast.wire.remote import client as client_module
from holdfast.wire.remote.buffer_pool import FALLBACK_S
from holdfast.wire.remote.client import TargetClient

ADDRESS = "tcp://127.0.0.1:1"


class FakeTransferBuffers:
    """A road whose window is there, or not yet."""

    def __init__(self):
        self.made = None

    def buffer_pool(self):
        return self.made


@pytest.fixture
def now(monkeypatch):
    """The time, in a list."""
    seconds = [1000.0]
    monkeypatch.setattr(client_module.time, "monotonic", lambda: seconds[0])
    return seconds


def is_replaced(client, made_s):
    """Whether the client replaces a connection without NIXL that was made then."""
    return client._may_use_nixl_now(SimpleNamespace(buffer_pool=None, made_s=made_s))


def test_a_client_without_nixl_has_no_buffer_pool_and_keeps_its_connections(now):
    client = TargetClient(ADDRESS)
    now[0] += 10 * FALLBACK_S
    assert client._buffer_pool() is None
    assert not is_replaced(client, made_s=0.0)


def test_a_connection_older_than_the_buffer_pool_is_replaced_after_a_delay(now):
    transfer_buffers = FakeTransferBuffers()
    client = TargetClient(ADDRESS, transfer_buffers=transfer_buffers)
    made_s = now[0]
    assert client._buffer_pool() is None
    transfer_buffers.made = "window"
    assert not is_replaced(client, made_s), "not at once: the far side may not have it either"
    now[0] += FALLBACK_S
    assert is_replaced(client, made_s)
    assert client._buffer_pool() == "window"


def test_the_buffer_pool_is_not_used_for_a_while_after_a_failed_call(now, monkeypatch):
    transfer_buffers = FakeTransferBuffers()
    transfer_buffers.made = "window"
    client = TargetClient(ADDRESS, transfer_buffers=transfer_buffers)

    def fail(*_):
        raise ConnectionResetError

    failing = SimpleNamespace(buffer_pool="window", used=False, ask=fail, close=lambda: None)
    monkeypatch.setattr(client, "_dial", lambda _: failing)
    client.stats(5)
    assert client._buffer_pool() is None
    assert not is_replaced(client, made_s=0.0)
    now[0] += FALLBACK_S
    assert client._buffer_pool() == "window"
