"""Faults of the store behind an engine client: each costs the call that meets it, and no other."""

import contextlib

import pytest

import holdfast
from holdfast.client.engine import EngineGroup, GroupPages, LookupOptions
from holdfast.client.engine_opening import open_engine
from holdfast.errors import BlockError, NodeGoneError, Outcome, RefusedError
from holdfast.testing.embedded import (
    BLOCKS,
    FINGERPRINT,
    LAYOUT,
    blocks_for,
    fingerprint_for,
    tokens_for,
)
from holdfast.testing.row_pages import RowPages
from holdfast_bench.harness.pause import pause, resume
from holdfast_bench.harness.process import wait_until

ANSWER_S = 60.0
SHORT_S = 0.2


class Engine:
    """A small engine of a node, with the pages of one context."""

    def __init__(self, address):
        self.store = holdfast.open(address, domain="default")
        self.client = open_engine(self.store, [EngineGroup(FINGERPRINT)])
        self.memory = RowPages(BLOCKS, LAYOUT.raw_bytes)
        self.pages = [GroupPages(self.memory.device, range(BLOCKS))]
        self.context = self.client.context(tokens_for(1))
        self.memory.rows[:] = blocks_for(1).view("u1")

    def close(self):
        self.client.close()
        self.store.close()
        self.memory.close()

    def save(self):
        return self.client.save(self.context, [range(BLOCKS)], self.pages)

    def lookup(self, **options):
        return self.client.lookup(self.context, LookupOptions(**options))

    def holds_all(self):
        ticket = self.lookup().wait(ANSWER_S)
        return ticket is not None and ticket.held == BLOCKS * LAYOUT.block_tokens


@pytest.fixture
def engine(node):
    with contextlib.closing(Engine(node.address)) as one:
        yield one


@contextlib.contextmanager
def stopped(node):
    """Let the node neither answer nor end."""
    pause(node.process.pid)
    try:
        yield
    finally:
        resume(node.process.pid)


def test_a_node_that_is_stopped_keeps_no_lookup_waiting(engine, node):
    assert engine.save().wait(ANSWER_S).blocks == BLOCKS
    with stopped(node):
        asking = engine.lookup()
        assert asking.poll() is None
        assert asking.wait(SHORT_S) is None
        asking.cancel()
    wait_until(node.process, engine.holds_all, ANSWER_S)


def test_a_load_from_a_node_that_is_stopped_fails_and_the_next_one_does_not(engine, node):
    assert engine.save().wait(ANSWER_S).blocks == BLOCKS
    ticket = engine.lookup(limit_s=SHORT_S).wait(ANSWER_S)
    with stopped(node):
        loaded = engine.client.load(ticket, engine.pages).wait(ANSWER_S)
    assert (loaded.tokens, loaded.outcome) == (0, Outcome.GONE)
    wait_until(node.process, engine.holds_all, ANSWER_S)
    engine.memory.rows[:] = 0
    ticket = engine.lookup().wait(ANSWER_S)
    assert engine.client.load(ticket, engine.pages).wait(ANSWER_S).tokens == ticket.tokens > 0
    assert (engine.memory.rows == blocks_for(1).view("u1")).all()


def test_a_save_to_a_node_that_is_stopped_goes_on_with_the_node(engine, node):
    with stopped(node):
        saving = engine.save()
        assert saving.wait(SHORT_S) is None
    assert saving.wait(ANSWER_S).blocks == BLOCKS
    assert engine.holds_all()


def test_a_node_that_was_killed_is_an_outcome_and_used_again_after_its_restart(engine, node):
    assert engine.save().wait(ANSWER_S).blocks == BLOCKS
    ticket = engine.lookup().wait(ANSWER_S)
    node.process.kill()
    assert engine.client.load(ticket, engine.pages).wait(ANSWER_S).outcome is Outcome.GONE
    assert engine.lookup().wait(ANSWER_S).outcome is Outcome.GONE
    assert engine.save().wait(ANSWER_S).outcome is Outcome.GONE
    node.start()
    wait_until(node.process, lambda: engine.save().wait(ANSWER_S).outcome is Outcome.OK, ANSWER_S)
    wait_until(node.process, engine.holds_all, ANSWER_S)


@pytest.mark.parametrize("kind", ["embedded", "node"])
def test_a_group_whose_block_does_not_fit_the_memory_is_refused(request, kind):
    large = LAYOUT.__class__("float16", 1 << 19, LAYOUT.layers)
    group = EngineGroup(fingerprint_for(large))
    if kind == "embedded":
        opened = holdfast.open(host="64 MiB")
    else:
        opened = holdfast.open(request.getfixturevalue("node").address, domain="default")
    with (
        opened as store,
        pytest.raises((RefusedError, BlockError), match=r"raise tiers\.0\.capacity"),
    ):
        open_engine(store, [group])


def test_without_a_node_there_is_no_client(node):
    with holdfast.open(node.address, domain="default") as store:
        node.process.kill()
        with pytest.raises(NodeGoneError, match="cannot connect"):
            open_engine(store, [EngineGroup(FINGERPRINT)])
        node.start()
