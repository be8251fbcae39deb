"""Contexts of campaigns: a wait that does not end is an error that a command can show."""

import threading

import pytest

from holdfast.errors import HoldfastError
from holdfast.store.store import Store
from holdfast.testing.memory import MemoryTier
from holdfast_bench.campaigns import contexts
from holdfast_bench.campaigns.contexts import Contexts, chain_of, keys_of, place_of


@pytest.fixture
def store():
    with Store(1 << 20, [], {"default": b"s" * 32}) as store:
        store.start()
        yield store


class StuckTier(MemoryTier):
    """Neither lists nor writes a record before it is told to."""

    def __init__(self):
        super().__init__(1 << 20)
        self.go_on = threading.Event()

    def survivors(self):
        assert self.go_on.wait(60)
        return super().survivors()

    def write(self, batch):
        assert self.go_on.wait(60)
        return super().write(batch)


def test_a_wait_that_does_not_end_is_an_error(monkeypatch):
    monkeypatch.setattr(contexts, "WAIT_S", 0.01)
    with Store(1 << 20, [tier := StuckTier()], {"default": b"s" * 32}) as store:
        store.start()
        waiting = Contexts(store, 4_000)
        waiting.save(chain_of("a context", 2))
        with pytest.raises(HoldfastError, match=r"blocks are still not written after 0\.01 s"):
            waiting.wait_written()
        with pytest.raises(HoldfastError, match=r"recovery did not end within 0\.01 s"):
            waiting.await_recovery()
        tier.go_on.set()


def test_keys_depend_on_secret_and_tokens():
    tokens = [1] * 256
    assert len(keys_of(b"s" * 32, tokens)) == 2
    assert keys_of(b"s" * 32, tokens)[0] != keys_of(b"t" * 32, tokens)[0]


def test_the_record_at_the_place_of_a_block_is_its_own(store):
    saved, keys = Contexts(store, 4_000), chain_of("a context", 2)
    saved.save(keys)
    record = store.record(saved.namespace, place_of(store, saved.namespace, keys[1]))
    assert bytes(record) == bytes(saved.record(keys[1]))
    assert keys[1] in bytes(record)
