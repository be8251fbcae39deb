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


def test_pages_of_vllm_that_may_be_of_earlier_weights_are_not_saved(fakes):
    """vLLM's own cache is not empty after an update, and tells no connector when it is."""
    harness = fakes.SchedulerRig(fakes)
    report = WorkerReport(computed=True, updates=1)
    harness.side.on_worker_output(harness.fakes.outcome(said=report))

    def saves_after_local_hits(name):
        request = harness.request(30, request_id=name)
        harness.side.matched_tokens(request, 16)
        request.num_computed_tokens = 16
        return harness.run(request, 8, [5, 6, 7]).saves

    assert saves_after_local_hits("stale") == []
    computed = harness.request(30, request_id="computed")
    harness.side.matched_tokens(computed, 0)
    assert harness.run(computed, 16, [1, 2, 3]).saves != []
    harness.side.reset()  # as vLLM asks for it when it empties its cache and the connector's
    assert saves_after_local_hits("fresh") != []
