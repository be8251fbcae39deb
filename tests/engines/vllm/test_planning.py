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
def rig(fakes):
    return fakes.SchedulerRig(fakes)


def forward_ended(rig):
    rig.side.on_worker_output(rig.fakes.outcome(said=WorkerReport(computed=True)))


def test_only_what_is_worth_fetching_is_promised_and_only_what_is_held_is_not_saved(rig):
    rig.held, rig.worth = 3, 1
    request = rig.request(30)
    assert rig.side.matched_tokens(request, 0) == (8, True)
    rig.side.allocated(request, [5, 6], 8)
    request.num_computed_tokens = 8
    work = rig.run(request, 22, [5, 6, 7, 8])
    assert unpack_keys(work.loads[0].keys[0]) == rig.chain(30).keys[:1]
    assert work.saves == []
    rig.worth = 0
    assert rig.side.matched_tokens(rig.request(30, request_id="none"), 0) == (0, False)


def test_the_node_hears_how_long_the_prompt_is_and_what_the_engine_has(rig):
    rig.client.answer = lambda _: Covered(3, 3, {"host": 3}, 5, 0.25, 0.1, 0.9)
    request = rig.request(30)
    assert rig.side.matched_tokens(request, 9) == (15, True)
    first, again = rig.client.of(Cover)
    assert (first.tokens, first.have, first.limit_s, first.plan) == (30, 0, 5.0, 0)
    assert (again.tokens, again.have, again.plan) == (30, 9, 5)
    assert rig.side.matched_tokens(request, 17) == (7, True)
    assert len(rig.client.of(Cover)) == 2, "it asks again once"
    rig.side.allocated(request, [5, 6, 7, 8], 7)
    (load,) = rig.side.build_work(rig.fakes.step({})).loads
    assert (load.plan, load.deadline_s) == (5, 0.25)


def test_while_the_second_answer_is_awaited_the_count_is_unknown(rig):
    rig.held = 3
    request = rig.request(30)
    assert rig.side.matched_tokens(request, 0) == (24, True)
    rig.answering = False
    assert rig.side.matched_tokens(request, 8) == (None, False)
    rig.now = 0.06
    assert rig.side.matched_tokens(request, 8) == (0, False)


def test_nothing_more_is_asked_where_the_engine_has_all_that_is_held(rig):
    rig.held = 2
    request = rig.request(30)
    assert rig.side.matched_tokens(request, 16) == (0, False)
    assert len(rig.client.of(Cover)) == 1


def test_a_long_prompt_may_wait_longer_for_an_answer(fakes):
    rig = fakes.SchedulerRig(fakes, setting=fakes.setting(cover_deadline_s=None))
    rig.client.answer = lambda _: Covered(0, 0, {}, 0, 0.0, 0.1, 3.0)
    rig.side.matched_tokens(rig.request(30, request_id="first"), 0)  # 0.1 s a token
    rig.client.answer = lambda _: None
    for tokens, limit_s in ((9, 0.05), (40, 0.2), (400, 1.0)):
        request, start = rig.request(tokens, request_id=f"r{tokens}"), rig.now
        rig.now = start + limit_s - 0.001
        assert rig.side.matched_tokens(request, 0) == (None, False)
        rig.now = start + limit_s + 0.001
        assert rig.side.matched_tokens(request, 0) == (0, False)
        rig.side._backoff.answered()


def test_a_node_that_may_lack_a_processor_has_more_time(fakes):
    rig = fakes.SchedulerRig(fakes, setting=fakes.setting(cover_deadline_s=None))
    rig.client.answer = lambda _: None
    rig.client.runnable = True
    request, start = rig.request(30), rig.now
    rig.now = start + 0.9
    assert rig.side.matched_tokens(request, 0) == (None, False)
    rig.client.answer = lambda _: Covered(1, 1, {"host": 1}, 0, 0.0, 0.1, 3.0)
    assert rig.side.matched_tokens(request, 0) == (8, True)
    rig.client.answer = lambda _: None
    late, start = rig.request(30, request_id="late"), rig.now
    assert rig.side.matched_tokens(late, 0) == (None, False)
    rig.now = start + 1.001
    assert rig.side.matched_tokens(late, 0) == (0, False)


def test_a_timeout_that_the_user_has_set_is_kept_whatever_the_node_does(fakes):
    rig = fakes.SchedulerRig(fakes, setting=fakes.setting(cover_deadline_s=0.05))
    rig.client.answer = lambda _: None
    rig.client.runnable = True
    request, start = rig.request(30), rig.now
    assert rig.side.matched_tokens(request, 0) == (None, False)
    rig.now = start + 0.051
    assert rig.side.matched_tokens(request, 0) == (0, False)


def prefilled(rig, request, scheduled, seconds):
    rig.run(request, scheduled, list(range(200)))
    rig.now += seconds
    forward_ended(rig)


def test_prefill_steps_are_told_when_nothing_else_is_to_do(rig):
    request = rig.request(300)
    rig.side.matched_tokens(request, 0)
    prefilled(rig, request, 200, 0.4)
    prefilled(rig, request, 100, 0.3)
    prefilled(rig, request, 1, 0.1)  # decoding
    assert rig.client.of(Observed) == []
    rig.side.on_finished(request)
    rig.side.on_worker_output(rig.fakes.outcome())
    (report,) = rig.client.of(Observed)
    assert [(new, context) for new, context, _ in report.steps] == [(200, 0), (100, 200)]
    assert [seconds for *_, seconds in report.steps] == pytest.approx([0.4, 0.3])
    assert len(rig.client.forgotten) == 1, "nobody waits for the answer"


def test_steps_beside_a_load_or_a_stranger_are_not_told(rig):
    rig.held = 2
    waiting, request = rig.request(30, request_id="waiting"), rig.request(300)
    rig.side.matched_tokens(waiting, 0)
    rig.side.allocated(waiting, [5, 6, 7], 16)
    prefilled(rig, request, 100, 0.4)
    rig.side.on_worker_output(rig.fakes.outcome(ended=["waiting"]))
    rig.side.on_finished(waiting)
    pages = {"r": list(range(200)), "stranger": [1]}
    rig.side.build_work(rig.fakes.step(pages, r=100, stranger=100))
    rig.now += 1
    forward_ended(rig)
    rig.side.on_finished(request)
    rig.side.on_worker_output(rig.fakes.outcome())
    assert [report.steps for report in rig.client.of(Observed)] == [[]]


def test_steps_handed_out_ahead_are_timed_from_the_end_of_the_one_before(rig):
    request = rig.request(300)
    rig.run(request, 100, list(range(200)))
    rig.run(request, 150, list(range(200)))
    rig.now = 1.0
    forward_ended(rig)
    rig.now = 3.0
    forward_ended(rig)
    rig.side.on_finished(request)
    rig.side.on_worker_output(rig.fakes.outcome())
    (report,) = rig.client.of(Observed)
    assert [seconds for *_, seconds in report.steps] == [1.0, 2.0]


def test_a_step_without_a_forward_that_two_workers_report_ends_no_forward(rig):
    aggregator = KVOutputAggregator(2)

    def step_ended(said):
        outputs = [
            SimpleNamespace(kv_connector_output=KVConnectorOutput(kv_connector_worker_meta=each))
            for each in said
        ]
        rig.side.on_worker_output(aggregator.aggregate(outputs).kv_connector_output)

    request = rig.request(400)
    rig.side.build_work(rig.fakes.step({}))
    rig.run(request, 400, list(range(200)))
    rig.now = 0.0005
    step_ended([None, None])
    rig.now = 0.0485
    step_ended([WorkerReport(computed=True), WorkerReport(computed=True)])
    rig.side.on_finished(request)
    step_ended([None, None])
    (report,) = rig.client.of(Observed)
    assert report.steps == [(400, 0.0, 0.0485)]


def test_prompts_that_share_a_step_count_as_one(rig):
    one, two = rig.request(100, request_id="one"), rig.request(300, request_id="two")
    two.num_computed_tokens = 200
    pages = {"one": list(range(50)), "two": list(range(50))}
    rig.side.build_work(rig.fakes.step(pages, one=100, two=100))
    rig.now = 1.0
    rig.side.on_finished(one)
    rig.side.on_finished(two)
    forward_ended(rig)
    (report,) = rig.client.of(Observed)
    ((new, context, seconds),) = report.steps
    assert (new, seconds) == (200, 1.0)
    assert new * (context + new / 2) == 100 * 50 + 100 * 250


def test_what_came_of_a_plan_is_told(rig):
    rig.client.answer = lambda message: (
        Covered(3, 3, {"host": 3}, 5, 0.25, 0.1, 0.9) if isinstance(message, Cover) else Done()
    )
    request = rig.request(30)
    rig.side.matched_tokens(request, 0)
    rig.side.allocated(request, [5, 6, 7, 8], 24)
    rig.side.build_work(rig.fakes.step({}))
    rig.now = 0.2
    rig.side.on_worker_output(rig.fakes.outcome(ended=["r"]))
    request.num_computed_tokens = 24
    rig.run(request, 6, [5, 6, 7, 8])
    rig.now = 0.5
    rig.side.on_finished(request)
    forward_ended(rig)
    reports = rig.client.of(Observed)
    assert [ending for report in reports for ending in report.endings] == [(5, 0.2, 0.5)]


PLANS = {0: 5, 1: 6, 2: 7}
"""Numbers of the node's plans: the first one for a request, and those that follow."""


def planning(rig, held=3):
    """Have the node plan to fetch three blocks of whatever it is asked about."""

    def answer(message):
        if not isinstance(message, Cover):
            return Done()
        number = PLANS[len(rig.client.of(Cover)) - 1]
        return Covered(held, held, {"host": held}, number, 0.25, 0.1, 0.9)

    rig.client.answer = answer


def reported(rig):
    """Return what is told of plans once the engine has nothing else to do."""
    for request in list(rig.side._live):
        rig.side.on_finished(rig.fakes.Request(request))
    rig.side.on_worker_output(rig.fakes.outcome())
    endings, not_followed = [], []
    for report in rig.client.of(Observed):
        endings += report.endings
        not_followed += report.not_followed
    return endings, not_followed


@pytest.mark.parametrize("local", [24, 29])
def test_a_plan_for_what_the_engine_turns_out_to_have_is_not_carried_out(rig, local):
    planning(rig)
    request = rig.request(30)
    assert rig.side.matched_tokens(request, local) == (0, False)
    request.num_computed_tokens = local
    rig.run(request, 30 - local, [5, 6, 7, 8])
    rig.now = 0.3
    forward_ended(rig)
    assert reported(rig) == ([], [(5, "engine_had_it", 0.3)])


def test_a_plan_that_was_made_again_for_what_the_engine_has_is_carried_out(rig):
    planning(rig)
    request = rig.request(30)
    assert rig.side.matched_tokens(request, 9) == (15, True)
    rig.side.allocated(request, [5, 6, 7, 8], 15)
    rig.side.on_worker_output(rig.fakes.outcome(ended=["r"]))
    request.num_computed_tokens = 24
    rig.run(request, 6, [5, 6, 7, 8])
    rig.now = 0.5
    forward_ended(rig)
    assert reported(rig) == ([(6, 0.0, 0.5)], [])


def test_a_plan_for_more_than_the_engine_kept_is_not_carried_out(rig):
    planning(rig)
    request = rig.request(30)
    assert rig.side.matched_tokens(request, 16) == (8, True)
    assert rig.side.matched_tokens(request, 0) == (24, True)
    rig.run(request, 30, [5, 6, 7, 8])
    forward_ended(rig)
    (ending,) = reported(rig)[1]
    assert ending[:2] == (6, "engine_lost_it")


def test_a_plan_whose_second_answer_is_late_is_not_carried_out(rig):
    planning(rig)
    request = rig.request(30)
    assert rig.side.matched_tokens(request, 0) == (24, True)
    rig.client.answer = lambda _: None
    assert rig.side.matched_tokens(request, 8) == (None, False)
    rig.now = 0.06
    assert rig.side.matched_tokens(request, 8) == (0, False)
    rig.client.answer = lambda _: Done()
    rig.run(request, 30, [5, 6, 7, 8])
    forward_ended(rig)
    assert reported(rig) == ([], [(5, "answered_late", 0.0)])


def test_a_plan_that_nobody_is_there_to_make_again_is_not_carried_out(rig):
    planning(rig)
    request = rig.request(30)
    assert rig.side.matched_tokens(request, 0) == (24, True)
    rig.links[0].lent = None
    assert rig.side.matched_tokens(request, 8) == (0, False)
    rig.links[0].lent = rig.client
    assert reported(rig) == ([], [(5, "engine_gone", 0.0)])


def test_an_aborted_request_did_not_carry_out_its_plan(rig):
    planning(rig)
    request = rig.request(30)
    assert rig.side.matched_tokens(request, 0) == (24, True)
    rig.side.on_finished(request)
    assert reported(rig) == ([], [(5, "request_ended", 0.0)])


def test_a_reset_leaves_plans_alone(rig):
    planning(rig)
    rig.side.matched_tokens(rig.request(30), 0)
    rig.side.reset()
    assert reported(rig) == ([], [(5, "engine_reset", 0.0)])


def test_a_preempted_request_has_a_second_plan_up_to_its_next_token(rig):
    planning(rig)
    request = rig.request(30)
    assert rig.side.matched_tokens(request, 0) == (24, True)
    request.num_preemptions += 1
    assert rig.side.matched_tokens(request, 0) == (24, True)
    rig.now = 1.0
    rig.run(request, 30, [5, 6, 7, 8])
    rig.now = 2.0
    forward_ended(rig)
    request.all_token_ids += [1] * 10  # it answers, and is preempted once more
    request.num_preemptions += 1
    request.num_computed_tokens = 0
    assert rig.side.matched_tokens(request, 0) == (24, True)
    rig.run(request, 35, [5, 6, 7, 8])
    rig.now = 3.0
    forward_ended(rig)
    rig.run(request, 5, [5, 6, 7, 8, 9])
    rig.now = 4.0
    forward_ended(rig)
    assert reported(rig) == ([(6, 0.0, 2.0), (7, 0.0, 2.0)], [(5, "preempted", 0.0)])


def test_a_fetch_that_failed_is_part_of_a_plan_that_was_carried_out(rig):
    planning(rig)
    request = rig.request(30)
    rig.side.matched_tokens(request, 0)
    rig.side.allocated(request, [5, 6, 7, 8], 24)
    rig.now = 1.0
    rig.side.on_worker_output(rig.fakes.outcome(ended=["r"], invalid=[5, 6, 7]))
    assert rig.side.matched_tokens(request, 0) == (0, False)
    rig.run(request, 30, [5, 6, 7, 8])
    rig.now = 2.0
    forward_ended(rig)
    assert reported(rig) == ([(5, 0.0, 2.0)], [])


def test_a_report_goes_out_while_the_engine_stays_busy(rig):
    request = rig.request(3000)
    for _ in range(16):
        prefilled(rig, request, 100, 0.1)
    (report,) = rig.client.of(Observed)
    assert len(report.steps) == 16


def declined(rig):
    return rig.request(30, request_id="other", lora_request=object())


def arrived_without_a_node(rig):
    lent, rig.links[0].lent = rig.links[0].lent, None
    other = rig.request(30, request_id="other")
    rig.links[0].lent = lent
    return other


def left_alone_by_a_reset(rig):
    other = rig.request(30, request_id="other")
    rig.side.reset()
    return other


@pytest.mark.parametrize("stranger", [declined, arrived_without_a_node, left_alone_by_a_reset])
def test_beside_a_request_that_is_not_followed_nothing_is_waited_for_or_told(rig, stranger):
    other, request = stranger(rig), rig.request(300)
    rig.answering = False
    assert rig.side.matched_tokens(request, 0) == (None, False)
    assert rig.client.expected == []
    rig.answering = True
    prefilled(rig, request, 200, 0.4)
    rig.side.on_finished(request)
    rig.side.on_worker_output(rig.fakes.outcome())
    assert rig.client.of(Observed) == []
    rig.side.on_finished(other)
    rig.side.on_worker_output(rig.fakes.outcome())
    assert len(rig.client.of(Observed)) == 1
    rig.side.matched_tokens(rig.request(30, request_id="alone"), 0)
    assert len(rig.client.expected) == 1
