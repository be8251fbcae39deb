"""The arithmetic of the CUDA device, on CPU tensors; `test_on_gpu.py` has the rest."""

import contextlib
import threading

import pytest

torch = pytest.importorskip("torch")

from holdfast.devices.base import DeviceError, Move, Pages  # noqa: E402
from holdfast.devices.cuda import torch_device as cuda  # noqa: E402
from holdfast.devices.cuda.torch_device import TorchCopies, empty_stage, page_words, word_of  # noqa: E402
from holdfast.errors import BlockError  # noqa: E402

LAYERS, PAGES, PER_BLOCK, BYTES, PADDING = 3, 24, 4, 32, 8


@pytest.fixture
def layers():
    torch.manual_seed(1)
    whole = torch.randint(0, 256, (LAYERS, PAGES, BYTES + PADDING), dtype=torch.uint8)
    return [whole[layer, :, :BYTES] for layer in range(LAYERS)]


@pytest.fixture
def pages(layers):
    bases = tuple(layer.data_ptr() for layer in layers)
    return Pages.uniform(bases, BYTES + PADDING, BYTES, PAGES, PER_BLOCK)


@pytest.mark.parametrize(
    ("page_bytes", "stride_bytes", "offset", "word"),
    [
        (32, 40, 0, torch.int64),
        (32, 36, 0, torch.int32),
        (30, 32, 0, torch.int16),
        (32, 40, 5, torch.uint8),
    ],
)
def test_pages_are_copied_in_the_widest_words_that_fit(page_bytes, stride_bytes, offset, word):
    tensor = torch.zeros(1000, dtype=torch.uint8)[offset:]
    pages = Pages.uniform((tensor.data_ptr(),), stride_bytes, page_bytes, 10, 2)
    assert word_of([tensor], pages) == word


@pytest.mark.parametrize("word", [torch.int64, torch.uint8])
def test_packed_blocks_are_unpacked_into_the_named_pages_only(layers, pages, word):
    before = [layer.clone() for layer in layers]
    rows = [page_words(layer, pages, word) for layer in layers]
    stage = empty_stage(rows, pages, 2)
    copies = TorchCopies(rows)
    copies.pack(stage, [Move(0, [5, 1, 9, 2]), Move(0, [0, 23, 7, 8])])
    for at, layer in enumerate(layers):
        assert torch.equal(stage[0, at].view(torch.uint8), layer[[5, 1, 9, 2]])
        assert torch.equal(stage[1, at].view(torch.uint8), layer[[0, 23, 7, 8]])
    copies.unpack(stage, [Move(0, [3, 11, 4, 6]), Move(0, [20, 21], first=1)])
    others = [page for page in range(PAGES) if page not in {3, 11, 4, 6, 20, 21}]
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer[[3, 11, 4, 6, 20, 21]], old[[5, 1, 9, 2, 23, 7]])
        assert torch.equal(layer[others], old[others])


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

    def Event(self, *, blocking):  # noqa: N802
        assert blocking
        return self

    def stream(self, _stream):
        return contextlib.nullcontext()

    def current_stream(self, _device):
        return self

    def synchronize(self):
        self.said.append("synchronize")

    def record(self, _stream):
        pass

    def record_event(self):
        return self

    def wait_event(self, _event):
        self.said.append("wait for event")

    def query(self):
        return True

    def device(self, _device):
        return contextlib.nullcontext()

    def cudart(self):
        return self

    def cudaHostRegister(self, *arguments):  # noqa: N802
        self.said.append((threading.current_thread().name, "register", *arguments))
        return self.result

    def cudaHostUnregister(self, *arguments):  # noqa: N802
        self.said.append((threading.current_thread().name, "unregister", *arguments))
        return self.result

    result = 0


@pytest.fixture
def fake(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(cuda.torch, "cuda", fake)
    monkeypatch.setattr(cuda, "SAVE_S", 600.0)  # this machine may be busy
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(cuda, "STAGE_BYTES", 2 * LAYERS * PER_BLOCK * BYTES)
    return fake


@pytest.fixture
def device(layers, pages, fake):
    with contextlib.closing(cuda.TorchDevice(layers, pages)) as device:
        yield device


WHOLE = [[5, 1, 9, 2], [0, 23, 7, 8], [10, 11, 3, 4], [6, 12, 22, 21], [20, 19, 13, 14]]
"""Pages of five blocks: a load of three stages, the last one not full."""

PARTS = [([9, 2], 2), ([0, 23, 7, 8], 0), ([10, 11, 3, 4], 0), ([6, 12], 0)]
"""Pages of the first four blocks, as a load names them that begins and ends inside a block."""


def whole(pages):
    return [Move(at * pages.raw_bytes, ids) for at, ids in enumerate(WHOLE)]


def test_a_batch_of_several_stages_is_saved_to_the_arena_and_loaded_back(layers, pages, device):
    before = [layer.clone() for layer in layers]
    arena = FakeArena(len(WHOLE) * pages.raw_bytes)
    saved = device.gather(arena, whole(pages))
    assert saved.result()
    assert saved.done()
    held = torch.frombuffer(arena.bytes, dtype=torch.uint8).view(-1, LAYERS, PER_BLOCK, BYTES)
    for block, ids in enumerate(WHOLE):
        for layer in range(LAYERS):
            assert torch.equal(held[block, layer], before[layer][ids])
    for layer in layers:
        layer.fill_(0)
    parts = [Move(at * pages.raw_bytes, *part) for at, part in enumerate(PARTS)]
    loaded = device.scatter(arena, parts)
    assert loaded.result()
    assert loaded.done()
    named = [page for ids, _ in PARTS for page in ids]
    others = [page for page in range(PAGES) if page not in named]
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer[named], old[named])
        assert not layer[others].any()


def test_a_save_of_part_of_a_block_is_refused(pages, device):
    arena = FakeArena(pages.raw_bytes)
    with pytest.raises(BlockError, match="3 pages of a block to save, which has 4"):
        device.gather(arena, [Move(0, [1, 2, 3])])
    assert not any(arena.bytes)


def test_an_empty_batch_is_done(device):
    arena = FakeArena(64)
    assert device.gather(arena, []).result()
    assert device.scatter(arena, []).result()


def test_a_load_writes_no_page_before_its_mark(pages, device, fake, monkeypatch):
    arena = FakeArena(len(WHOLE) * pages.raw_bytes)
    monkeypatch.setattr(TorchCopies, "unpack", lambda *_: fake.said.append("unpack"))
    fake.said.clear()
    assert device.scatter(arena, whole(pages), device.mark()).result()
    assert fake.said[:6] == ["wait for event", "unpack"] * 3


def test_a_load_that_may_not_proceed_fills_no_further_stage(layers, pages, device, fake):
    arena = FakeArena(len(WHOLE) * pages.raw_bytes)
    before = [layer.clone() for layer in layers]
    answers = [True, False]
    loaded = device.scatter(arena, whole(pages), None, None, lambda: answers.pop(0))
    assert not loaded.result()
    filled = [page for ids in WHOLE[:2] for page in ids]
    others = [page for page in range(PAGES) if page not in filled]
    for layer, old in zip(layers, before, strict=True):
        assert not layer[filled].any()
        assert torch.equal(layer[others], old[others])
    assert fake.said[-1] == "synchronize"


def test_a_load_that_fails_half_way_waits_for_its_copies(pages, device, fake, monkeypatch):
    arena = FakeArena(pages.raw_bytes)
    fake.said.clear()

    def fail(*_):
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(TorchCopies, "unpack", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        device.scatter(arena, [Move(0, [1, 2, 3, 4])])
    assert fake.said == ["synchronize"]


def test_a_failed_save_is_reported_and_the_next_one_succeeds(pages, device, monkeypatch, caplog):
    arena = FakeArena(pages.raw_bytes)
    with monkeypatch.context() as patch:
        patch.setattr(cuda, "payloads", lambda _: 1 / 0)
        assert device.gather(arena, [Move(0, [1, 2, 3, 4])]).result() is False
    assert "blocks not saved" in caplog.text
    assert device.gather(arena, [Move(0, [1, 2, 3, 4])]).result() is True


def test_a_save_never_copies_after_the_node_may_have_reused_its_slots(
    pages, device, monkeypatch, caplog
):
    arena = FakeArena(pages.raw_bytes)
    monkeypatch.setattr(cuda, "SAVE_S", -1.0)
    assert device.gather(arena, [Move(0, [1, 2, 3, 4])]).result() is False
    assert not any(arena.bytes)
    assert "blocks not saved: the GPU did not copy them in" in caplog.text


def test_pending_saves_use_a_bounded_amount_of_gpu_memory(pages, device, fake, monkeypatch, caplog):
    arena = FakeArena(2 * pages.raw_bytes)
    monkeypatch.setattr(cuda, "STAGED_BYTES_MAX", pages.raw_bytes)
    copying = threading.Event()
    monkeypatch.setattr(fake, "synchronize", lambda: copying.wait(60))
    first = device.gather(arena, [Move(0, [1, 2, 3, 4])])
    second = device.gather(arena, [Move(pages.raw_bytes, [5, 6, 7, 8])])
    assert second.done()
    assert second.result() is False
    assert f"{pages.raw_bytes} bytes still wait to be copied from the GPU" in caplog.text
    copying.set()
    assert first.result() is True
    assert device.gather(arena, [Move(pages.raw_bytes, [5, 6, 7, 8])]).result() is True


class Locks:
    """Locked ranges of an arena: all, or those that begin before an offset."""

    def __init__(self, chunk_bytes, before=1 << 30):
        self.chunk_bytes, self.before = chunk_bytes, before
        self.in_use, self.wanted = [], []

    def use(self, ranges):
        if any(start >= self.before for start, _ in ranges):
            return False
        self.in_use += ranges
        return True

    def done(self, ranges):
        for each in ranges:
            self.in_use.remove(each)

    def want(self, ranges):
        self.wanted += ranges


@pytest.mark.parametrize("before", [0, 2, 5])
def test_no_copy_of_locked_memory_crosses_a_border_of_locks_and_their_use_ends(
    layers, pages, device, monkeypatch, before
):
    size = pages.raw_bytes
    arena, locks = FakeArena(len(WHOLE) * size), Locks(size // 2 + 64, before * size)
    copied = []
    copy = torch.Tensor.copy_

    def noting(to, source, **how):
        copied.append(to.numel())
        return copy(to, source, **how)

    monkeypatch.setattr(torch.Tensor, "copy_", noting)
    old = [layer.clone() for layer in layers]
    assert device.gather(arena, whole(pages), locks).result()
    for layer in layers:
        layer.fill_(0)
    assert max(number for number in copied if number % 96) <= locks.chunk_bytes
    loaded = device.scatter(arena, whole(pages), None, locks)
    assert len(locks.in_use) == before
    assert loaded.result()
    assert locks.in_use == []
    named = [page for ids in WHOLE for page in ids]
    for layer, was in zip(layers, old, strict=True):
        assert torch.equal(layer[named], was[named])
    bounced = [(at * size, size) for at in range(before, len(WHOLE))]
    assert locks.wanted == 2 * bounced
    assert device.copied_bytes() == (2 * before * size, 2 * len(bounced) * size)


def test_a_load_that_fails_ends_the_use_of_locked_memory(pages, device, monkeypatch):
    arena, locks = FakeArena(pages.raw_bytes), Locks(pages.raw_bytes)
    monkeypatch.setattr(TorchCopies, "unpack", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        device.scatter(arena, [Move(0, [1, 2, 3, 4])], None, locks)
    assert locks.in_use == []


def test_memory_is_locked_on_a_thread_of_its_own_because_an_error_stays_in_its_thread(device, fake):
    fake.said.clear()
    device.registrar.register(4096, 8192)
    device.registrar.unregister(4096)
    assert [each[1:] for each in fake.said] == [("register", 4096, 8192, 1), ("unregister", 4096)]
    assert all(each[0].startswith("holdfast-register") for each in fake.said)
    fake.result = 2
    with pytest.raises(DeviceError, match="cudaHostRegister: error 2"):
        device.registrar.register(4096, 8192)


def test_memory_is_locked_by_default_on_gpus_of_nvidia_only(device):
    assert device.locks_by_default == (torch.version.hip is None)


@pytest.mark.parametrize("call", ["mark", "scatter", "gather"])
def test_a_gpu_that_has_failed_is_named_and_refuses_later_calls(
    pages, device, fake, monkeypatch, call
):
    arena = FakeArena(pages.raw_bytes)

    def fail(*_):
        raise RuntimeError("an illegal memory access was encountered")

    for name in ("record_event", "synchronize"):
        monkeypatch.setattr(fake, name, fail)
    monkeypatch.setattr(TorchCopies, "unpack", fail)
    monkeypatch.setattr(TorchCopies, "pack", fail)
    calls = {
        "mark": device.mark,
        "scatter": lambda: device.scatter(arena, [Move(0, [1, 2, 3, 4])]),
        "gather": lambda: device.gather(arena, [Move(0, [1, 2, 3, 4])]),
    }
    assert device.failure == ""
    with pytest.raises((RuntimeError, DeviceError), match="illegal memory access"):
        calls[call]()
    assert "illegal memory access" in device.failure
    for later in calls.values():
        with pytest.raises(DeviceError, match="the device has failed: an illegal"):
            later()
