"""Pages of vLLM's CPU attention, and the check of their format against vLLM's own kernel."""

from __future__ import annotations

import torch

from holdfast.devices.page_format import PageFormat
from holdfast.engines.vllm.page_check import check_page


def check_kernel(form: PageFormat, isa: str, dtype: torch.dtype) -> None:
    """Raise UnsupportedError unless vLLM's kernel for `isa` writes pages of this format.

    The kernel packs for any instruction set on any processor.
    """
    from vllm import _custom_ops

    def write(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        tokens, heads, size = keys.shape
        cache = torch.zeros((2, heads, 2 * tokens, size), dtype=dtype)
        k_cache, v_cache = cache.chunk(2, dim=2)
        slots = torch.arange(tokens) + tokens
        _custom_ops.cpu_attn_reshape_and_cache(keys, values, k_cache, v_cache, slots, isa)
        return cache[1]

    check_page(form, dtype, write, repr(isa))
