"""The store's own threads: they go on whatever happens to them."""

import time

from holdfast.store import store as module


def test_housekeeping_goes_on_after_an_error(harness, monkeypatch) -> None:
    monkeypatch.setattr(module, "_HOUSEKEEPING_S", 0.01)
    raised = []

    def fail(_store) -> None:
        if len(raised) < 2:
            raised.append(True)
            raise RuntimeError("housekeeping failed")

    monkeypatch.setattr(module.hints, "start_prestages", fail)
    one, until = harness(), time.monotonic() + 60
    while len(raised) < 2:
        assert time.monotonic() < until, "housekeeping ended with its first error"
        time.sleep(0.005)
    chain = one.chain(1, 2)
    one.save(chain)
    one.store.fetch(one.namespace, chain.keys, 1.0)
    one.clock.advance(3_600.0)
    while one.view.leases:
        assert time.monotonic() < until, "an expired lease is not taken back"
        time.sleep(0.005)


def test_a_failed_housekeeping_task_does_not_stop_the_other_tasks(
    harness, monkeypatch, caplog
) -> None:
    def fail() -> None:
        raise RuntimeError("the audit file is full")

    one, started = harness(), []
    chain = one.chain(1, 2)
    one.save(chain)
    one.store.fetch(one.namespace, chain.keys, 1.0)
    one.clock.advance(3_600.0)
    monkeypatch.setattr(one.store.audit, "start_catch_up", fail)
    monkeypatch.setattr(module.hints, "start_prestages", started.append)
    one.store._housekeep_once()
    assert started == [one.store]
    assert not one.view.leases
    assert "the audit file is full" in caplog.text
    monkeypatch.undo()


def test_a_housekeeping_task_that_goes_on_failing_is_logged_once_until_it_succeeds(
    harness, monkeypatch, caplog
) -> None:
    results = [RuntimeError("full"), RuntimeError("full"), None, RuntimeError("full")]

    def keep_house() -> None:
        if (error := results.pop(0)) is not None:
            raise error

    monkeypatch.setattr(module, "_HOUSEKEEPING_S", 3_600.0)
    one = harness()
    monkeypatch.setattr(one.store.audit, "start_catch_up", keep_house)
    while results:
        one.store._housekeep_once()
    assert caplog.text.count("housekeeping failed in part") == 2
