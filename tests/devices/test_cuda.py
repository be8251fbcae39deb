"""The arithmetic of the CUDA device, on CPU tensors; its streams need a GPU."""

import contextlib

import pytest

torch = pytest.importorskip("torch")

from holdfast.devices import cuda  # noqa: E402
from holdfast.devices.base import Move, Pages  # noqa: E402
from holdfast.devices.cuda import empty_stage, fill_stage, unstage  # noqa: E402

LAYERS, PAGES, PER_BLOCK, BYTES = 3, 24, 4, 32


@pytest.fixture
def layers():
    torch.manual_seed(1)
    whole = torch.randint(0, 256, (LAYERS, PAGES, BYTES + 8), dtype=torch.uint8)
    return [whole[layer, :, :BYTES] for layer in range(LAYERS)]


@pytest.fixture
def pages(layers):
    bases = tuple(layer.data_ptr() for layer in layers)
    return Pages(bases, BYTES + 8, BYTES, PAGES, PER_BLOCK)


def test_a_stage_holds_payloads_layer_by_layer(layers, pages):
    moves = [Move(0, [5, 1, 9, 2]), Move(0, [0, 23, 7, 8])]
    stage = empty_stage(layers, pages, len(moves))
    fill_stage(layers, stage, moves)
    for at, move in enumerate(moves):
        payload = stage[at].reshape(-1)
        assert len(payload) == pages.payload_bytes
        expected = torch.cat([layer[page] for layer in layers for page in move.pages])
        assert torch.equal(payload, expected)


def test_staged_blocks_fill_the_pages_named_and_no_others(layers, pages):
    before = [layer.clone() for layer in layers]
    stage = torch.randint(0, 256, (2, LAYERS, PER_BLOCK, BYTES), dtype=torch.uint8)
    unstage(layers, stage, [Move(0, [3, 11, 4, 6]), Move(0, [20, 21], first=1)])
    for at, layer in enumerate(layers):
        for index, page in enumerate([3, 11, 4, 6]):
            assert torch.equal(layer[page], stage[0, at, index])
        assert torch.equal(layer[20], stage[1, at, 1])
        assert torch.equal(layer[21], stage[1, at, 2])
        others = [page for page in range(PAGES) if page not in {3, 11, 4, 6, 20, 21}]
        assert torch.equal(layer[others], before[at][others])


class FakeArena:
    def __init__(self, nbytes):
        self.bytes = bytearray(nbytes)
        self.view = memoryview(self.bytes)
        self.address = torch.frombuffer(self.bytes, dtype=torch.uint8).data_ptr()
        self.nbytes = nbytes


class FakeCuda:
    """What the device asks of CUDA, done at once; `said` is what it was told, in order."""

    def __init__(self):
        self.said = []

    def Stream(self, _device):  # noqa: N802  # as CUDA has it
        return self

    def stream(self, _stream):
        return contextlib.nullcontext()

    def cudart(self):
        return self

    def synchronize(self):
        self.said.append("synchronize")

    def cudaHostRegister(self, address, _nbytes, _flags):  # noqa: N802
        self.said.append(("register", address))
        return 0

    def cudaHostUnregister(self, address):  # noqa: N802
        self.said.append(("unregister", address))

    def record_event(self):
        return self

    def query(self):
        return True


@pytest.fixture
def fake(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(cuda.torch, "cuda", fake)
    return fake


def test_the_arena_of_a_node_that_is_gone_is_let_go_of(layers, pages, fake):
    device = cuda.CudaDevice(layers, pages)
    old, new = FakeArena(pages.payload_bytes), FakeArena(pages.payload_bytes)
    for arena in (old, old, new):
        device.scatter(arena, [Move(0, [1, 2, 3, 4])])
    told = [said for said in fake.said if said != "synchronize"]
    assert told == [("register", old.address), ("unregister", old.address),
                    ("register", new.address)]  # fmt: skip
    device.close()
    assert fake.said[-1] == ("unregister", new.address)


def test_a_plan_that_fails_half_way_leaves_nothing_moving(layers, pages, fake, monkeypatch):
    device = cuda.CudaDevice(layers, pages)
    arena = FakeArena(pages.payload_bytes)
    device.scatter(arena, [Move(0, [1, 2, 3, 4])])
    fake.said.clear()

    def fail(*_):
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(cuda, "unstage", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        device.scatter(arena, [Move(0, [1, 2, 3, 4])])
    assert fake.said == ["synchronize"]
