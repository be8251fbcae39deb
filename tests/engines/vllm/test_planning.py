"""The scheduler side and the node's plans: what is promised, asked, timed and told."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput

from holdfast.blocks.key import unpack_keys
from holdfast.engines.vllm.work import WorkerReport
from holdfast.wire.local.messages import Cover, Covered, Done, Observed


@pytest.fixture
def harness(fakes):
    return fakes.SchedulerRig(fakes)


def forward_ended(harness):
    harness.side.on_worker_output(harness.fakes.outcome(said=WorkerReport(computed=True)))


def test_only_planned_blocks_are_loaded_and_only_held_blocks_are_not_saved(harness):
    harness.held, harness.worth = 3, 1
    request = harness.request(30)
    assert harness.side.matched_tokens(request, 0) == (8, True)
    harness.side.allocated(request, ([5, 6],), 8)
    request.num_computed_tokens = 8
    work = harness.run(request, 22, [5, 6, 7, 8])
    assert unpack_keys(work.loads[0].groups[0].keys[0]) == harness.chain(30).keys[:1]
    assert work.saves == []
    harness.worth = 0
    assert harness.side.matched_tokens(harness.request(30, request_id="none"), 0) == (0, False)


def test_a_lookup_sends_the_prompt_length_and_the_local_tokens_to_the_node(harness):
    harness.client.answer = lambda _: Covered(3, 3, {"host": 3}, 5, 0.25, 0.1, 0.9)
    request = harness.request(30)
    assert harness.side.matched_tokens(request, 9) == (15, True)
    first, again = harness.client.of(Cover)
    assert (first.tokens, first.have, first.limit_s, first.plan) == (30, 0, 5.0, 0)
    assert (again.tokens, again.have, again.plan) == (30, 9, 5)
    assert harness.side.matched_tokens(request, 17) == (7, True)
    assert len(harness.client.of(Cover)) == 2, "it asks again once"
    harness.side.allocated(request, ([5, 6, 7, 8],), 7)
    (load,) = harness.side.build_work(harness.fakes.step({})).loads
    assert (load.plan, load.deadline_s) == (5, 0.25)


def test_a_lookup_tells_the_prefill_that_other_prompts_leave_to_the_engine(harness):
    harness.held = 3
    first = harness.request(600, request_id="first")
    assert harness.side.matched_tokens(first, 0) == (24, True)
    harness.request(30, request_id="second")
    ahead = harness.client.of(Cover)[-1]
    assert (ahead.queued_tokens, ahead.queued_pairs) == (576, 576 * (24 + 288))
    assert ahead.to_load == {}
    first.num_computed_tokens = 599
    harness.request(30, request_id="third")
    assert harness.client.of(Cover)[-1].queued_tokens == 0, "the plan of the second is not known"


def test_a_plan_is_asked_for_again_once_if_the_queue_has_moved(harness):
    harness.client.answer = lambda _: Covered(3, 3, {"disk": 3}, 5, 0.25, 0.1, 0.9)
    first = harness.request(600, request_id="first")
    assert harness.side.matched_tokens(first, 0) == (24, True)
    second = harness.request(30, request_id="second", cache_salt="of its own")
    harness.side.allocated(first, ([5, 6, 7],), 24)
    first.num_computed_tokens = 24
    assert harness.side.matched_tokens(second, 0) == (24, True)
    again = harness.client.of(Cover)[-1]
    assert (again.plan, again.have) == (5, 0), "it replaces the plan of its arrival"
    assert again.to_load == {"disk": 3}, "what the node was not asked for yet"
    asked = len(harness.client.of(Cover))
    first.num_computed_tokens = 600
    assert harness.side.matched_tokens(second, 0) == (24, True)
    assert len(harness.client.of(Cover)) == asked


def test_a_prompt_alone_is_asked_for_once(harness):
    harness.held = 3
    request = harness.request(600)
    assert harness.side.matched_tokens(request, 0) == (24, True)
    assert harness.side.matched_tokens(request, 0) == (24, True)
    assert len(harness.client.of(Cover)) == 1


def test_the_match_count_is_unknown_until_the_second_answer_arrives(harness):
    harness.held = 3
    request = harness.request(30)
    assert harness.side.matched_tokens(request, 0) == (24, True)
    harness.answering = False
    assert harness.side.matched_tokens(request, 8) == (None, False)
    harness.now = 0.06
    assert harness.side.matched_tokens(request, 8) == (0, False)


def test_no_second_lookup_is_sent_if_the_engine_has_all_held_blocks(harness):
    harness.held = 2
    request = harness.request(30)
    assert harness.side.matched_tokens(request, 16) == (0, False)
    assert len(harness.client.of(Cover)) == 1


def test_a_long_prompt_may_wait_longer_for_an_answer(fakes):
    harness = fakes.SchedulerRig(fakes, setting=fakes.setting(cover_deadline_s=None))
    harness.client.answer = lambda _: Covered(0, 0, {}, 0, 0.0, 0.1, 3.0)
    harness.side.matched_tokens(harness.request(30, request_id="first"), 0)  # 0.1 s a token
    harness.client.answer = lambda _: None
    for tokens, limit_s in ((9, 0.05), (40, 0.2), (400, 1.0)):
        request, start = harness.request(tokens, request_id=f"r{tokens}"), harness.now
        harness.now = start + limit_s - 0.001
        assert harness.side.matched_tokens(request, 0) == (None, False)
        harness.now = start + limit_s + 0.001
        assert harness.side.matched_tokens(request, 0) == (0, False)
        harness.side._lookups._backoff.answered()


def test_a_node_that_may_be_waiting_for_a_core_has_more_time(fakes):
    harness = fakes.SchedulerRig(fakes, setting=fakes.setting(cover_deadline_s=None))
    harness.client.answer = lambda _: None
    harness.client.runnable = True
    request, start = harness.request(30), harness.now
    harness.now = start + 0.9
    assert harness.side.matched_tokens(request, 0) == (None, False)
    harness.client.answer = lambda _: Covered(1, 1, {"host": 1}, 0, 0.0, 0.1, 3.0)
    assert harness.side.matched_tokens(request, 0) == (8, True)
    harness.client.answer = lambda _: None
    late, start = harness.request(30, request_id="late"), harness.now
    assert harness.side.matched_tokens(late, 0) == (None, False)
    harness.now = start + 1.001
    assert harness.side.matched_tokens(late, 0) == (0, False)


def test_a_timeout_that_the_user_has_set_is_kept_whatever_the_node_does(fakes):
    harness = fakes.SchedulerRig(fakes, setting=fakes.setting(cover_deadline_s=0.05))
    harness.client.answer = lambda _: None
    harness.client.runnable = True
    request, start = harness.request(30), harness.now
    assert harness.side.matched_tokens(request, 0) == (None, False)
    harness.now = start + 0.051
    assert harness.side.matched_tokens(request, 0) == (0, False)


def prefilled(harness, request, scheduled, seconds):
    harness.run(request, scheduled, list(range(200)))
    harness.now += seconds
    forward_ended(harness)


def test_prefill_step_times_are_reported_when_the_engine_is_idle(harness):
    request = harness.request(300)
    harness.side.matched_tokens(request, 0)
    prefilled(harness, request, 200, 0.4)
    prefilled(harness, request, 100, 0.3)
    prefilled(harness, request, 1, 0.1)  # decoding
    assert harness.client.of(Observed) == []
    harness.side.on_finished(request)
    harness.side.on_worker_output(harness.fakes.outcome())
    (report,) = harness.client.of(Observed)
    assert [(new, context) for new, context, _ in report.steps] == [(200, 0), (100, 200)]
    assert [seconds for *_, seconds in report.steps] == pytest.approx([0.4, 0.3])
    assert len(harness.client.forgotten) == 1, "nobody waits for the answer"


def test_steps_beside_a_load_or_an_untracked_request_are_not_reported(harness):
    harness.held = 2
    waiting, request = harness.request(30, request_id="waiting"), harness.request(300)
    harness.side.matched_tokens(waiting, 0)
    harness.side.allocated(waiting, ([5, 6, 7],), 16)
    prefilled(harness, request, 100, 0.4)
    harness.side.on_worker_output(harness.fakes.outcome(ended=["waiting"]))
    harness.side.on_finished(waiting)
    pages = {"r": list(range(200)), "stranger": [1]}
    harness.side.build_work(harness.fakes.step(pages, r=100, stranger=100))
    harness.now += 1
    forward_ended(harness)
    harness.side.on_finished(request)
    harness.side.on_worker_output(harness.fakes.outcome())
    assert [report.steps for report in harness.client.of(Observed)] == [[]]


def test_steps_handed_out_ahead_are_timed_from_the_end_of_the_one_before(harness):
    request = harness.request(300)
    harness.run(request, 100, list(range(200)))
    harness.run(request, 150, list(range(200)))
    harness.now = 1.0
    forward_ended(harness)
    harness.now = 3.0
    forward_ended(harness)
    harness.side.on_finished(request)
    harness.side.on_worker_output(harness.fakes.outcome())
    (report,) = harness.client.of(Observed)
    assert [seconds for *_, seconds in report.steps] == [1.0, 2.0]


def test_a_step_without_a_forward_does_not_end_the_timing_of_the_next(harness):
    aggregator = KVOutputAggregator(2)

    def step_ended(said):
        outputs = [
            SimpleNamespace(kv_connector_output=KVConnectorOutput(kv_connector_worker_meta=each))
            for each in said
        ]
        harness.side.on_worker_output(aggregator.aggregate(outputs).kv_connector_output)

    request = harness.request(400)
    harness.side.build_work(harness.fakes.step({}))
    harness.run(request, 400, list(range(200)))
    harness.now = 0.0005
    step_ended([None, None])
    harness.now = 0.0485
    step_ended([WorkerReport(computed=True), WorkerReport(computed=True)])
    harness.side.on_finished(request)
    step_ended([None, None])
    (report,) = harness.client.of(Observed)
    assert report.steps == [(400, 0.0, 0.0485)]


def test_prompts_that_share_a_step_are_reported_as_one(harness):
    one, two = harness.request(100, request_id="one"), harness.request(300, request_id="two")
    two.num_computed_tokens = 200
    pages = {"one": list(range(50)), "two": list(range(50))}
    harness.side.build_work(harness.fakes.step(pages, one=100, two=100))
    harness.now = 1.0
    harness.side.on_finished(one)
    harness.side.on_finished(two)
    forward_ended(harness)
    steps = [step for report in harness.client.of(Observed) for step in report.steps]
    ((new, context, seconds),) = steps
    assert (new, seconds) == (200, 1.0)
    assert new * (context + new / 2) == 100 * 50 + 100 * 250


def test_the_fetch_and_first_token_times_of_a_plan_are_reported(harness):
    harness.client.answer = lambda message: (
        Covered(3, 3, {"host": 3}, 5, 0.25, 0.1, 0.9) if isinstance(message, Cover) else Done()
    )
    request = harness.request(30)
    harness.side.matched_tokens(request, 0)
    harness.side.allocated(request, ([5, 6, 7, 8],), 24)
    harness.side.build_work(harness.fakes.step({}))
    harness.now = 0.2
    harness.side.on_worker_output(harness.fakes.outcome(ended=["r"]))
    request.num_computed_tokens = 24
    harness.run(request, 6, [5, 6, 7, 8])
    harness.now = 0.5
    harness.side.on_finished(request)
    forward_ended(harness)
    reports = harness.client.of(Observed)
    assert [ending for report in reports for ending in report.endings] == [(5, 0.2, 0.5)]


PLANS = {0: 5, 1: 6, 2: 7}
"""Numbers of the node's plans: the first one for a request, and those that follow."""


def planning(harness, held=3):
    """Have the node plan to fetch three blocks of whatever it is asked about."""

    def answer(message):
        if not isinstance(message, Cover):
            return Done()
        number = PLANS[len(harness.client.of(Cover)) - 1]
        return Covered(held, held, {"host": held}, number, 0.25, 0.1, 0.9)

    harness.client.answer = answer


def reported(harness):
    """Return what is told of plans once the engine has nothing else to do."""
    for request in list(harness.side._live):
        harness.side.on_finished(harness.fakes.Request(request))
    harness.side.on_worker_output(harness.fakes.outcome())
    endings, not_followed = [], []
    for report in harness.client.of(Observed):
        endings += report.endings
        not_followed += report.not_followed
    return endings, not_followed


@pytest.mark.parametrize("local", [24, 29])
def test_a_plan_for_blocks_that_the_engine_has_is_reported_as_not_followed(harness, local):
    planning(harness)
    request = harness.request(30)
    assert harness.side.matched_tokens(request, local) == (0, False)
    request.num_computed_tokens = local
    harness.run(request, 30 - local, [5, 6, 7, 8])
    harness.now = 0.3
    forward_ended(harness)
    assert reported(harness) == ([], [(5, "engine_had_it", 0.3)])


def test_a_plan_revised_for_local_blocks_is_reported_as_followed(harness):
    planning(harness)
    request = harness.request(30)
    assert harness.side.matched_tokens(request, 9) == (15, True)
    harness.side.allocated(request, ([5, 6, 7, 8],), 15)
    harness.side.on_worker_output(harness.fakes.outcome(ended=["r"]))
    request.num_computed_tokens = 24
    harness.run(request, 6, [5, 6, 7, 8])
    harness.now = 0.5
    forward_ended(harness)
    assert reported(harness) == ([(6, 0.0, 0.5)], [])


def test_a_plan_is_not_followed_if_the_engine_lost_its_local_blocks(harness):
    planning(harness)
    request = harness.request(30)
    assert harness.side.matched_tokens(request, 16) == (8, True)
    assert harness.side.matched_tokens(request, 0) == (24, True)
    harness.run(request, 30, [5, 6, 7, 8])
    forward_ended(harness)
    (ending,) = reported(harness)[1]
    assert ending[:2] == (6, "engine_lost_it")


def test_a_plan_is_not_followed_if_the_second_answer_is_late(harness):
    planning(harness)
    request = harness.request(30)
    assert harness.side.matched_tokens(request, 0) == (24, True)
    harness.client.answer = lambda _: None
    assert harness.side.matched_tokens(request, 8) == (None, False)
    harness.now = 0.06
    assert harness.side.matched_tokens(request, 8) == (0, False)
    harness.client.answer = lambda _: Done()
    harness.run(request, 30, [5, 6, 7, 8])
    forward_ended(harness)
    assert reported(harness) == ([], [(5, "answered_late", 0.0)])


def test_a_plan_is_not_followed_if_the_node_is_gone_at_the_second_lookup(harness):
    planning(harness)
    request = harness.request(30)
    assert harness.side.matched_tokens(request, 0) == (24, True)
    harness.links[0].current = None
    assert harness.side.matched_tokens(request, 8) == (0, False)
    harness.links[0].current = harness.client
    assert reported(harness) == ([], [(5, "engine_gone", 0.0)])


def test_the_plan_of_an_aborted_request_is_reported_as_not_followed(harness):
    planning(harness)
    request = harness.request(30)
    assert harness.side.matched_tokens(request, 0) == (24, True)
    harness.side.on_finished(request)
    assert reported(harness) == ([], [(5, "request_ended", 0.0)])


def test_a_plan_before_a_reset_is_reported_as_not_followed(harness):
    planning(harness)
    harness.side.matched_tokens(harness.request(30), 0)
    harness.side.reset()
    assert reported(harness) == ([], [(5, "engine_reset", 0.0)])


def test_a_preempted_request_has_a_second_plan_up_to_its_next_token(harness):
    planning(harness)
    request = harness.request(30)
    assert harness.side.matched_tokens(request, 0) == (24, True)
    request.num_preemptions += 1
    assert harness.side.matched_tokens(request, 0) == (24, True)
    harness.now = 1.0
    harness.run(request, 30, [5, 6, 7, 8])
    harness.now = 2.0
    forward_ended(harness)
    request.all_token_ids += [1] * 10  # it answers, and is preempted once more
    request.num_preemptions += 1
    request.num_computed_tokens = 0
    assert harness.side.matched_tokens(request, 0) == (24, True)
    harness.run(request, 35, [5, 6, 7, 8])
    harness.now = 3.0
    forward_ended(harness)
    harness.run(request, 5, [5, 6, 7, 8, 9])
    harness.now = 4.0
    forward_ended(harness)
    assert reported(harness) == ([(6, 0.0, 2.0), (7, 0.0, 2.0)], [(5, "preempted", 0.0)])


def test_a_plan_whose_fetch_failed_is_reported_as_followed(harness):
    planning(harness)
    request = harness.request(30)
    harness.side.matched_tokens(request, 0)
    harness.side.allocated(request, ([5, 6, 7, 8],), 24)
    harness.now = 1.0
    harness.side.on_worker_output(harness.fakes.outcome(ended=["r"], invalid=[5, 6, 7]))
    assert harness.side.matched_tokens(request, 0) == (0, False)
    harness.run(request, 30, [5, 6, 7, 8])
    harness.now = 2.0
    forward_ended(harness)
    assert reported(harness) == ([(5, 0.0, 2.0)], [])


def test_a_report_is_sent_after_16_steps_of_a_busy_engine(harness):
    request = harness.request(3000)
    for _ in range(16):
        prefilled(harness, request, 100, 0.1)
    (report,) = harness.client.of(Observed)
    assert len(report.steps) == 16


def declined(harness):
    return harness.request(30, request_id="other", resumable=True)


def arrived_without_a_node(harness):
    lent, harness.links[0].current = harness.links[0].current, None
    other = harness.request(30, request_id="other")
    harness.links[0].current = lent
    return other


def left_alone_by_a_reset(harness):
    other = harness.request(30, request_id="other")
    harness.side.reset()
    return other


@pytest.mark.parametrize("stranger", [declined, arrived_without_a_node, left_alone_by_a_reset])
def test_no_steps_are_reported_while_an_untracked_request_runs(harness, stranger):
    other, request = stranger(harness), harness.request(300)
    prefilled(harness, request, 200, 0.4)
    harness.side.on_finished(request)
    harness.side.on_worker_output(harness.fakes.outcome())
    assert harness.client.of(Observed) == []
    harness.side.on_finished(other)
    harness.side.on_worker_output(harness.fakes.outcome())
    assert len(harness.client.of(Observed)) == 1
