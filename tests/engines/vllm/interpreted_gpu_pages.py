"""vLLM's own code for GPU pages, under Triton's interpreter; run by `test_gpu_pages.py`.

vLLM's kernel that writes pages is in Triton. FlashAttention's is compiled for GPUs, so the Triton
one, which takes the same arguments, is in its place: where its pages have keys and values is said
by FlashAttention's Python code.
"""

import importlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
from triton import language
from vllm import triton_utils
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends import flash_attn, triton_attn
from vllm.v1.attention.ops import triton_reshape_and_cache_flash as page_writer

from holdfast.blocks.layout import Layout
from holdfast.devices.arrange import PortablePages
from holdfast.devices.base import Move, Pages
from holdfast.devices.cuda.device import CudaDevice
from holdfast.devices.page_format import plain_format
from holdfast.devices.registry import DeviceOptions
from holdfast.engines.vllm.gpu_pages import check_layer, gpu_format
from holdfast.engines.vllm.unsupported import UnsupportedError
from holdfast.testing.packings import portable_layer
from holdfast.testing.simulated_driver import SimulatedDriver

# Without a GPU, vLLM leaves Triton out; its module is loaded again with the interpreter's.
triton_utils.triton, triton_utils.tl = triton, language
torch.cuda.get_device_capability = lambda *_: (9, 0)
write = importlib.reload(page_writer).triton_reshape_and_cache_flash
flash_attn.reshape_and_cache_flash = triton_attn.triton_reshape_and_cache_flash = write
KINDS = {
    "FLASH_ATTN": flash_attn.FlashAttentionImpl,
    "TRITON_ATTN": triton_attn.TritonAttentionImpl,
}
TOKENS = 16


def layer_of(backend, size):
    """An attention layer with the code of a backend that writes pages."""
    impl = object.__new__(KINDS[backend])
    impl.attn_type, impl.head_size, impl.kv_cache_dtype = AttentionType.DECODER, size, "auto"
    impl._is_per_token_head_quant = False
    one = torch.ones(1)
    named = SimpleNamespace(get_name=lambda: backend)
    return SimpleNamespace(impl=impl, attn_backend=named, _k_scale=one, _v_scale=one)


@pytest.mark.parametrize("backend", KINDS)
@pytest.mark.parametrize("order", ["nhd", "hnd"])
@pytest.mark.parametrize(
    ("dtype", "heads", "size"),
    [(torch.bfloat16, 2, 64), (torch.float16, 1, 80), (torch.bfloat16, 3, 128)],
)
def test_vllm_writes_pages_of_the_known_format(backend, order, dtype, heads, size):
    layer = layer_of(backend, size)
    axes = "213" if order == "nhd" else "123"
    form = gpu_format(f"1x{heads}.{TOKENS}.{2 * size}:{axes}", heads, TOKENS, size, 2)
    check_layer(form, layer, dtype, "cpu")
    apart = plain_format(order, heads, TOKENS, (size, size), 2, fused=False)
    with pytest.raises(UnsupportedError, match="in another way"):
        check_layer(apart, layer, dtype, "cpu")


@pytest.mark.parametrize("backend", KINDS)
@pytest.mark.parametrize(("order", "other"), [("nhd", "hnd"), ("hnd", "nhd")])
def test_blocks_of_vllms_pages_are_portable_and_fill_pages_of_another_order(backend, order, other):
    """The device runs on a simulated driver; vLLM's code writes and reads the pages."""
    layers, heads, size, per_block, count = 2, 2, 64, 2, 6
    layer = layer_of(backend, size)
    layout = Layout.portable(
        layers=layers, kv_heads=heads, head_size=size, dtype="bfloat16",
        block_tokens=per_block * TOKENS,
    )  # fmt: skip
    tokens = per_block * TOKENS
    states = torch.randn(layers, 2, tokens, heads, size).to(torch.bfloat16)
    ids, into = [4, 1], [3, 0]
    arena = Arena(layout.raw_bytes)
    for at, (order_here, pages_here) in enumerate(((order, ids), (other, into))):
        memory, views = cache_of(order_here, layers, count, heads, size)
        if at == 0:
            slots = torch.tensor([page * TOKENS + token for page in ids for token in range(TOKENS)])
            for view, (keys, values) in zip(views, states, strict=True):
                layer.impl.do_kv_cache_update(layer, keys, values, view, slots)
        device = device_of(order_here, memory, layout, per_block)
        if at == 0:
            staged = device.stage([pages_here])
            staged.pack()
            while not staged.ready():
                pass
            assert staged.copy(arena, [(0, 0)]).result()
            staged.release()
            bits = states.view(torch.int16).numpy().transpose(0, 1, 3, 2, 4)
            wanted = np.concatenate([portable_layer(each) for each in bits])
            assert (arena.bytes.view(np.int16) == wanted).all()
        else:
            assert device.scatter(arena, [Move(0, pages_here)]).result()
            for view, state in zip(views, states, strict=True):
                # As the backends read a page: [block][token][head][key|value].
                rows = view.transpose(1, 2)[into].reshape(tokens, heads, 2 * size)
                for found, written in zip(rows.split(size, dim=-1), state, strict=True):
                    assert torch.equal(found.view(torch.int16), written.view(torch.int16))
        device.close()


class Arena:
    def __init__(self, nbytes):
        self.bytes = np.zeros(nbytes, np.uint8)
        self.address = self.bytes.ctypes.data
        self.nbytes = nbytes
        self.view = memoryview(self.bytes)


def cache_of(order, layers, count, heads, size):
    """The KV cache of some layers, as vLLM lays it out, and a view `[B, H, N, C]` of each layer."""
    inner = (TOKENS, heads) if order == "nhd" else (heads, TOKENS)
    memory = torch.randn(layers, count, *inner, 2 * size).to(torch.bfloat16)
    return memory, [each.transpose(1, 2) if order == "nhd" else each for each in memory]


def device_of(order, memory, layout, per_block):
    layers, count, *_ = memory.shape
    nbytes = memory[0, 0].numel() * memory.element_size()
    bases = tuple(layer.data_ptr() for layer in memory)
    heads = memory.shape[3] if order == "nhd" else memory.shape[2]
    size = memory.shape[4] // 2
    form = plain_format(order, heads, TOKENS, (size, size), 2, fused=True)
    pages = Pages.uniform(bases, nbytes, nbytes, count, per_block)
    options = DeviceOptions(2, PortablePages(form, layout.whole()))
    return CudaDevice(SimulatedDriver(layers), pages, options, memory)
