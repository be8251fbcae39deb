"""Requests of vLLM that share a saved prefix and arrive together: one of them loads it."""

import pytest

pytest.importorskip("vllm")

BLOCK, PREFIX = 8, 4 * 8
PAGES = [1, 2, 3, 4, 5]
CROWD = 5


@pytest.fixture
def harness(fakes):
    harness = fakes.SchedulerRig(fakes)
    harness.held = PREFIX // BLOCK
    return harness


def crowd(harness, **other):
    """Requests for the same prefix and one more token."""
    return [harness.request(PREFIX + 1, request_id=f"r{at}", **other) for at in range(CROWD)]


def load(harness, request, local=0):
    """Let a request load the prefix."""
    assert harness.side.matched_tokens(request, local) == (PREFIX - local, True)
    harness.side.allocated(request, (PAGES,), PREFIX - local)
    (task,) = harness.side.build_work(harness.fakes.step({})).loads
    return task


def end(harness, request, invalid=()):
    harness.side.on_worker_output(harness.fakes.outcome([request.request_id], invalid))


def test_the_first_of_a_crowd_loads_and_the_others_find_the_blocks_in_the_engine(harness):
    first, *others = crowd(harness)
    load(harness, first)
    for other in others:
        assert harness.side.matched_tokens(other, 0) == (None, False)
    end(harness, first)
    for other in others:
        assert harness.side.matched_tokens(other, PREFIX) == (0, False)
        harness.side.allocated(other, (PAGES,), 0)
    assert harness.side.counts.data["awaited_loads"] == CROWD - 1


def test_after_a_load_that_failed_one_other_request_loads(harness):
    first, second, *others = crowd(harness)
    load(harness, first)
    assert harness.side.matched_tokens(second, 0) == (None, False)
    end(harness, first, invalid=PAGES)
    load(harness, second)
    for other in others:
        assert harness.side.matched_tokens(other, 0) == (None, False)


def test_a_load_that_failed_in_part_leaves_its_rest_to_one_other_request(harness):
    first, second, third, *_ = crowd(harness)
    load(harness, first)
    assert harness.side.matched_tokens(second, 0) == (None, False)
    end(harness, first, invalid=PAGES[2:])
    task = load(harness, second, local=2 * BLOCK)
    assert task.tokens == PREFIX - 2 * BLOCK
    assert harness.side.matched_tokens(third, 2 * BLOCK) == (None, False)


def test_if_the_request_that_loads_is_aborted_another_one_loads(harness):
    first, second, third, *_ = crowd(harness)
    load(harness, first)
    assert harness.side.matched_tokens(second, 0) == (None, False)
    harness.side.on_finished(first)
    load(harness, second)
    end(harness, first)  # the aborted load ends later
    assert harness.side.matched_tokens(third, 0) == (None, False)


def test_a_request_that_waits_may_be_aborted(harness):
    first, second, *_ = crowd(harness)
    load(harness, first)
    assert harness.side.matched_tokens(second, 0) == (None, False)
    harness.side.on_finished(second)
    end(harness, first)


def test_a_load_that_takes_too_long_is_not_waited_for(harness):
    first, second, *_ = crowd(harness)
    load(harness, first)
    assert harness.side.matched_tokens(second, 0) == (None, False)
    harness.now += 5.0
    load(harness, second)


def test_a_request_that_was_preempted_waits_for_a_load_too(harness):
    first, second, third, *_ = crowd(harness)
    load(harness, first)
    end(harness, first)
    assert harness.side.matched_tokens(second, PREFIX) == (0, False)
    harness.side.allocated(second, (PAGES,), 0)
    second.num_preemptions += 1
    load(harness, third)
    assert harness.side.matched_tokens(second, 0) == (None, False)


def test_requests_with_different_salts_load_for_themselves(harness):
    for at in range(CROWD):
        load(harness, harness.request(PREFIX + 1, request_id=f"r{at}", cache_salt=f"salt {at}"))


def test_without_vllms_prefix_cache_every_request_loads_for_itself(fakes):
    harness = fakes.SchedulerRig(fakes, setting=fakes.setting(shares_loads=False))
    harness.held = PREFIX // BLOCK
    for request in crowd(harness):
        load(harness, request)


def test_after_a_reset_no_request_waits_for_an_earlier_load(harness):
    first, second, *_ = crowd(harness)
    load(harness, first)
    harness.side.reset()
    assert harness.side.matched_tokens(second, 0) == (0, False)
    load(harness, harness.request(PREFIX + 1, request_id="later"))
