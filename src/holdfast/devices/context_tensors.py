"""A context as tensors, `[head][token][dim]` per layer, to and from portable blocks.

Hugging Face transformers keeps keys and values like this. All blocks of a state of a layer are one
call of numpy, which releases the GIL.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.blocks.layout import DTYPE_BYTES, PortableLayout
from holdfast.errors import BlockError

Tensor: TypeAlias = Any
"""A numpy array, or a torch tensor on the CPU: `[head][token][dim]`, dims contiguous."""

_RAW = ("uint8", "int8")
"""Types of tensors that hold elements whose own type numpy, for example, does not have."""

_Rows: TypeAlias = npt.NDArray[np.generic]


def tensors_to_blocks(
    layout: PortableLayout, layers: Sequence[Sequence[Tensor]]
) -> npt.NDArray[np.uint8]:
    """Return the full blocks of a context, one a row, for `Session.save`.

    `layers` has keys and values of each layer, or its latent. Trailing tokens of a partial block
    are left out. Raises BlockError if tensors do not fit the layout.
    """
    tokens = min((_tokens(state) for states in layers for state in states), default=0)
    blocks = np.empty((tokens // layout.block_tokens, layout.raw_bytes), np.uint8)
    for in_tensor, in_block in _rows(layout, layers, blocks):
        np.copyto(in_block, in_tensor)
    return blocks


def blocks_to_tensors(
    layout: PortableLayout, blocks: npt.NDArray[np.uint8], layers: Sequence[Sequence[Tensor]]
) -> None:
    """Write blocks, as `Session.fetch` returns them, into the leading tokens of tensors.

    `layers` as in `tensors_to_blocks`, with at least the tokens of the blocks. Raises BlockError
    if tensors or blocks do not fit the layout.
    """
    if blocks.ndim != 2 or blocks.dtype != np.uint8 or blocks.shape[1] != layout.raw_bytes:  # noqa: PLR2004
        raise BlockError(
            f"blocks of {blocks.dtype} and shape {blocks.shape}; pass bytes, "
            f"{layout.raw_bytes} for each block"
        )
    for in_tensor, in_block in _rows(layout, layers, blocks):
        np.copyto(in_tensor, in_block)


def _rows(
    layout: PortableLayout, layers: Sequence[Sequence[Tensor]], blocks: npt.NDArray[np.uint8]
) -> Iterator[tuple[_Rows, _Rows]]:
    """Yield each state in its tensor and in the blocks, as rows: [block][head][token]."""
    if len(layers) != len(layout.layers):
        raise BlockError(f"{len(layers)} layers given, the layout has {len(layout.layers)}")
    count, tokens = len(blocks), layout.block_tokens
    runs = iter(layout.whole().runs())
    for number, (states, expected) in enumerate(zip(layers, layout.layers, strict=True)):
        if len(states) != len(expected.states):
            raise BlockError(
                f"layer {number}: {len(states)} tensors given, it has {len(expected.states)}"
            )
        for tensor, (name, size) in zip(states, expected.states, strict=True):
            run = next(runs)
            _check_dtype(layout, tensor, f"layer {number}: {name}")
            array = _bytes(tensor, f"layer {number}: {name}")
            row = size * layout.element_bytes
            heads, held, given = array.shape
            if heads != expected.heads or given != row or held < count * tokens:
                raise BlockError(
                    f"layer {number}: {name} has {heads} heads, {held} tokens and {given} bytes a "
                    f"token; expected {expected.heads}, at least {count * tokens}, and {row}"
                )
            word = np.dtype((np.void, row))
            in_tensor = array.view(word)[:, : count * tokens, 0].reshape(heads, count, tokens)
            in_block = blocks[:, run.offset : run.offset + run.nbytes].view(word)
            yield in_tensor.swapaxes(0, 1), in_block.reshape(count, heads, tokens)


def _tokens(tensor: Tensor) -> int:
    """Return the tokens of a tensor; 0 for another shape, which `_bytes` refuses."""
    shape = tuple(getattr(tensor, "shape", ()))
    return int(shape[1]) if len(shape) == 3 else 0  # noqa: PLR2004


def _check_dtype(layout: PortableLayout, tensor: Tensor, what: str) -> None:
    """Raise BlockError for elements of another kind than the layout's, though of equal size."""
    dtype = str(getattr(tensor, "dtype", "")).removeprefix("torch.")
    if dtype in DTYPE_BYTES and dtype != layout.dtype and dtype not in _RAW:
        raise BlockError(
            f"{what} is of {dtype}, the layout says {layout.dtype}; convert the tensors, or name "
            "their data type in the layout"
        )


def _bytes(tensor: Tensor, what: str) -> npt.NDArray[np.uint8]:
    """Return the bytes of a tensor: [head][token][byte of the row], over the same memory."""
    torch = sys.modules.get("torch")  # a caller with a tensor has imported it
    shape = tuple(getattr(tensor, "shape", ()))
    if len(shape) != 3:  # noqa: PLR2004
        raise BlockError(f"{what} has shape {shape}; pass [head][token][dim], without a batch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        try:
            return np.asarray(tensor.detach().view(torch.uint8).numpy())
        except (RuntimeError, TypeError) as error:
            raise BlockError(
                f"{what} is on {tensor.device} with strides {tensor.stride()}: {error}; pass a "
                "tensor on the CPU whose dims are contiguous"
            ) from error
    if isinstance(tensor, np.ndarray):
        try:
            return tensor.view(np.uint8)
        except ValueError as error:
            raise BlockError(f"{what}: {error}; pass an array whose dims are contiguous") from error
    raise BlockError(f"{what} is of type {type(tensor).__name__}; pass an array or tensor")
