"""Engine clients of several ranks: they fill the blocks of all KV groups together."""

import contextlib
import itertools

import msgspec
import numpy as np
import pytest

import holdfast
from holdfast import KvGroup, Layout
from holdfast.client.engine import EngineGroup, GroupPages, LookupOptions
from holdfast.client.engine_opening import open_engine
from holdfast.devices.arrange import PortablePages
from holdfast.devices.base import Pages
from holdfast.devices.page_format import latent_format, plain_format
from holdfast.devices.portable_host import PortableHostDevice
from holdfast.errors import Outcome
from holdfast.testing.embedded import fingerprint_for

ANSWER_S = 60.0
LAYERS, HEADS, DIM = 2, 4, 8
TOKENS = 128
GROUPS = (("full", 0, 32), ("window", 40, 16))
MODELS = itertools.count()


@pytest.fixture(params=["embedded", "node"])
def store(request, tmp_path):
    if request.param == "embedded":
        opened = holdfast.open(host="64 MiB", disk="64 MiB", path=str(tmp_path / "disk"))
    else:
        opened = holdfast.open(request.getfixturevalue("lasting_node").address, domain="default")
    with opened:
        yield opened


def new_model():
    return f"model of ranks {next(MODELS)}"


def content(seed, group, block, size):
    """Return a block of the whole model: [layer][k or v][head][token][dim]."""
    rng = np.random.default_rng([seed, group, block])
    return rng.integers(0, 1 << 16, (LAYERS, 2, HEADS, size, DIM)).astype(np.uint16)


class GroupMemory:
    """The pages of one group of one rank: page n is for block n."""

    def __init__(self, group, place, model):
        (attention, window, size), (rank, ranks) = GROUPS[group], place
        layout = Layout.portable(
            layers=LAYERS, kv_heads=HEADS, head_size=DIM, dtype="float16", block_tokens=size
        )
        meant = fingerprint_for(layout, model)
        kv_group = KvGroup(attention, window, (0, 1))
        meaning = msgspec.structs.replace(meant.meaning, kv_group=kv_group)
        part = layout.rank(rank, ranks)
        self.group, self.size, self.heads = group, size, part.heads[0]
        self.named = EngineGroup(msgspec.structs.replace(meant, meaning=meaning), part)
        form = plain_format("hnd", len(self.heads), size, (DIM, DIM), 2, fused=False)
        self.rows = np.zeros((LAYERS, TOKENS // size, form.page_bytes), np.uint8)
        bases = tuple(layer.ctypes.data for layer in self.rows)
        pages = Pages.uniform(bases, form.page_bytes, form.page_bytes, TOKENS // size, 1)
        self.device = PortableHostDevice(pages, PortablePages(form, part), keep=self.rows)

    def right(self, seed, block):
        whole = content(seed, self.group, block, self.size)
        part = whole[:, :, self.heads.start : self.heads.stop]
        return np.ascontiguousarray(part).reshape(LAYERS, -1).view(np.uint8)


class Rank:
    """The engine client of one rank, with the pages of each group."""

    def __init__(self, store, rank, ranks, model):
        self.memories = [GroupMemory(number, (rank, ranks), model) for number in range(len(GROUPS))]
        self.client = open_engine(store, [memory.named for memory in self.memories])

    def close(self):
        self.client.close()
        for memory in self.memories:
            memory.device.close()

    def context(self, seed):
        return self.client.context(range(seed * 1_000, seed * 1_000 + TOKENS))

    def save(self, seed, tokens):
        """Save the leading blocks of every group; return how many blocks are complete now."""
        pages, blocks = [], []
        for memory in self.memories:
            chosen = range(tokens // memory.size)
            for block in chosen:
                memory.rows[:, block] = memory.right(seed, block)
            blocks.append(chosen)
            pages.append(GroupPages(memory.device, list(chosen)))
        return self.client.save(self.context(seed), blocks, pages).wait(ANSWER_S)

    def lookup(self, seed, **options):
        return self.client.lookup(self.context(seed), LookupOptions(**options)).wait(ANSWER_S)

    def load(self, seed, ticket):
        """Load what a ticket says; check every byte of this rank's heads."""
        for memory in self.memories:
            memory.rows[:] = 0
        pages = [
            GroupPages(memory.device, list(run.blocks))
            for memory, run in zip(self.memories, ticket.runs, strict=True)
        ]
        loaded = self.client.load(ticket, pages).wait(ANSWER_S)
        if loaded.tokens > ticket.have:
            for memory, run in zip(self.memories, ticket.runs, strict=True):
                for block in run.blocks:
                    assert (memory.rows[:, block] == memory.right(seed, block)).all()
        return loaded


@contextlib.contextmanager
def engine_of(store, ranks, model):
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(contextlib.closing(Rank(store, rank, ranks, model)))
            for rank in range(ranks)
        ]


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_an_engine_of_another_size_reads_what_all_ranks_wrote(store, writers, readers):
    model = new_model()
    with engine_of(store, writers, model) as ranks:
        for rank in ranks[1:]:
            assert rank.save(1, TOKENS).blocks == 0
            assert rank.lookup(1).held == 0
        assert ranks[0].save(1, TOKENS).blocks == TOKENS // 32 + TOKENS // 16
    with engine_of(store, readers, model) as ranks:
        for rank in ranks:
            ticket = rank.lookup(1)
            assert [list(run.blocks) for run in ticket.runs] == [[0, 1, 2, 3], [5, 6, 7]]
            assert rank.load(1, ticket).tokens == TOKENS


def test_a_context_of_which_a_rank_has_not_saved_its_part_is_a_miss(store):
    model = new_model()
    with engine_of(store, 2, model) as (first, second):
        first.save(1, TOKENS)
        second.save(1, 64)
        ticket = first.lookup(1)
        assert (ticket.held, ticket.outcome) == (64, Outcome.OK)
        assert first.load(1, ticket).tokens == 64


def test_a_rank_that_holds_a_copy_of_the_latents_writes_no_block(store):
    """Its session writes no byte of a block, so it must not complete one."""
    layout = Layout.portable_latent(layers=LAYERS, latent_size=24, dtype="float16", block_tokens=16)
    model, form = fingerprint_for(layout, new_model()), latent_format(16, 24, 2)
    content = np.random.default_rng(3).integers(0, 256, (LAYERS, 1, form.page_bytes), np.uint8)
    with contextlib.ExitStack() as stack:
        clients, given, memory = [], [], []
        for rank in range(2):
            part = layout.rank(rank, 2)
            rows = content.copy() if rank == 0 else np.zeros_like(content)
            bases = tuple(layer.ctypes.data for layer in rows)
            pages = Pages.uniform(bases, form.page_bytes, form.page_bytes, 1, 1)
            device = PortableHostDevice(pages, PortablePages(form, part), keep=rows)
            stack.callback(device.close)
            given.append([GroupPages(device, [0])])
            memory.append(rows)
            clients.append(open_engine(store, [EngineGroup(model, part)]))
            stack.callback(clients[-1].close)
        contexts = [client.context(range(16)) for client in clients]
        for rank, blocks in ((1, 0), (0, 1)):
            saving = clients[rank].save(contexts[rank], [range(1)], given[rank])
            assert saving.wait(ANSWER_S).blocks == blocks
        for client, context, pages, rows in zip(clients, contexts, given, memory, strict=True):
            rows[:] = 0
            ticket = client.lookup(context).wait(ANSWER_S)
            assert client.load(ticket, pages).wait(ANSWER_S).tokens == 16
            assert (rows == content).all()


def told(ticket):
    """What two stores must agree on: not keys, plan numbers and measured times."""
    blocks = [run.blocks for run in ticket.runs]
    return ticket.tokens, ticket.have, ticket.held, blocks, ticket.sources, ticket.outcome


def test_embedded_and_node_agree_about_ranks_that_fill_blocks_of_several_groups(
    tmp_path, lasting_node
):
    rng = np.random.default_rng(8)
    with contextlib.ExitStack() as stack:
        stores = [
            stack.enter_context(holdfast.open(host="64 MiB", disk="64 MiB", path=str(tmp_path))),
            stack.enter_context(holdfast.open(lasting_node.address, domain="default")),
        ]
        model = new_model()
        engines = [stack.enter_context(engine_of(store, 2, model)) for store in stores]
        for _ in range(60):
            seed, number = 300 + int(rng.integers(5)), int(rng.integers(2))
            ranks = [engine[number] for engine in engines]
            if rng.random() < 0.4:
                tokens = 32 * int(rng.integers(1, 5))
                saved = [rank.save(seed, tokens) for rank in ranks]
                assert saved[0] == saved[1]
                continue
            asked = {"have": 32 * int(rng.integers(4)), "tokens": TOKENS + 1}
            tickets = [rank.lookup(seed, **asked) for rank in ranks]
            assert told(tickets[0]) == told(tickets[1])
            loaded = [rank.load(seed, each) for rank, each in zip(ranks, tickets, strict=True)]
            assert loaded[0][:3] == loaded[1][:3]
