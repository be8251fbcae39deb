"""The scheduler side waits a moment for a node's answers: played by a clock that waits move on."""

import pytest

pytest.importorskip("vllm")

from holdfast.engines.vllm.work import WorkerReport
from holdfast.wire.local.messages import Cover


@pytest.fixture
def harness(fakes):
    return fakes.SchedulerRig(fakes)


class SlowNode:
    """A node that answers a lookup `after_s` later, by the rig's clock, which waits move on."""

    def __init__(self, rig, after_s):
        self.rig, self.after_s = rig, after_s
        self.asked_at = {}
        rig.client.answer = self.answer
        rig.client.waiting = self.waiting
        self.waited_s = 0.0

    def answer(self, message):
        asked_at = self.asked_at.setdefault(id(message), self.rig.now)
        if isinstance(message, Cover) and self.rig.now - asked_at < self.after_s:
            return None
        return self.rig.answer(message)

    def waiting(self, within_s):
        seconds = min(within_s, self.after_s + 1e-9)
        self.rig.now += seconds
        self.waited_s += seconds


def engine_computes(rig, seconds):
    """Have the engine compute a step of another request, which took this long."""
    request = rig.request(300, request_id="computed")
    rig.run(request, 200, list(range(40)))
    rig.now += seconds
    rig.side.on_worker_output(rig.fakes.outcome(said=WorkerReport(computed=True)))


@pytest.mark.parametrize(
    ("step_s", "after_s", "found"),
    [(2.0, 0.003, True), (0.2, 0.003, True), (2.0, 0.3, False), (0.01, 0.003, False)],
)
def test_a_new_request_beside_another_waits_a_small_share_of_a_step(
    harness, step_s, after_s, found
):
    engine_computes(harness, step_s)
    harness.held = 2
    node = SlowNode(harness, after_s)
    request = harness.request(20)
    assert harness.side.matched_tokens(request, 0) == ((16, True) if found else (None, False))
    assert node.waited_s <= 0.0501 * step_s


def test_all_new_requests_of_a_step_share_its_wait(harness):
    engine_computes(harness, 2.0)
    node = SlowNode(harness, 0.015)
    requests = [harness.request(20, request_id=f"r{number}") for number in range(8)]
    for request in requests:
        harness.side.matched_tokens(request, 0)
    assert 0.015 <= node.waited_s <= 0.020001


def test_steps_do_not_wait_for_a_slow_node_until_it_answers_in_time(harness):
    engine_computes(harness, 2.0)
    node = SlowNode(harness, 0.03)
    request = harness.request(20, request_id="vain")
    assert harness.side.matched_tokens(request, 0) == (None, False)
    assert node.waited_s == pytest.approx(0.02)
    harness.run(request, 0, [])
    harness.now += 0.04
    assert harness.side.matched_tokens(request, 0) == (0, False)  # it answers, but a step later
    harness.run(request, 0, [])
    request = harness.request(20, request_id="not awaited")
    assert harness.side.matched_tokens(request, 0) == (None, False)
    assert node.waited_s == pytest.approx(0.02), "the node is slow: no wait"
    harness.now += 0.04
    assert harness.side.matched_tokens(request, 0) == (0, False)
    harness.run(request, 0, [])
    node.after_s = 0.001
    fast = harness.request(20, request_id="fast")
    assert harness.side.matched_tokens(fast, 0) == (0, False)
    assert node.waited_s == pytest.approx(0.021)


def test_no_request_waits_for_an_unreachable_node(harness):
    engine_computes(harness, 2.0)
    node = SlowNode(harness, 0.03)
    request = harness.request(20)
    harness.client.gone = True
    assert harness.side.matched_tokens(request, 0) == (0, False)
    harness.links[0].current = None
    assert harness.side.matched_tokens(harness.request(20, request_id="new"), 0) == (0, False)
    assert (node.waited_s, harness.client.expected) == (0, [])


def test_an_idle_engine_waits_5_ms_for_answers_in_each_step(harness):
    harness.answering = False
    requests = [harness.request(20, request_id=name) for name in ("first", "second")]
    for _ in range(3):
        for request in requests:
            assert harness.side.matched_tokens(request, 0) == (None, False)
        harness.side.build_work(harness.fakes.step({}))
    assert set(harness.client.waits) == {0.005}


def test_a_step_waits_for_one_answer_if_there_are_several_ranks(fakes):
    harness = fakes.SchedulerRig(fakes, ranks=3)
    harness.clients[1].answer = harness.clients[2].answer = lambda _: None
    assert harness.side.matched_tokens(harness.request(20), 0) == (None, False)
    assert [client.expected for client in harness.clients] == [[], [1], []]
