"""The CUDA device on a GPU: the order of work on its streams, and the arena of a real node."""

import contextlib

import pytest

torch = pytest.importorskip("torch")

from holdfast.blocks.envelope import HEADER_BYTES, stored_bytes  # noqa: E402
from holdfast.buffers import SharedMapping  # noqa: E402
from holdfast.devices.base import Move, Pages  # noqa: E402
from holdfast.devices.cuda import torch_device as cuda  # noqa: E402
from holdfast.limits import MIB  # noqa: E402
from holdfast.testing.payloads import key_of  # noqa: E402
from holdfast.tiers.arena import Arena  # noqa: E402
from holdfast.wire.local import messages as m  # noqa: E402
from holdfast.wire.local.client import Client  # noqa: E402
from holdfast_bench.harness.node import NodeUnderTest  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

LAYERS, PAGES, PER_BLOCK, BYTES, PADDING = 32, 1024, 8, 4096, 64
PAYLOAD = LAYERS * PER_BLOCK * BYTES
BLOCKS = PAGES // PER_BLOCK
FINGERPRINT = b"f" * 16
SLOW_CYCLES = 200_000_000
"""About 0.1 s on a GPU, so that whatever does not wait for queued work comes too early."""


class EnginePages:
    """Layers of padded pages in GPU memory, and the device for them."""

    def __init__(self):
        torch.manual_seed(7)
        shape = (LAYERS, PAGES, BYTES + PADDING)
        self.whole = torch.zeros(shape, dtype=torch.uint8, device="cuda")
        self.layers = [self.whole[layer, :, :BYTES] for layer in range(LAYERS)]
        bases = tuple(layer.data_ptr() for layer in self.layers)
        pages = Pages.uniform(bases, BYTES + PADDING, BYTES, PAGES, PER_BLOCK)
        self.device = cuda.TorchDevice(self.layers, pages)
        self.order = torch.randperm(PAGES).tolist()

    def pages_of(self, block):
        return self.order[block * PER_BLOCK : (block + 1) * PER_BLOCK]

    def fill(self):
        """Fill all pages, but not the padding, with new bytes; return a copy of everything."""
        noise = torch.randint(0, 256, (LAYERS, PAGES, BYTES), dtype=torch.uint8, device="cuda")
        self.whole[:, :, :BYTES] = noise
        return self.whole.clone()

    def clear(self):
        self.whole.zero_()

    def same(self, before, block):
        """Whether a block's pages hold what they held `before`."""
        ids = self.pages_of(block)
        return torch.equal(self.whole[:, ids], before[:, ids])


@pytest.fixture
def engine():
    engine = EnginePages()
    yield engine
    engine.device.close()


@pytest.fixture
def arena():
    with contextlib.closing(Arena(BLOCKS * PAYLOAD)) as memory:
        yield SharedMapping(memory.fd, memory.nbytes)


@pytest.fixture
def moves(engine):
    return [Move(block * PAYLOAD, engine.pages_of(block)) for block in range(BLOCKS)]


def test_a_whole_cache_goes_to_the_arena_and_comes_back(engine, arena, moves):
    before = engine.fill()
    assert engine.device.gather(arena, moves).result()
    held = torch.frombuffer(arena.view, dtype=torch.uint8).view(BLOCKS, LAYERS, PER_BLOCK, BYTES)
    for block in range(BLOCKS):
        pages = before[:, engine.pages_of(block), :BYTES].cpu()
        assert torch.equal(held[block], pages)
    engine.clear()
    assert engine.device.scatter(arena, moves, engine.device.mark()).result()
    assert torch.equal(engine.whole, before)


def test_parts_of_blocks_fill_their_pages_only(engine, arena, moves):
    before = engine.fill()
    assert engine.device.gather(arena, moves[:2]).result()
    engine.clear()
    parts = [Move(0, engine.pages_of(0)[3:], 3), Move(PAYLOAD, engine.pages_of(1)[:1])]
    assert engine.device.scatter(arena, parts).result()
    named = [*engine.pages_of(0)[3:], *engine.pages_of(1)[:1]]
    assert torch.equal(engine.whole[:, named, :BYTES], before[:, named, :BYTES])
    others = [page for page in range(PAGES) if page not in named]
    assert not engine.whole[:, others].any()


def test_a_save_copies_what_was_queued_before_it_and_nothing_queued_after(engine, arena, moves):
    engine.clear()
    torch.cuda._sleep(SLOW_CYCLES)
    before = engine.fill()
    saved = engine.device.gather(arena, moves)
    assert not saved.done()
    engine.clear()
    assert saved.result()
    assert engine.device.scatter(arena, moves, engine.device.mark()).result()
    assert torch.equal(engine.whole, before)


def test_a_load_waits_for_the_work_before_its_mark(engine, arena, moves):
    before = engine.fill()
    assert engine.device.gather(arena, moves).result()
    torch.cuda._sleep(SLOW_CYCLES)
    engine.clear()
    assert engine.device.scatter(arena, moves, engine.device.mark()).result()
    assert torch.equal(engine.whole, before)


def test_saves_and_loads_at_once_do_not_disturb_each_other(engine, arena, moves):
    half = BLOCKS // 2
    before = engine.fill()
    assert engine.device.gather(arena, moves[:half]).result()
    engine.whole[:, [page for block in range(half) for page in engine.pages_of(block)]] = 0
    saves = [engine.device.gather(arena, moves[half + at :: 4]) for at in range(4)]
    loads = [
        engine.device.scatter(arena, moves[at:half:4], engine.device.mark()) for at in range(4)
    ]
    assert all(transfer.result() for transfer in [*saves, *loads])
    assert torch.equal(engine.whole, before)
    engine.clear()
    assert engine.device.scatter(arena, moves[half:], engine.device.mark()).result()
    assert all(engine.same(before, block) for block in range(half, BLOCKS))


class SavedOnNode:
    """An engine's session with a node: blocks are named by their number and the `seed`."""

    def __init__(self, address, engine):
        hello = m.Hello(m.PROTOCOL, "gpu test", FINGERPRINT, PAYLOAD, 128, "default")
        self.client = Client(address, hello, 30)
        self.engine = engine

    def call(self, message):
        return self.client.wait(self.client.send(message), 60)

    def save(self, seed):
        keys = b"".join(key_of(block, seed) for block in range(BLOCKS))
        reserved = self.call(m.Reserve(keys, FINGERPRINT, 0))
        assert len(reserved.places) == BLOCKS
        transfer = self.engine.device.gather(self.client.arena, self._moves(reserved.places))
        assert transfer.result()
        assert self.call(m.Commit(reserved.ticket)).blocks == BLOCKS

    def load(self, seed, before):
        keys = b"".join(key_of(block, seed) for block in range(BLOCKS))
        fetched = self.call(m.Fetch(keys, 30.0))
        assert len(fetched.places) == BLOCKS, fetched
        for block, place in enumerate(fetched.places):
            start = place + HEADER_BYTES
            held = torch.frombuffer(
                self.client.arena.view[start : start + PAYLOAD], dtype=torch.uint8
            )
            pages = before[:, self.engine.pages_of(block), :BYTES]
            assert torch.equal(held.view(pages.shape), pages.cpu()), f"block {block} in the arena"
        moves = self._moves(fetched.places)
        device = self.engine.device
        assert device.scatter(self.client.arena, moves, device.mark()).result()
        assert self.call(m.Release(fetched.lease)).valid

    def _moves(self, places):
        return [
            Move(place + HEADER_BYTES, self.engine.pages_of(block))
            for block, place in enumerate(places)
        ]


def test_blocks_stay_correct_while_a_node_releases_and_reuses_arena_memory(engine, tmp_path):
    """A GPU keeps the pages that it locked; the node's arena has others after it returned them."""
    room = 4 * BLOCKS * (stored_bytes(PAYLOAD) + MIB)
    with NodeUnderTest(tmp_path, room) as node:
        session = SavedOnNode(node.address, engine)
        with contextlib.closing(session.client):
            for seed in range(6):
                before = engine.fill()
                session.save(seed)
                engine.clear()
                session.load(seed, before)
                assert torch.equal(engine.whole, before), f"round {seed}"
                node.drop_all()
            assert node.status()["memory"]["reclaimed_bytes"] == 0
