"""The engine client: embedded and through a node it gives equal answers to the same trace."""

import contextlib
import itertools
import threading
import time

import msgspec
import numpy as np
import pytest

import holdfast
from holdfast import KvGroup, Layout
from holdfast.client.engine import BlockRun, EngineGroup, GroupPages, LookupOptions
from holdfast.client.engine_opening import open_engine
from holdfast.errors import BlockError, Outcome
from holdfast.testing.embedded import (
    BLOCKS,
    LAYOUT,
    blocks_for,
    fingerprint_for,
    tokens_for,
)
from holdfast.testing.row_pages import RowPages

SIZE = LAYOUT.block_tokens
ANSWER_S = 60.0


MODELS = itertools.count()


def unused_model():
    """Return a model of which no store holds anything yet: the tests share one node."""
    return f"model {next(MODELS)}"


@pytest.fixture(params=["embedded", "node"])
def store(request, tmp_path):
    if request.param == "embedded":
        opened = holdfast.open(host="64 MiB", disk="64 MiB", path=str(tmp_path / "disk"))
    else:
        opened = holdfast.open(request.getfixturevalue("lasting_node").address, domain="default")
    with opened:
        yield opened


class Engine:
    """A small engine with pages of one block each, which waits for every answer."""

    def __init__(self, store):
        self.client = open_engine(store, [EngineGroup(fingerprint_for(LAYOUT, unused_model()))])
        self.memory = RowPages(16, LAYOUT.raw_bytes)

    def close(self):
        self.client.close()
        self.memory.close()

    def pages(self, *numbers):
        return [GroupPages(self.memory.device, numbers)]

    def lookup(self, seed, count=BLOCKS, **options):
        context = self.client.context(tokens_for(seed, count))
        return self.client.lookup(context, LookupOptions(**options)).wait(ANSWER_S)

    def load(self, ticket, *numbers):
        self.memory.rows[:] = 0
        return self.client.load(ticket, self.pages(*numbers)).wait(ANSWER_S)

    def save(self, seed, blocks=None, count=BLOCKS):
        blocks = range(count) if blocks is None else blocks
        context = self.client.context(tokens_for(seed, count))
        rows = blocks_for(seed, count).view(np.uint8)
        self.memory.rows[: len(blocks)] = rows[blocks.start : blocks.stop]
        pages = self.pages(*range(len(blocks)))
        return self.client.save(context, [blocks], pages).wait(ANSWER_S)

    def holds(self, page, seed, block, count=BLOCKS):
        return (self.memory.rows[page] == blocks_for(seed, count).view(np.uint8)[block]).all()


@pytest.fixture
def engine(store):
    with contextlib.closing(Engine(store)) as one:
        yield one


def told(ticket):
    """What two stores must agree on: not keys, plan numbers and measured times."""
    blocks = [run.blocks for run in ticket.runs]
    return ticket.tokens, ticket.have, ticket.held, blocks, ticket.sources, ticket.outcome


def test_a_saved_context_is_looked_up_and_loaded(engine):
    assert engine.lookup(1).outcome is Outcome.MISS
    assert engine.save(1).blocks == BLOCKS
    ticket = engine.lookup(1)
    assert (ticket.tokens, ticket.held) == (BLOCKS * SIZE, BLOCKS * SIZE)
    loaded = engine.load(ticket, 4, 2, 9)
    assert (loaded.tokens, loaded.outcome) == (BLOCKS * SIZE, Outcome.OK)
    assert all(engine.holds(page, 1, block) for block, page in enumerate((4, 2, 9)))


def test_only_the_blocks_behind_those_of_the_engine_are_loaded(engine):
    engine.save(1)
    ticket = engine.lookup(1, have=SIZE)
    assert list(ticket.runs[0].blocks) == [1, 2]
    loaded = engine.load(ticket, 5, 6)
    assert loaded.tokens == BLOCKS * SIZE
    assert engine.holds(5, 1, 1)
    assert engine.holds(6, 1, 2)


def test_the_last_token_of_a_prompt_is_left_to_compute(engine):
    engine.save(1)
    assert engine.lookup(1, tokens=BLOCKS * SIZE).tokens == (BLOCKS - 1) * SIZE
    assert engine.lookup(1, tokens=BLOCKS * SIZE + 1).tokens == BLOCKS * SIZE


def test_blocks_that_are_being_saved_are_pending_until_their_save_ends(engine, monkeypatch):
    engine.save(1, count=1)
    context = engine.client.context(tokens_for(1))
    begun, may_end = threading.Event(), threading.Event()
    gather = engine.memory.device.gather

    def waits(*arguments):
        begun.set()
        may_end.wait(ANSWER_S)
        return gather(*arguments)

    monkeypatch.setattr(engine.memory.device, "gather", waits)
    saving = engine.client.save(context, [range(1, 2)], engine.pages(0))
    assert begun.wait(ANSWER_S)
    ticket = engine.lookup(1)
    assert (ticket.held, ticket.pending) == (SIZE, 2 * SIZE)
    may_end.set()
    assert saving.wait(ANSWER_S).blocks == 1
    ticket = engine.lookup(1)
    assert (ticket.held, ticket.pending) == (2 * SIZE, 2 * SIZE)


def test_a_save_whose_device_fails_ends_and_says_so(engine, monkeypatch):
    def late(*_):
        raise TimeoutError("the device does not answer")

    monkeypatch.setattr(engine.memory.device, "gather", late)
    context = engine.client.context(tokens_for(1))
    saved = engine.client.save(context, [range(1)], engine.pages(0)).wait(ANSWER_S)
    assert (saved.outcome, saved.reason) == (Outcome.GONE, "the device does not answer")


def test_prompts_are_counted_once_by_the_source_of_their_tokens(store, engine):
    before = store.status().activity
    engine.lookup(1, tokens=BLOCKS * SIZE + 5)
    engine.save(1)
    loading = engine.lookup(1, have=SIZE, tokens=BLOCKS * SIZE + 5)
    engine.load(loading, 4, 2)
    until_s = time.monotonic() + ANSWER_S  # a report is sent without waiting for its answer
    counted = store.status().activity
    while counted.prompts < before.prompts + 2 and time.monotonic() < until_s:
        time.sleep(0.01)
        counted = store.status().activity
    assert counted.tokens - before.tokens == 2 * (BLOCKS * SIZE + 5)
    assert counted.engine_tokens - before.engine_tokens == SIZE
    assert counted.loaded_tokens["host"] - before.loaded_tokens.get("host", 0) == 2 * SIZE


def test_extras_of_a_token_separate_the_contexts_from_its_block_on(engine):
    client, tokens = engine.client, tokens_for(1)
    plain, image = client.context(tokens), client.context(tokens, {SIZE + 3: [b"image"]})
    assert plain.chains[0].keys[0] == image.chains[0].keys[0]
    assert plain.chains[0].keys[1] != image.chains[0].keys[1]
    engine.save(1)
    assert client.lookup(image).wait(ANSWER_S).held == SIZE


def test_a_load_with_nothing_to_load_answers_at_once(engine):
    loaded = engine.client.load(engine.lookup(7), [None]).poll()
    assert (loaded.tokens, loaded.outcome) == (0, Outcome.MISS)


def test_pages_that_do_not_fit_the_blocks_are_refused(engine):
    context = engine.client.context(tokens_for(1))
    with pytest.raises(BlockError, match="2 pages of group 0 given for 3 blocks of 1 pages"):
        engine.client.save(context, [range(3)], engine.pages(0, 1))
    with pytest.raises(BlockError, match="whose context has 3"):
        engine.client.save(context, [range(4)], engine.pages(0, 1, 2, 3))
    with pytest.raises(BlockError, match="2 entries given, the model has 1 KV groups"):
        engine.client.save(context, [range(3)] * 2, engine.pages(0, 1, 2) * 2)


def test_a_saved_context_can_be_made_durable(engine):
    context = engine.client.context(tokens_for(3))
    saving = engine.client.save(context, [range(BLOCKS)], engine.pages(0, 1, 2))
    assert saving.wait(ANSWER_S).blocks == BLOCKS
    assert saving.durable(ANSWER_S).wait(2 * ANSWER_S) == BLOCKS


def test_embedded_and_node_give_equal_answers_to_one_trace(tmp_path, lasting_node):
    rng = np.random.default_rng(5)
    with contextlib.ExitStack() as stack:
        stores = [
            stack.enter_context(holdfast.open(host="64 MiB", disk="64 MiB", path=str(tmp_path))),
            stack.enter_context(holdfast.open(lasting_node.address, domain="default")),
        ]
        engines = [stack.enter_context(contextlib.closing(Engine(store))) for store in stores]
        for _ in range(60):
            seed, count = 100 + int(rng.integers(6)), int(rng.integers(1, 9))
            have = int(rng.integers(count + 1)) * SIZE
            if rng.random() < 0.4:
                saved = [one.save(seed, count=count) for one in engines]
                assert saved[0] == saved[1]
                continue
            asked = {"have": have, "tokens": count * SIZE + int(rng.integers(2))}
            tickets = [one.lookup(seed, count, **asked) for one in engines]
            assert told(tickets[0]) == told(tickets[1])
            numbers = rng.permutation(16)[: len(tickets[0].runs[0].blocks)].tolist()
            loaded = [
                one.load(ticket, *numbers) for one, ticket in zip(engines, tickets, strict=True)
            ]
            assert loaded[0][:3] == loaded[1][:3]
            assert (engines[0].memory.rows == engines[1].memory.rows).all()


class HybridEngine:
    """An engine of a model with full attention, a window and a recurrent state, and their pages."""

    RULES = (("full", 0, 32), ("window", 65, 16), ("recurrent", 0, 32))
    TOKENS = 256

    def __init__(self, store):
        model = unused_model()
        self.groups = [
            EngineGroup(grouped(model, attention, window, size))
            for attention, window, size in self.RULES
        ]
        self.client = open_engine(store, self.groups)
        self.sizes = [size for *_, size in self.RULES]
        self.nbytes = [group.fingerprint.representation.raw_bytes for group in self.groups]
        self.memories = [
            RowPages(self.TOKENS // size, n)
            for size, n in zip(self.sizes, self.nbytes, strict=True)
        ]

    def close(self):
        self.client.close()
        for memory in self.memories:
            memory.close()

    def context(self, seed, tokens):
        return self.client.context(range(seed * 1_000, seed * 1_000 + tokens))

    def content(self, seed, group, block):
        rng = np.random.default_rng([seed, group, block])
        return rng.integers(0, 256, self.nbytes[group], np.uint8)

    def save(self, seed, tokens, blocks):
        """Save chosen blocks of each group, from pages of their numbers."""
        pages = []
        for group, (memory, chosen) in enumerate(zip(self.memories, blocks, strict=True)):
            for block in chosen:
                memory.rows[block] = self.content(seed, group, block)
            pages.append(GroupPages(memory.device, list(chosen)) if chosen else None)
        return self.client.save(self.context(seed, tokens), blocks, pages).wait(ANSWER_S)

    def lookup(self, seed, keyed, **options):
        context = self.context(seed, keyed)
        return self.client.lookup(context, LookupOptions(**options)).wait(ANSWER_S)

    def load(self, seed, ticket):
        """Load a ticket into pages of the blocks' numbers; return the result, checking bytes."""
        for memory in self.memories:
            memory.rows[:] = 0
        pages = [
            GroupPages(memory.device, list(run.blocks))
            for memory, run in zip(self.memories, ticket.runs, strict=True)
        ]
        loaded = self.client.load(ticket, pages).wait(ANSWER_S)
        if loaded.tokens > ticket.have:
            for group, run in enumerate(ticket.runs):
                for block in run.blocks:
                    assert (
                        self.memories[group].rows[block] == self.content(seed, group, block)
                    ).all()
        return loaded


def grouped(model, attention, window, size):
    """The fingerprint of a group of two layers."""
    layout = Layout.portable(layers=2, kv_heads=2, head_size=8, dtype="float16", block_tokens=size)
    fingerprint = fingerprint_for(layout, model)
    meaning = msgspec.structs.replace(
        fingerprint.meaning, kv_group=KvGroup(attention, window, (0, 1))
    )
    return msgspec.structs.replace(fingerprint, meaning=meaning)


@pytest.fixture
def hybrid(store):
    with contextlib.closing(HybridEngine(store)) as one:
        yield one


def test_a_resume_needs_what_the_rule_of_each_group_says(hybrid):
    assert hybrid.client.unit_tokens == 32
    hybrid.save(1, 256, [range(8), range(16), range(3, 4)])
    ticket = hybrid.lookup(1, 256)
    assert (ticket.tokens, ticket.held, ticket.outcome) == (128, 128, Outcome.OK)
    assert [list(run.blocks) for run in ticket.runs] == [[0, 1, 2, 3], [4, 5, 6, 7], [3]]
    assert hybrid.load(1, ticket).tokens == 128


@pytest.mark.parametrize("change", [-1, 1], ids=["too few", "too many"])
def test_pages_that_do_not_fit_the_blocks_of_a_load_are_refused(hybrid, change):
    """Pages of a window that stay as they were must not count as loaded."""
    hybrid.save(1, 256, [range(8), range(16), range(3, 4)])
    ticket = hybrid.lookup(1, 256)
    pages = [
        GroupPages(memory.device, list(run.blocks))
        for memory, run in zip(hybrid.memories, ticket.runs, strict=True)
    ]
    count = len(ticket.runs[1].blocks) + change
    pages[1] = GroupPages(hybrid.memories[1].device, list(range(count)))
    with pytest.raises(BlockError, match=f"{count} pages of group 1 given for 4 blocks of 1 pages"):
        hybrid.client.load(ticket, pages)


def test_blocks_that_the_engine_has_are_not_loaded_in_any_group(hybrid):
    hybrid.save(1, 256, [range(8), range(16), range(3, 4)])
    ticket = hybrid.lookup(1, 256, have=96)
    assert [list(run.blocks) for run in ticket.runs] == [[3], [6, 7], [3]]
    assert hybrid.load(1, ticket).tokens == 128


@pytest.mark.parametrize("missing", range(3))
def test_a_group_that_lacks_its_blocks_is_a_miss(hybrid, missing):
    blocks = [range(8), range(16), range(3, 4)]
    blocks[missing] = range(0)
    hybrid.save(1, 256, blocks)
    ticket = hybrid.lookup(1, 256)
    assert (ticket.tokens, ticket.held, ticket.outcome) == (0, 0, Outcome.MISS)


def test_a_checkpoint_one_block_off_is_not_used(hybrid):
    """A state can be neither stepped back nor cut."""
    hybrid.save(1, 256, [range(4), range(8), range(4, 5)])
    assert hybrid.lookup(1, 256).held == 0
    hybrid.save(1, 256, [range(4, 5), range(8, 10), range(0)])
    assert hybrid.lookup(1, 256).held == 160


class WindowEngine(HybridEngine):
    """An engine whose layers all have one window."""

    RULES = (("window", 40, 16),)


def test_a_part_of_a_window_is_of_no_use(store):
    """A resume after fewer tokens needs an earlier block, which the load did not name."""
    with contextlib.closing(WindowEngine(store)) as engine:
        engine.save(1, 128, [range(4, 7)])
        ticket, keys = engine.lookup(1, 112), engine.context(1, 128).chains[0].packed(5, 8)
        assert [list(run.blocks) for run in ticket.runs] == [[4, 5, 6]]
        assert engine.load(1, ticket).tokens == 112
        # As if block 7 had been evicted since the lookup.
        evicted = ticket._replace(tokens=128, runs=(BlockRun(5, keys),))
        pages = [GroupPages(engine.memories[0].device, [5, 6, 7])]
        assert engine.client.load(evicted, pages).wait(ANSWER_S).tokens == 0


def test_blocks_of_a_group_are_not_found_by_another_one(hybrid):
    chains = hybrid.context(1, 64).chains
    assert len({chain.fingerprint for chain in chains}) == 3
    assert len({key for chain in chains for key in chain.keys}) == 2 + 4 + 2


def test_all_groups_can_be_made_durable(hybrid):
    context = hybrid.context(5, 128)
    blocks = [range(4), range(8), range(3, 4)]
    pages = [
        GroupPages(memory.device, list(chosen))
        for memory, chosen in zip(hybrid.memories, blocks, strict=True)
    ]
    saving = hybrid.client.save(context, blocks, pages)
    assert saving.wait(ANSWER_S).blocks == 13
    assert saving.durable(ANSWER_S).wait(2 * ANSWER_S) == 13


def test_embedded_and_node_agree_about_several_groups(tmp_path, lasting_node):
    rng = np.random.default_rng(6)
    with contextlib.ExitStack() as stack:
        stores = [
            stack.enter_context(holdfast.open(host="64 MiB", disk="64 MiB", path=str(tmp_path))),
            stack.enter_context(holdfast.open(lasting_node.address, domain="default")),
        ]
        engines = [stack.enter_context(contextlib.closing(HybridEngine(store))) for store in stores]
        for _ in range(60):
            seed, units = 200 + int(rng.integers(4)), int(rng.integers(1, 9))
            if rng.random() < 0.5:
                first = int(rng.integers(units))
                blocks = [range(units), range(2 * first, 2 * units), range(first, first + 1)]
                saved = [one.save(seed, 256, blocks) for one in engines]
                assert saved[0] == saved[1]
                continue
            asked = {"have": 32 * int(rng.integers(units)), "tokens": 32 * units + 1}
            tickets = [one.lookup(seed, 32 * units, **asked) for one in engines]
            assert told(tickets[0]) == told(tickets[1])
            loaded = [one.load(seed, ticket) for one, ticket in zip(engines, tickets, strict=True)]
            assert loaded[0][:3] == loaded[1][:3]


def test_a_store_that_went_away_is_an_outcome_and_no_error(store):
    with contextlib.closing(Engine(store)) as engine:
        ticket = engine.lookup(1)
        engine.save(1)
        ticket = engine.lookup(1)
        engine.client.close()
        gone = engine.lookup(1)
        assert (gone.tokens, gone.outcome) == (0, Outcome.GONE)
        assert engine.client.load(ticket, engine.pages(0, 1, 2)).wait(ANSWER_S).tokens == 0
