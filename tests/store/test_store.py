"""The store's own threads: they go on whatever happens to them."""

import time

from holdfast.store import store as module


def test_housekeeping_goes_on_after_an_error(rig, monkeypatch) -> None:
    monkeypatch.setattr(module, "_HOUSEKEEPING_S", 0.01)
    failures = iter([RuntimeError("once"), RuntimeError("twice")])

    def fail(_store) -> None:
        error = next(failures, None)
        if error:
            raise error

    monkeypatch.setattr(module.hints, "bring_up", fail)
    one = rig()
    chain = one.chain(1, 2)
    one.save(chain)
    one.store.fetch(one.namespace, chain.keys, 1.0)
    one.clock.advance(3_600.0)
    until = time.monotonic() + 60
    while one.store.table.leases or next(failures, None):
        assert time.monotonic() < until, "a lease that is over is never taken back"
        time.sleep(0.005)
