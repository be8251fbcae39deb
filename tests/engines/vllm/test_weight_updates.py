"""Updates of weights in place, as vLLM's workers carry them out."""

import pytest

pytest.importorskip("vllm")

from holdfast.engines.vllm.weight_updates import UPDATES, WorkerUpdates


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
