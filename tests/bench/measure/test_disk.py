"""Measurements of a disk end: a store is closed, and a tier that stores nothing is an error."""

from types import SimpleNamespace

import pytest

from holdfast.errors import HoldfastError, Outcome
from holdfast.testing.memory import MemoryTier
from holdfast_bench.measure import disk


def test_the_store_that_fetches_is_closed(monkeypatch):
    opened = []

    class Kept(disk.Store):
        def start(self):
            opened.append(self)
            super().start()

    monkeypatch.setattr(disk, "Store", Kept)
    bench = SimpleNamespace(hold=lambda _: None, fetch=None)
    monkeypatch.setattr(disk, "BenchedStore", lambda *_: bench)
    monkeypatch.setattr(disk, "paired", lambda *_: None)
    monkeypatch.setattr(disk, "speed_row", lambda what, *_, **__: what)
    assert disk._fetch_rows(MemoryTier(1 << 20), None, 1) == ["disk.fetch"]
    assert [bool(store.gone) for store in opened] == [True]


def test_a_tier_that_never_holds_a_context_is_an_error(monkeypatch):
    monkeypatch.setattr(disk, "WRITE_S", 0.0)
    slots = SimpleNamespace(outcome=Outcome.OK, places=[-1] * disk.BATCH, ticket=1)
    table = SimpleNamespace(lower=[SimpleNamespace(name="disk")], unwritten=lambda: 1)
    store = SimpleNamespace(
        table=table,
        reserve=lambda *_: slots,
        arena=lambda _: SimpleNamespace(view=b""),
        commit=lambda _: disk.BATCH,
    )
    with pytest.raises(HoldfastError, match="disk does not hold 32 blocks after 0 s"):
        disk.BenchedStore(store).write()
