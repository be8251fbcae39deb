"""The contexts of requests that wait in vLLM's queue are announced to the node."""

import pytest

pytest.importorskip("vllm")

from holdfast.blocks.key import unpack_keys
from holdfast.client.queued_requests import AGAIN_S
from holdfast.wire.local.messages import Cover, Covered, Hinted, Prestage


@pytest.fixture
def harness(fakes):
    """A node that holds three blocks of each request on its disk."""
    rig = fakes.SchedulerRig(fakes)
    rig.held, rig.tier = 3, "disk"
    return rig


def empty_step(harness):
    """One step in which vLLM admits no waiting request."""
    harness.side.build_work(harness.fakes.step({}))


def announced(harness):
    return [unpack_keys(message.keys) for message in harness.client.of(Prestage)]


def test_a_request_that_waits_for_its_turn_is_prestaged(harness):
    harness.request(40)
    assert announced(harness) == [], "it may be admitted in this step"
    empty_step(harness)
    assert announced(harness) == [harness.chain(24).keys]
    assert harness.client.of(Prestage)[0].in_s == 0.0
    assert harness.side.counts.data["prestaged_requests"] == 1


def test_a_request_that_is_admitted_at_once_is_not_prestaged(harness):
    request = harness.request(40)
    assert harness.side.matched_tokens(request, 0) == (24, True)
    harness.side.allocated(request, ([1, 2, 3, 4, 5],), 24)
    empty_step(harness)
    assert announced(harness) == []


def test_a_request_for_which_vllm_has_no_pages_is_prestaged(harness):
    request = harness.request(40)
    assert harness.side.matched_tokens(request, 0) == (24, True)
    empty_step(harness)  # vLLM allocated nothing
    assert announced(harness) == [harness.chain(24).keys]


@pytest.mark.parametrize(("held", "tier"), [(3, "host"), (0, "disk")])
def test_a_request_whose_context_is_in_memory_or_nowhere_is_not_announced(harness, held, tier):
    harness.held, harness.tier = held, tier
    harness.request(40)
    for _ in range(3):
        empty_step(harness)
    assert announced(harness) == []


def test_a_context_that_ends_with_a_chunk_of_attention_waits_without_an_error(fakes):
    """A resume there needs no block of such a group, which is the first one of Llama 4."""
    rig = fakes.SchedulerRig(fakes, attention="chunk", window=24)
    rig.held, rig.tier = 3, "disk"
    rig.request(40)
    for _ in range(3):
        empty_step(rig)
    assert announced(rig) == []


def test_no_step_waits_for_the_answer_about_a_waiting_request(harness):
    harness.answering = False
    harness.request(40)
    empty_step(harness)
    assert (announced(harness), harness.client.waits) == ([], [])
    harness.answering = True
    empty_step(harness)
    assert announced(harness) == [harness.chain(24).keys]


def test_a_request_that_waits_long_is_announced_again(harness):
    harness.request(40)
    for _ in range(3):
        empty_step(harness)
    assert len(announced(harness)) == 1
    harness.now = AGAIN_S
    empty_step(harness)
    assert len(announced(harness)) == 2


def test_a_prestaged_request_gets_a_new_plan_if_blocks_were_too_slow_to_fetch(harness):
    harness.worth = 1
    request = harness.request(40)
    empty_step(harness)
    assert announced(harness) == [harness.chain(24).keys], "the wait costs the request nothing"
    harness.worth, harness.tier = 3, "host"
    assert harness.side.matched_tokens(request, 0) == (24, True)
    assert len(harness.client.of(Cover)) == 2
    harness.side.matched_tokens(request, 0)
    assert len(harness.client.of(Cover)) == 2, "once is enough"


def test_an_ended_or_reset_request_is_not_announced(harness):
    ended = harness.request(40, request_id="ended")
    harness.side.on_finished(ended)
    harness.request(40, request_id="reset")
    harness.side.reset()
    empty_step(harness)
    assert announced(harness) == []


def test_a_node_that_is_gone_stops_no_step(harness):
    harness.request(40)
    harness.client.gone = True
    empty_step(harness)
    harness.client.gone = False
    assert announced(harness) == []


def test_waiting_requests_are_not_announced_if_the_option_says_so(fakes):
    rig = fakes.SchedulerRig(fakes, setting=fakes.setting(prestages=False))
    rig.held, rig.tier = 3, "disk"
    rig.request(40)
    empty_step(rig)
    assert announced(rig) == []


def test_each_rank_is_told_its_own_keys(fakes):
    rig = fakes.SchedulerRig(fakes, ranks=2)
    rig.held, rig.tier = 3, "disk"
    rig.request(40)
    empty_step(rig)
    first, second = [[m.keys for m in client.of(Prestage)] for client in rig.clients]
    assert len(first) == len(second) == 1
    assert first != second


def test_of_a_burst_the_newest_request_is_announced_first_and_each_with_its_queue(fakes):
    rig = fakes.SchedulerRig(fakes, setting=fakes.setting(step_tokens_max=80))
    rig.held, rig.tier, rig.worth = 3, "disk", 0
    for at in range(4):
        rig.request(40, request_id=f"r{at}", cache_salt=f"salt {at}")
    empty_step(rig)
    sent = rig.client.of(Prestage)
    assert all(message.queued for message in sent)
    assert [message.queued_tokens for message in sent] == [80, 80, 0, 0], "in steps of 80 tokens"
    assert len({message.keys for message in sent}) == 4


def test_a_request_whose_plan_fetches_nothing_of_a_slow_tier_is_prestaged(harness):
    harness.client.answer = lambda message: (
        Covered(3, 0, {}) if isinstance(message, Cover) else Hinted(3)
    )
    harness.request(40)
    empty_step(harness)
    assert announced(harness) == [harness.chain(24).keys]


def test_requests_of_a_crowd_are_announced_once_and_all_get_new_plans(harness):
    harness.worth = 0
    crowd = [harness.request(40, request_id=f"r{at}") for at in range(4)]
    for _ in range(3):
        empty_step(harness)
    assert announced(harness) == [harness.chain(24).keys]
    assert harness.side.counts.data["prestaged_requests"] == 1
    asked = len(harness.client.of(Cover))
    harness.worth, harness.tier = 3, "host"
    for request in crowd:
        harness.side.matched_tokens(request, 0)
    assert len(harness.client.of(Cover)) == asked + 4
