"""Check the format of pages against the code of vLLM that writes them.

The order of elements in a page has changed between versions of vLLM without a sign. So before
pages are converted, vLLM's own code writes a page of known numbers, and the conversion must return
these numbers, and from them the same page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from holdfast.devices.arrange import Arrangement
from holdfast.devices.page_format import PageFormat
from holdfast.engines.vllm.unsupported import UnsupportedError

_BITS = {2: (torch.int16, 0x0080, 31_000), 4: (torch.int32, 0x3F00_0000, 1 << 23)}
"""For each element size: an integer type, the first pattern, and how many patterns are used.

All of them are finite numbers in float16, bfloat16 and float32.
"""

_STEPS = {"keys": 7, "values": 11}
"""Steps from one number to the next: they have no divisor in common with the counts above."""


def check_page(
    form: PageFormat,
    dtype: torch.dtype,
    write: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    writer: str,
) -> None:
    """Raise UnsupportedError unless `write` writes a page of this format.

    It takes keys and values, `[token][head][dim]`, and returns the page that it has written. It may
    raise any error. `writer` names it in errors.
    """
    first = form.states[0]
    heads, tokens, size = first.heads.length, first.head_tokens, first.head_size
    k, v = (_numbers(dtype, state, (tokens, heads, size)) for state in _STEPS)
    try:
        page = _bytes(write(k, v).cpu()).reshape(1, 1, 1, -1)
    except Exception as error:  # a kernel may raise any error
        raise UnsupportedError(f"vLLM does not write pages of {writer}: {error}") from error
    block = np.concatenate([_bytes(each.transpose(0, 1)) for each in (k, v)]).reshape(1, 1, -1)
    arrangement = Arrangement(form, 1)
    found, back = np.zeros_like(block), np.zeros_like(page)
    arrangement.to_blocks(page, found)
    arrangement.to_pages(block, back)
    if not (np.array_equal(found, block) and np.array_equal(back, page)):
        raise UnsupportedError(
            f"this vLLM orders keys and values of {writer} pages in another way than the versions "
            f"known here ({tokens} tokens, heads of {size} elements of {dtype}): portable blocks "
            "would be wrong"
        )


def _numbers(dtype: torch.dtype, state: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return different finite numbers; they repeat if the type has fewer."""
    kind, first, count = _BITS[dtype.itemsize]
    numbers = (np.arange(np.prod(shape)) * _STEPS[state]) % count + first
    return torch.from_numpy(numbers).to(kind).view(dtype).reshape(shape)


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().view(torch.uint8).numpy().reshape(-1)
