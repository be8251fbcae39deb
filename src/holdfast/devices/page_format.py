"""Page formats: where the elements of keys and values are in an engine's page.

A page holds the state of one layer for some consecutive tokens. Its format describes each state
(keys, values, or the latent of MLA) by strides: axes in the portable order `[head][token][dim]`,
where tokens and dims may be split into several axes, and for each axis its length and the distance
of its elements in the page. All lengths and distances are in elements.

Orders of vLLM's CPU kernels: `csrc/cpu/cpu_attn_{vec,vec16,amx}.hpp` of vLLM 0.32.
"""

from __future__ import annotations

from math import prod
from typing import Literal, NamedTuple

from holdfast.errors import BlockError

Order = Literal["nhd", "hnd"]
"""Order of tokens (n), heads (h) and dims (d) in a page."""

CPU_ISAS = ("vec", "vec16", "amx")
"""Instruction sets of vLLM's CPU kernels whose page formats are known."""

_TILE = 16
"""Tokens of keys, and dims of values, in one tile of an AMX register."""
_AMX_DIMS = 32
"""vLLM's AMX kernel does not pack heads whose size is not a multiple of this."""


class PageAxis(NamedTuple):
    """One axis of a state: its length, and the distance of its elements in the page."""

    length: int
    stride: int


class PageState(NamedTuple):
    """Keys, values or latents in a page: the first element, and the axes from there.

    `tokens` and `dims` are axes from the outermost to the innermost.
    """

    start: int
    heads: PageAxis
    tokens: tuple[PageAxis, ...]
    dims: tuple[PageAxis, ...]

    @property
    def head_tokens(self) -> int:
        """Tokens of one head in a page."""
        return prod(axis.length for axis in self.tokens)

    @property
    def head_size(self) -> int:
        """Elements of one token of one head."""
        return prod(axis.length for axis in self.dims)

    @property
    def elements(self) -> int:
        """Elements of this state in a page."""
        return self.heads.length * self.head_tokens * self.head_size


class PageFormat(NamedTuple):
    """The format of a page of one layer: `states` in the portable order, keys before values.

    A page has no gaps: its elements are those of its states.
    """

    name: str
    element_bytes: int
    states: tuple[PageState, ...]

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.element_bytes * sum(state.elements for state in self.states)

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self.states[0].head_tokens


def plain_format(
    order: Order,
    heads: int,
    tokens: int,
    sizes: tuple[int, int],
    element_bytes: int,
    *,
    fused: bool,
) -> PageFormat:
    """Return a page of plain rows: `[token][head]` or `[head][token]`.

    `sizes`: elements of a key and of a value. A fused row is a key and its value, so a page is
    `[n][h][key|value]`; otherwise a page has all keys, then all values.
    """
    _check(heads=heads, tokens=tokens, key_size=sizes[0], value_size=sizes[1])
    states, start = [], 0
    for size in sizes:
        row = sum(sizes) if fused else size
        by_head, by_token = (tokens * row, row) if order == "hnd" else (row, heads * row)
        states.append(
            PageState(
                start, PageAxis(heads, by_head), (PageAxis(tokens, by_token),), (PageAxis(size, 1),)
            )
        )
        start += size if fused else heads * tokens * size
    name = f"{order}{'-fused' if fused else ''}"
    return PageFormat(name, element_bytes, tuple(states))


def latent_format(tokens: int, latent_size: int, element_bytes: int) -> PageFormat:
    """Return a page of MLA: `[token][latent]`, which is the portable order already."""
    _check(tokens=tokens, latent_size=latent_size)
    state = PageState(
        0,
        PageAxis(1, tokens * latent_size),
        (PageAxis(tokens, latent_size),),
        (PageAxis(latent_size, 1),),
    )
    return PageFormat("latent", element_bytes, (state,))


def cpu_format(isa: str, heads: int, tokens: int, head_size: int, element_bytes: int) -> PageFormat:
    """Return a page of vLLM's CPU attention: per head its packed keys, then its packed values.

    `vec`, `vec16`: keys `[dim][token]`, values `[token][dim]`. `amx`: keys in tiles of 16 tokens,
    values in tiles of 16 dims, both in words of 4 bytes; heads whose size is not a multiple of 32
    are packed as by `vec`. Elements of fp8 are ordered like those of 2 bytes. Raises BlockError
    for another instruction set, and for tokens that do not fill tiles.
    """
    _check(heads=heads, tokens=tokens, head_size=head_size)
    if isa not in CPU_ISAS:
        raise BlockError(
            f"the order of keys and values in pages of {isa!r} is not known; known are "
            f"{', '.join(CPU_ISAS)}"
        )
    rows = tokens * head_size
    by_head = PageAxis(heads, 2 * rows)
    if isa == "amx" and head_size % _AMX_DIMS == 0:
        if tokens % _AMX_DIMS:
            raise BlockError(f"{tokens} tokens in a page of amx; pass a multiple of {_AMX_DIMS}")
        word = 1 if element_bytes == 4 else 2  # noqa: PLR2004
        tile = _TILE * word
        keys = PageState(
            0,
            by_head,
            (PageAxis(tokens // _TILE, _TILE * head_size), PageAxis(_TILE, word)),
            (PageAxis(head_size // word, tile), PageAxis(word, 1)),
        )
        values = PageState(
            rows,
            by_head,
            (PageAxis(tokens // word, tile), PageAxis(word, 1)),
            (PageAxis(head_size // _TILE, _TILE * tokens), PageAxis(_TILE, word)),
        )
    else:
        keys = PageState(0, by_head, (PageAxis(tokens, 1),), (PageAxis(head_size, tokens),))
        values = PageState(rows, by_head, (PageAxis(tokens, head_size),), (PageAxis(head_size, 1),))
    return PageFormat(f"cpu-{isa}", element_bytes, (keys, values))


def _check(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise BlockError(f"page format: {name} is {count}; it must be at least 1")
