"""Pages of vLLM's attention on GPUs, and the check of their format against the layer's own code.

vLLM 0.32 gives FlashAttention and its own Triton attention pages of rows, each a key and its value:
`[token][head][key|value]` (its layouts `LBNHC` and `BLNHC`) or `[head][token][key|value]` (`LBHNC`
and `BLHNC`). Source: vLLM's `v1/kv_cache_layout.py`, `v1/attention/backends/flash_attn.py` and
`triton_attn.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from holdfast.devices.page_format import Order, PageFormat, plain_format
from holdfast.engines.vllm.page_check import check_page
from holdfast.engines.vllm.unsupported import UnsupportedError

BACKENDS = ("FLASH_ATTN", "TRITON_ATTN")
"""Attention backends whose pages are converted."""

_ORDERS: dict[str, Order] = {"213": "nhd", "123": "hnd", "23": "hnd"}
"""Orders of a page by vLLM's axes (1: heads, 2: tokens, 3: key and value), the outermost first.

With one head, both orders are the same.
"""


def gpu_format(order: str, heads: int, tokens: int, head_size: int, item: int) -> PageFormat:
    """Return the format of pages with elements of `item` bytes, by the order of `CacheGeometry`.

    Raises UnsupportedError for another order.
    """
    shape = f"1x{heads}.{tokens}.{2 * head_size}:"
    axes = order.removeprefix(shape)
    known = _ORDERS.get(axes.replace("1", "") if heads == 1 else axes)
    if known is None:
        raise UnsupportedError(
            f"vLLM's pages have the order {order}; known are {shape}213 and {shape}123"
        )
    return plain_format(known, heads, tokens, (head_size, head_size), item, fused=True)


def is_amd() -> bool:
    """Return whether PyTorch uses GPUs of AMD, which it names `cuda`, too."""
    return torch.version.hip is not None


def check_layer(form: PageFormat, layer: Any, dtype: torch.dtype, device: Any) -> None:
    """Raise UnsupportedError unless an attention layer writes pages of this format.

    The layer writes a page of its own, in memory of the GPU that is freed again.
    """

    def write(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        tokens, heads, size = keys.shape
        by_token = form.name.startswith("nhd")
        shape = (2, tokens, heads, 2 * size) if by_token else (2, heads, tokens, 2 * size)
        memory = torch.zeros(shape, dtype=dtype, device=device)
        cache = memory.transpose(1, 2) if by_token else memory
        slots = torch.arange(tokens, device=device) + tokens
        layer.impl.do_kv_cache_update(layer, keys.to(device), values.to(device), cache, slots)
        return memory[1]

    check_page(form, dtype, write, layer.attn_backend.get_name())
