"""The devices of pages on a GPU: the order of work on its streams, the arena of a real node."""

import contextlib
import time

import pytest

torch = pytest.importorskip("torch")

from holdfast.blocks.envelope import HEADER_BYTES, stored_bytes  # noqa: E402
from holdfast.buffers import SharedMapping  # noqa: E402
from holdfast.devices.base import Move, Pages  # noqa: E402
from holdfast.devices.cuda.device import CudaDevice  # noqa: E402
from holdfast.devices.cuda.torch_device import TorchDevice  # noqa: E402
from holdfast.devices.registry import DeviceOptions, open_device  # noqa: E402
from holdfast.limits import MIB  # noqa: E402
from holdfast.testing.payloads import key_of  # noqa: E402
from holdfast.tiers.arena import Arena  # noqa: E402
from holdfast.wire.local import messages as m  # noqa: E402
from holdfast.wire.local.client import Client  # noqa: E402
from holdfast.wire.local.locked_memory import LockedMemory  # noqa: E402
from holdfast_bench.harness.node import NodeUnderTest  # noqa: E402
from holdfast_bench.measure.gpu.arena_locks import ArenaLocks  # noqa: E402

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
    """Layers of padded pages in GPU memory, and a device for them."""

    def __init__(self, kind):
        torch.manual_seed(7)
        shape = (LAYERS, PAGES, BYTES + PADDING)
        self.whole = torch.zeros(shape, dtype=torch.uint8, device="cuda")
        self.layers = [self.whole[layer, :, :BYTES] for layer in range(LAYERS)]
        bases = tuple(layer.data_ptr() for layer in self.layers)
        pages = Pages.uniform(bases, BYTES + PADDING, BYTES, PAGES, PER_BLOCK)
        self.kind, self.locks = kind, None
        if kind == "through PyTorch":
            self.device = TorchDevice(self.layers, pages)
        else:
            self.device = open_device("cuda", pages, self.layers, DeviceOptions(BLOCKS))
            assert isinstance(self.device, CudaDevice), "the log says why"
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

    def pack(self, moves):
        """Queue a save's copy out of the pages; return what ends it."""
        if self.kind == "through PyTorch":
            return self.device.gather(self.arena, moves).result
        staged = self.device.stage([move.pages for move in moves])
        staged.pack()

        def finish():
            while not staged.ready():
                time.sleep(1e-4)
            payloads = [(number, move.payload) for number, move in enumerate(moves)]
            copied = staged.copy(self.arena, payloads, self.locks).result()
            staged.release()
            return copied

        return finish

    def save(self, moves):
        return self.pack(moves)()

    def load(self, moves):
        return self.device.scatter(self.arena, moves, self.device.mark(), self.locks)

    def same(self, before, block):
        """Whether a block's pages hold what they held `before`."""
        ids = self.pages_of(block)
        return torch.equal(self.whole[:, ids], before[:, ids])


@pytest.fixture(params=["through PyTorch", "bounced", "locked"])
def engine(request):
    engine = EnginePages(request.param)
    yield engine
    engine.device.close()


@pytest.fixture
def arena(engine):
    with contextlib.closing(Arena(BLOCKS * PAYLOAD)) as memory:
        engine.arena = SharedMapping(memory.fd, memory.nbytes)
        if engine.kind == "locked":
            engine.locks = ArenaLocks(engine.device.registrar, engine.arena)
        yield engine.arena
        if engine.locks is not None:
            engine.locks.close()


@pytest.fixture
def moves(engine):
    return [Move(block * PAYLOAD, engine.pages_of(block)) for block in range(BLOCKS)]


def test_a_whole_cache_goes_to_the_arena_and_comes_back(engine, arena, moves):
    before = engine.fill()
    assert engine.save(moves)
    held = torch.frombuffer(arena.view, dtype=torch.uint8).view(BLOCKS, LAYERS, PER_BLOCK, BYTES)
    for block in range(BLOCKS):
        pages = before[:, engine.pages_of(block), :BYTES].cpu()
        assert torch.equal(held[block], pages)
    engine.clear()
    assert engine.load(moves).result()
    assert torch.equal(engine.whole, before)


def test_parts_of_blocks_fill_their_pages_only(engine, arena, moves):
    before = engine.fill()
    assert engine.save(moves[:2])
    engine.clear()
    parts = [Move(0, engine.pages_of(0)[3:], 3), Move(PAYLOAD, engine.pages_of(1)[:1])]
    assert engine.load(parts).result()
    named = [*engine.pages_of(0)[3:], *engine.pages_of(1)[:1]]
    assert torch.equal(engine.whole[:, named, :BYTES], before[:, named, :BYTES])
    others = [page for page in range(PAGES) if page not in named]
    assert not engine.whole[:, others].any()


def test_a_save_copies_what_was_queued_before_it_and_nothing_queued_after(engine, arena, moves):
    engine.clear()
    torch.cuda._sleep(SLOW_CYCLES)
    before = engine.fill()
    finish = engine.pack(moves)
    engine.clear()
    assert finish()
    assert engine.load(moves).result()
    assert torch.equal(engine.whole, before)


def test_a_load_waits_for_the_work_before_its_mark(engine, arena, moves):
    before = engine.fill()
    assert engine.save(moves)
    torch.cuda._sleep(SLOW_CYCLES)
    engine.clear()
    assert engine.load(moves).result()
    assert torch.equal(engine.whole, before)


def test_saves_and_loads_at_once_do_not_disturb_each_other(engine, arena, moves):
    half = BLOCKS // 2
    before = engine.fill()
    assert engine.save(moves[:half])
    engine.whole[:, [page for block in range(half) for page in engine.pages_of(block)]] = 0
    saves = [engine.pack(moves[half + at :: 4]) for at in range(4)]
    loads = [engine.load(moves[at:half:4]) for at in range(4)]
    copied = [finish() for finish in saves] + [load.result() for load in loads]
    assert all(copied)
    assert torch.equal(engine.whole, before)
    engine.clear()
    assert engine.load(moves[half:]).result()
    assert all(engine.same(before, block) for block in range(half, BLOCKS))


class SavedOnNode:
    """An engine's session with a node: blocks are named by their number and the `seed`."""

    def __init__(self, address, engine):
        hello = m.Hello(m.PROTOCOL, "gpu test", FINGERPRINT, PAYLOAD, 128, "default")
        self.client = Client(address, hello, 30)
        self.engine = engine
        engine.arena = self.client.arena
        if engine.kind == "locked":
            engine.locks = LockedMemory(self.client, engine.device.registrar)
            engine.locks.lock_at_start()
            engine.locks.start()

    def close(self):
        if self.engine.locks is not None:
            self.engine.locks.close()
        self.client.close()

    def call(self, message):
        return self.client.wait(self.client.send(message), 60)

    def save(self, seed):
        keys = b"".join(key_of(block, seed) for block in range(BLOCKS))
        reserved = self.call(m.Reserve(keys, FINGERPRINT, 0))
        assert len(reserved.places) == BLOCKS
        assert self.engine.save(self._moves(reserved.places))
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
        assert self.engine.load(self._moves(fetched.places)).result()
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
        with contextlib.closing(session):
            for seed in range(6):
                before = engine.fill()
                session.save(seed)
                engine.clear()
                session.load(seed, before)
                assert torch.equal(engine.whole, before), f"round {seed}"
                node.drop_all()
            assert node.status()["memory"]["reclaimed_bytes"] == 0
