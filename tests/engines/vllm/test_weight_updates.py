"""Updates of weights in place, as vLLM's workers carry them out."""

import pytest

pytest.importorskip("vllm")

from holdfast.engines.vllm.weight_updates import UPDATES, WorkerUpdates
from holdfast.engines.vllm.work import WorkerReport


def test_the_tested_vllm_has_every_update_that_is_watched():
    from vllm.v1.worker.gpu_worker import Worker

    assert [name for name in UPDATES if not hasattr(Worker, name)] == []


def test_an_update_counts_before_it_begins_and_does_its_work():
    updates, seen = WorkerUpdates(), []

    class Worker:
        def reload_weights(self, *, path):
            seen.append((path, updates.begun))
            return "loaded"

    updates.watch(Worker)
    updates.watch(Worker)
    assert Worker().reload_weights(path="new") == "loaded"
    assert (seen, updates.begun) == ([("new", 1)], 1)


def test_a_reset_of_weights_to_zero_counts_as_an_update():
    updates = WorkerUpdates()

    class Worker:
        def reset_weights(self):
            return updates.begun

    updates.watch(Worker)
    assert Worker().reset_weights() == 1


@pytest.fixture
def harness(fakes):
    return fakes.SchedulerRig(fakes)


def report(harness, updates):
    said = WorkerReport(computed=True, updates=updates)
    harness.side.on_worker_output(harness.fakes.outcome(said=said))


def saves_after_local_hits(harness, name):
    request = harness.request(30, request_id=name)
    harness.side.matched_tokens(request, 16)
    request.num_computed_tokens = 16
    saves = harness.run(request, 8, [5, 6, 7]).saves
    harness.side.on_finished(request)
    return saves


def test_pages_of_vllm_that_may_be_of_earlier_weights_are_not_saved(harness):
    """vLLM's own cache is not empty after an update, and tells no connector when it is."""
    report(harness, 0)
    report(harness, 1)
    assert saves_after_local_hits(harness, "stale") == []
    computed = harness.request(30, request_id="computed")
    harness.side.matched_tokens(computed, 0)
    assert harness.run(computed, 16, [1, 2, 3]).saves != []
    harness.side.reset()  # vLLM keeps its pages, because a request holds some
    harness.side.on_finished(computed)
    assert saves_after_local_hits(harness, "still stale") == []
    harness.side.reset()
    assert saves_after_local_hits(harness, "fresh") != []


def test_pages_are_saved_after_an_update_if_vllms_cache_was_emptied_before(harness):
    report(harness, 0)
    harness.side.reset()
    report(harness, 1)
    assert saves_after_local_hits(harness, "new weights") != []
