"""Pages of engines, packed by plain numpy from the definition of each order: an oracle for tests.

Nothing here uses the strides of `devices.page_format`. An array of one state is `[head][token]
[dim]`, a page is flat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

State: TypeAlias = npt.NDArray[Any]
"""Keys or values of one page, one layer: `[head][token][dim]`."""

Packer: TypeAlias = Callable[[State, State], npt.NDArray[Any]]
"""Packs keys and values into the flat elements of a page."""


def pack_hnd(keys: State, values: State) -> npt.NDArray[Any]:
    """Return all keys `[head][token][dim]`, then all values."""
    return np.concatenate([keys.ravel(), values.ravel()])


def pack_nhd(keys: State, values: State) -> npt.NDArray[Any]:
    """Return all keys `[token][head][dim]`, then all values."""
    return np.concatenate([state.swapaxes(0, 1).ravel() for state in (keys, values)])


def pack_hnd_fused(keys: State, values: State) -> npt.NDArray[Any]:
    """Return `[head][token][key|value]`."""
    return np.concatenate([keys, values], axis=2).ravel()


def pack_nhd_fused(keys: State, values: State) -> npt.NDArray[Any]:
    """Return `[token][head][key|value]`."""
    return np.concatenate([keys, values], axis=2).swapaxes(0, 1).ravel()


def pack_vec(keys: State, values: State) -> npt.NDArray[Any]:
    """Return, per head, keys `[dim][token]` and values `[token][dim]`."""
    heads = zip(keys, values, strict=True)
    return np.concatenate([part.ravel() for key, value in heads for part in (key.T, value)])


def pack_amx(keys: State, values: State) -> npt.NDArray[Any]:
    """Return, per head, keys in tiles of 16 tokens, and values in tiles of 16 dims.

    Elements of up to 2 bytes are in pairs: of dims for keys, of tokens for values.
    """
    pair = 1 if keys.itemsize == 4 else 2  # noqa: PLR2004
    parts: list[State] = []
    for key, value in zip(keys, values, strict=True):
        tokens, size = key.shape
        parts += [
            key[first : first + 16, dim : dim + pair].ravel()
            for first in range(0, tokens, 16)
            for dim in range(0, size, pair)
        ]
        parts += [
            value[token : token + pair, first : first + 16].T.ravel()
            for first in range(0, size, 16)
            for token in range(0, tokens, pair)
        ]
    return np.concatenate(parts)


def pack_block(
    packer: Packer, keys: State, values: State, page_tokens: int
) -> list[npt.NDArray[Any]]:
    """Return the pages of one layer of one block, whose tokens fill them."""
    return [
        packer(keys[:, at : at + page_tokens], values[:, at : at + page_tokens])
        for at in range(0, keys.shape[1], page_tokens)
    ]


def portable_layer(states: Sequence[State]) -> npt.NDArray[Any]:
    """Return one layer of a portable block: each state `[head][token][dim]`, one after another."""
    return np.concatenate([state.ravel() for state in states])
