"""The window: lanes for what fits, none of a spoiled one, every byte where it belongs."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.errors import ProtocolError
from holdfast.limits import MIB
from holdfast.wire import nixl
from holdfast.wire.nixl import Agent, Span, pack_spans, span_of, unpack_spans
from holdfast.wire.stream import Deadline
from holdfast.wire.window import Road, Window

needs_nixl = pytest.mark.skipif(not nixl.installed(), reason="NIXL is not installed")


def test_spans_travel_as_pairs_of_eight_bytes():
    spans = [Span(1, 2), Span(2**63, 4096)]
    assert pack_spans(spans)[:16] == bytes([1, *bytes(7), 2, *bytes(7)])
    assert unpack_spans(pack_spans(spans)) == spans
    with pytest.raises(ProtocolError, match="15 bytes do not divide by 16"):
        unpack_spans(bytes(15))


@pytest.fixture(scope="module")
def window():
    return Window(lanes=2, lane_bytes=MIB)


@needs_nixl
class TestWindow:
    def test_what_does_not_fit_or_finds_no_lane_goes_another_way(self, window):
        assert window.lend(MIB + 1) is None
        assert window.lend(0) is None
        lanes = [window.lend(MIB), window.lend(1)]
        assert window.lend(1) is None
        for lane in lanes:
            window.give_back(lane)
        assert window.lend(1) is not None

    def test_a_lane_holds_what_was_copied_in(self):
        lane = Window(lanes=1, lane_bytes=MIB).lend(30)
        lane.fill([b"a" * 10, bytearray(b"b" * 20)])
        spans = lane.spans([10, 20])
        assert spans[1] == Span(spans[0].address + 10, 20)
        out = [memoryview(bytearray(10)), memoryview(bytearray(20))]
        lane.empty(out)
        assert [bytes(part) for part in out] == [b"a" * 10, b"b" * 20]

    def test_a_spoiled_window_lends_nothing_and_is_replaced(self):
        road = Road()
        first = road.wait(60)
        first.lend(1)
        first.spoil()
        assert first.lend(1) is None
        second = road.wait(60)
        assert second is not first
        assert second.lend(1) is not None

    def test_an_agent_reaches_only_what_another_laid_open(self, window):
        agent = Agent("target")
        ours = memoryview(bytearray(b"x" * 4096))
        agent.register(ours)
        peer = agent.meet(window.metadata)
        lane = window.lend(4096)
        lane.fill([b"y" * 4096])
        with ThreadPoolExecutor(1) as mover:
            read = mover.submit(agent.read, peer, lane.spans([4096]), [ours])
            window.attend(lambda _: read.done(), Deadline.within(20))
            read.result()
        assert bytes(ours) == b"y" * 4096
        closed = memoryview(bytearray(4096))
        with pytest.raises(ProtocolError, match="refused"):
            agent.write(peer, [span_of(closed)], [ours])
        agent.part(peer)
        window.give_back(lane)

    def test_a_transfer_that_nobody_attends_to_is_called_back(self, window, monkeypatch):
        monkeypatch.setattr(nixl, "MOVE_S_MAX", 0.2)
        agent = Agent("target")
        ours = memoryview(bytearray(MIB))
        agent.register(ours)
        peer = agent.meet(window.metadata)
        lane = window.lend(MIB)
        with pytest.raises(ProtocolError, match="nixl: "):
            agent.read(peer, lane.spans([MIB]), [ours])
        window.give_back(lane)

    def test_metadata_of_no_agent_is_refused(self):
        agent = Agent("target")
        with pytest.raises(ProtocolError, match="metadata"):
            agent.meet(b"nonsense")
        with pytest.raises(ProtocolError, match="at most 65536"):
            agent.meet(bytes(65_537))


def test_it_is_wanted_where_there_is_rdma_or_somebody_asks_for_it(monkeypatch, tmp_path):
    monkeypatch.setattr(nixl, "installed", lambda: True)
    monkeypatch.setattr(nixl, "RDMA", tmp_path / "none")
    assert [nixl.wanted(way) for way in ("auto", "nixl", "tcp")] == [False, True, False]
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(nixl, "RDMA", tmp_path)
    assert [nixl.wanted(way) for way in ("auto", "nixl", "tcp")] == [True, True, False]
