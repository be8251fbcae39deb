"""Pages of vLLM's CPU attention, and the check of their format against vLLM's own kernel.

The order of elements in a page has changed between versions of vLLM without a sign. So before
pages are converted, the kernel that writes them packs a page of known numbers, for any instruction
set on any processor, and the conversion must return these numbers, and from them the same page.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from holdfast.devices.arrange import Arrangement
from holdfast.devices.page_format import PageFormat
from holdfast.engines.vllm.describe import UnsupportedError

_BITS = {2: (torch.int16, 0x0080, 31_000), 4: (torch.int32, 0x3F00_0000, 1 << 23)}
"""For each element size: an integer type, the first pattern, and how many patterns are used.

All of them are finite numbers in float16, bfloat16 and float32.
"""

_STEPS = {"keys": 7, "values": 11}
"""Steps from one number to the next: they have no divisor in common with the counts above."""


def check_kernel(form: PageFormat, isa: str, dtype: torch.dtype) -> None:
    """Raise UnsupportedError unless vLLM's kernel for `isa` writes pages of this format."""
    from vllm import _custom_ops

    first = form.states[0]
    heads, tokens, size = first.heads.length, first.head_tokens, first.head_size
    k, v = (_numbers(dtype, state, (tokens, heads, size)) for state in _STEPS)
    cache = torch.zeros((2, heads, 2 * tokens, size), dtype=dtype)
    k_cache, v_cache = cache.chunk(2, dim=2)
    slots = torch.arange(tokens) + tokens
    try:
        _custom_ops.cpu_attn_reshape_and_cache(k, v, k_cache, v_cache, slots, isa)
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise UnsupportedError(f"vLLM's kernel does not pack pages of {isa!r}: {error}") from error
    page = _bytes(cache[1]).reshape(1, 1, 1, -1)
    block = np.concatenate([_bytes(each.transpose(0, 1)) for each in (k, v)]).reshape(1, 1, -1)
    arrangement = Arrangement(form, 1)
    found, back = np.zeros_like(block), np.zeros_like(page)
    arrangement.to_blocks(page, found)
    arrangement.to_pages(block, back)
    if not (np.array_equal(found, block) and np.array_equal(back, page)):
        raise UnsupportedError(
            f"this vLLM orders keys and values of {isa!r} pages in another way than the versions "
            f"known here ({tokens} tokens, heads of {size} elements of {dtype}): portable blocks "
            "would be wrong"
        )


def _numbers(dtype: torch.dtype, state: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return different finite numbers, as far as the type has so many."""
    kind, first, count = _BITS[dtype.itemsize]
    numbers = (np.arange(np.prod(shape)) * _STEPS[state]) % count + first
    return torch.from_numpy(numbers).to(kind).view(dtype).reshape(shape)


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().view(torch.uint8).numpy().reshape(-1)
