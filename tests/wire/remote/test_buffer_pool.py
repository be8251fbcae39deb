"""The window: lanes for what fits, none of a spoiled one, every byte where it belongs."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from holdfast.errors import ProtocolError
from holdfast.limits import MIB
from holdfast.wire.frame import encode
from holdfast.wire.remote import buffer_pool as buffer_pool_module
from holdfast.wire.remote import nixl
from holdfast.wire.remote.buffer_pool import BufferPool, TransferBuffers, consecutive, copy_parts
from holdfast.wire.remote.connection import TargetConnection
from holdfast.wire.remote.messages import PutRecords, RecordsFollow
from holdfast.wire.remote.nixl import MemorySpan, NixlAgent, pack_spans, span_of, unpack_spans
from holdfast.wire.remote.stream import Deadline

needs_nixl = pytest.mark.skipif(not nixl.installed(), reason="NIXL is not installed")


def test_spans_travel_as_pairs_of_eight_bytes():
    spans = [MemorySpan(1, 2), MemorySpan(2**63, 4096)]
    assert pack_spans(spans)[:16] == bytes([1, *bytes(7), 2, *bytes(7)])
    assert unpack_spans(pack_spans(spans)) == spans
    with pytest.raises(ProtocolError, match="15 bytes do not divide by 16"):
        unpack_spans(bytes(15))


def test_a_put_answered_with_records_leaves_the_callers_records_unchanged():
    said = bytes(encode(1, RecordsFollow(b"\0\x10\0\0", "ok")))
    parts = iter([said[:16], said[16:]])

    def receive(into, _):
        for each in into:
            each[:] = next(parts)

    stream = SimpleNamespace(send=lambda *_: None, receive=receive, arrives=None)
    pool = SimpleNamespace(
        acquire=lambda nbytes: memoryview(bytearray(nbytes)),
        progress_until=lambda *_: None,
        release=lambda buffer: buffer,
    )
    record = memoryview(bytearray(b"r" * 256))
    with pytest.raises(ProtocolError, match="bytes are announced for"):
        TargetConnection(stream, pool).ask(PutRecords(b""), [record], (), Deadline.within(60))
    assert bytes(record) == b"r" * 256


def test_a_buffer_pool_is_created_later_if_no_thread_can_start_at_first(monkeypatch):
    made = SimpleNamespace(spoiled=False)
    monkeypatch.setattr(buffer_pool_module, "installed", lambda: True)
    monkeypatch.setattr(buffer_pool_module, "BufferPool", lambda: made)
    transfer_buffers = TransferBuffers()

    def refuse(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as without_threads:
        without_threads.setattr(threading.Thread, "start", refuse)
        assert transfer_buffers.buffer_pool() is None
    assert transfer_buffers.wait(60) is made


@pytest.fixture(scope="module")
def buffer_pool():
    return BufferPool(buffers=2, buffer_bytes=MIB)


@needs_nixl
class TestBufferPool:
    def test_acquire_returns_none_if_the_size_does_not_fit_or_no_buffer_is_free(self, buffer_pool):
        assert buffer_pool.acquire(MIB + 1) is None
        assert buffer_pool.acquire(0) is None
        buffers = [buffer_pool.acquire(MIB), buffer_pool.acquire(1)]
        assert buffer_pool.acquire(1) is None
        for buffer in buffers:
            buffer_pool.release(buffer)
        assert buffer_pool.acquire(1) is not None

    def test_a_buffer_holds_the_records_that_were_copied_in(self):
        buffer = BufferPool(buffers=1, buffer_bytes=MIB).acquire(30)
        records = consecutive(buffer, [10, 20])
        copy_parts([b"a" * 10, bytearray(b"b" * 20)], records)
        spans = [span_of(record) for record in records]
        assert spans[1] == MemorySpan(spans[0].address + 10, 20)
        out = [memoryview(bytearray(10)), memoryview(bytearray(20))]
        copy_parts(records, out)
        assert [bytes(part) for part in out] == [b"a" * 10, b"b" * 20]

    def test_a_spoiled_pool_has_no_buffer_and_is_replaced(self):
        transfer_buffers = TransferBuffers()
        first = transfer_buffers.wait(60)
        first.acquire(1)
        first.spoil()
        assert first.acquire(1) is None
        second = transfer_buffers.wait(60)
        assert second is not first
        assert second.acquire(1) is not None

    def test_an_agent_reaches_only_registered_memory_of_its_peer(self, buffer_pool):
        agent = NixlAgent("target")
        ours = memoryview(bytearray(b"x" * 4096))
        agent.register(ours)
        peer = agent.add_peer(buffer_pool.metadata)
        buffer = buffer_pool.acquire(4096)
        buffer[:4096] = b"y" * 4096
        with ThreadPoolExecutor(1) as mover:
            read = mover.submit(agent.move, "READ", peer, [span_of(buffer[:4096])], [ours])
            buffer_pool.progress_until(lambda _: read.done(), Deadline.within(60))
            read.result()
        assert bytes(ours) == b"y" * 4096
        closed = memoryview(bytearray(4096))
        with pytest.raises(ProtocolError, match="refused"):
            agent.move("WRITE", peer, [span_of(closed)], [ours])
        agent.remove_peer(peer)
        buffer_pool.release(buffer)

    def test_a_transfer_without_progress_fails_at_its_time_limit(self, buffer_pool, monkeypatch):
        monkeypatch.setattr(nixl, "MOVE_S_MAX", 0.2)
        agent = NixlAgent("target")
        ours = memoryview(bytearray(MIB))
        agent.register(ours)
        peer = agent.add_peer(buffer_pool.metadata)
        buffer = buffer_pool.acquire(MIB)
        with pytest.raises(ProtocolError, match="nixl: "):
            agent.move("READ", peer, [span_of(buffer)], [ours])
        buffer_pool.release(buffer)

    def test_metadata_of_no_agent_is_refused(self):
        agent = NixlAgent("target")
        with pytest.raises(ProtocolError, match="metadata"):
            agent.add_peer(b"nonsense")
        with pytest.raises(ProtocolError, match="the limit is 65536"):
            agent.add_peer(bytes(65_537))


class BrokenTransfers:
    """NIXL's API, whose transfers fail once they are under way: with an error, or in this state."""

    def __init__(self, *, state="", releases=True):
        self.released = []
        self._state = state
        self._releases = releases

    def get_xfer_descs(self, spans, _kind):
        return spans

    def initialize_xfer(self, *_):
        return "handle"

    def transfer(self, _handle):
        return "PROC"

    def check_xfer_state(self, _handle):
        if not self._state:
            raise RuntimeError("the peer went")
        return self._state

    def release_xfer_handle(self, handle):
        if not self._releases:
            raise RuntimeError("still under way")
        self.released.append(handle)


@pytest.mark.parametrize(
    ("state", "words"),
    [("", "read refused: the peer went"), ("ERR", "a read of 1 records failed: ERR")],
)
def test_a_transfer_that_fails_is_cancelled_before_its_memory_is_used_again(state, words):
    agent, ours = object.__new__(NixlAgent), memoryview(bytearray(8))
    agent._agent = BrokenTransfers(state=state)
    with pytest.raises(ProtocolError, match=words) as failed:
        agent.move("READ", "peer", [MemorySpan(0, 8)], [ours])
    assert not isinstance(failed.value, nixl.MoveLostError)
    assert agent._agent.released == ["handle"]
    agent._agent = BrokenTransfers(state=state, releases=False)
    with pytest.raises(nixl.MoveLostError, match="cannot be cancelled: still under way"):
        agent.move("READ", "peer", [MemorySpan(0, 8)], [ours])


def test_nixl_is_wanted_with_rdma_hardware_or_if_configured(monkeypatch, tmp_path):
    monkeypatch.setattr(nixl, "installed", lambda: True)
    monkeypatch.setattr(nixl, "RDMA", tmp_path / "none")
    assert [nixl.wanted(way) for way in ("auto", "nixl", "tcp")] == [False, True, False]
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(nixl, "RDMA", tmp_path)
    assert [nixl.wanted(way) for way in ("auto", "nixl", "tcp")] == [True, True, False]
