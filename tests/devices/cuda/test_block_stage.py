"""Portable blocks on a simulated GPU, beside the device of pages in host memory."""

import numpy as np
import pytest

from holdfast.blocks.layout import Layout
from holdfast.devices.arrange import PortablePages
from holdfast.devices.base import DeviceError, Move, Pages
from holdfast.devices.cuda import device as device_module
from holdfast.devices.cuda.device import CudaDevice
from holdfast.devices.page_format import cpu_format, latent_format, plain_format
from holdfast.devices.portable_host import open_portable
from holdfast.devices.registry import DeviceOptions
from holdfast.errors import BlockError
from holdfast.testing.page_locks import TestLocks
from holdfast.testing.simulated_driver import SimulatedDriver

LAYERS, HEADS, TOKENS, PER_BLOCK, COUNT = 3, 4, 8, 2, 12
SAVED, LOADED = [[5, 1], [9, 2], [0, 7]], [[3, 11], [4, 6], [8, 10]]


class Arena:
    def __init__(self, nbytes, fill):
        self.bytes = np.full(nbytes, fill, np.uint8)
        self.address = self.bytes.ctypes.data
        self.nbytes = nbytes
        self.view = memoryview(self.bytes)


def layout_of(sizes):
    return Layout.portable(
        layers=LAYERS,
        kv_heads=HEADS,
        head_size=sizes[0],
        value_size=sizes[1],
        dtype="bfloat16",
        block_tokens=PER_BLOCK * TOKENS,
    )


def pages_of(form, seed):
    padding = 16
    shape = (LAYERS, COUNT, form.page_bytes + padding)
    memory = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    bases = tuple(layer.ctypes.data for layer in memory)
    return memory, Pages.uniform(bases, shape[2], form.page_bytes, COUNT, PER_BLOCK)


def save(device, arena, moves, locks):
    staged = device.stage([move.pages for move in moves])
    staged.pack()
    while not staged.ready():
        pass
    payloads = [(at, move.payload) for at, move in enumerate(moves)]
    assert staged.copy(arena, payloads, locks).result()
    staged.release()


@pytest.mark.parametrize("piece_bytes", [1 << 16, 1])
@pytest.mark.parametrize("locked", [True, False])
@pytest.mark.parametrize("rank", [(0, 1), (1, 2), (3, 4), (5, 8)])
@pytest.mark.parametrize(
    "form_of",
    [
        ("nhd", False, (16, 16)),
        ("hnd", False, (12, 4)),
        ("nhd", True, (8, 8)),
        ("hnd", True, (6, 2)),
    ],
)
def test_portable_blocks_are_those_of_the_host_device(
    form_of, rank, locked, piece_bytes, monkeypatch
):
    order, fused, sizes = form_of
    monkeypatch.setattr(device_module, "PIECE_BYTES", piece_bytes)
    layout = layout_of(sizes)
    part = layout.rank(*rank)
    form = plain_format(order, len(part.heads[0]), TOKENS, sizes, 2, fused=fused)
    memory, pages = pages_of(form, 1)
    portable = PortablePages(form, part)
    driver = SimulatedDriver(sum(rank))
    gpu = CudaDevice(driver, pages, DeviceOptions(4, portable), memory)
    host = open_portable(pages, portable, memory)
    slot = layout.raw_bytes + 48
    arenas = [Arena(3 * slot, 7), Arena(3 * slot, 7)]
    locks = TestLocks(driver, arenas[0], 1000)
    for chunk in range(3 * slot // 1000 + 1 if locked else 0):
        locks.lock(chunk)
    moves = [Move(at * slot + 16, ids) for at, ids in zip((2, 0, 1), SAVED, strict=True)]
    save(gpu, arenas[0], moves, locks)
    assert host.gather(arenas[1], moves).result()
    assert (arenas[0].bytes == arenas[1].bytes).all()

    arenas[0].bytes[:] = np.random.default_rng(2).integers(0, 256, 3 * slot, np.uint8)
    before = memory.copy()
    into = [Move(move.payload, ids) for move, ids in zip(moves, LOADED, strict=True)]
    into[0] = Move(into[0].payload, [3], first=1)
    assert host.scatter(arenas[0], into).result()
    wanted = memory.copy()
    memory[:] = before
    assert gpu.scatter(arenas[0], into, gpu.mark(), locks).result()
    assert (memory == wanted).all()
    assert (memory != before).any()
    assert not driver.faults
    assert not locks.uses
    gpu.close()
    host.close()


@pytest.mark.parametrize("writes", [True, False])
def test_latents_are_copied_as_they_are_and_written_by_one_rank(writes):
    layout = Layout.portable_latent(
        layers=LAYERS, latent_size=24, dtype="bfloat16", block_tokens=PER_BLOCK * TOKENS
    )
    form = latent_format(TOKENS, 24, 2)
    memory, pages = pages_of(form, 3)
    portable = PortablePages(form, layout.rank(0 if writes else 1, 2))
    device = CudaDevice(SimulatedDriver(), pages, DeviceOptions(4, portable), memory)
    arena = Arena(2 * layout.raw_bytes, 7)
    save(device, arena, [Move(0, [5, 1])], None)
    wanted = np.stack([memory[layer, [5, 1], : form.page_bytes] for layer in range(LAYERS)])
    held = arena.bytes[: layout.raw_bytes]
    assert (held == (wanted.reshape(-1) if writes else 7)).all()
    assert device.scatter(arena, [Move(0, [8, 9])]).result()
    loaded = np.stack([memory[layer, [8, 9], : form.page_bytes] for layer in range(LAYERS)])
    assert (loaded.reshape(-1) == held).all()
    device.close()


def test_pages_of_a_cpu_kernel_are_not_converted_on_a_gpu():
    form = cpu_format("amx", HEADS, 32, 32, 2)
    memory = np.zeros((LAYERS, 2, form.page_bytes), np.uint8)
    bases = tuple(layer.ctypes.data for layer in memory)
    pages = Pages.uniform(bases, form.page_bytes, form.page_bytes, 2, 1)
    layout = Layout.portable(
        layers=LAYERS, kv_heads=HEADS, head_size=32, dtype="bfloat16", block_tokens=32
    )
    portable = PortablePages(form, layout.whole())
    with pytest.raises(DeviceError, match=r"pages of the format .* are not converted on a GPU"):
        CudaDevice(SimulatedDriver(), pages, DeviceOptions(4, portable), memory)


def test_pages_that_do_not_fit_the_layout_are_refused():
    form = plain_format("nhd", HEADS, TOKENS, (16, 16), 2, fused=True)
    memory, pages = pages_of(form, 1)
    fewer = Layout.portable(
        layers=LAYERS - 1, kv_heads=HEADS, head_size=16, dtype="bfloat16", block_tokens=16
    )
    portable = PortablePages(form, fewer.whole())
    with pytest.raises(BlockError, match="has 2 layers of the layout, and 3 of the engine"):
        CudaDevice(SimulatedDriver(), pages, DeviceOptions(4, portable), memory)
