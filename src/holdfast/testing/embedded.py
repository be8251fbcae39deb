"""Test contexts that are saved and fetched through `holdfast.open`, with every byte checked."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from holdfast.blocks.fingerprint import TOKENS, Fingerprint, KvGroup, Meaning, Representation
from holdfast.blocks.layout import Layout, PortableLayout
from holdfast.session import Session
from holdfast.store.store import Store
from holdfast.testing.store_view import HOST, StoreView

LAYOUT = Layout.portable(layers=2, kv_heads=2, head_size=16, dtype="float16", block_tokens=32)
BLOCKS = 3
"""Default number of blocks of a context."""


def fingerprint_for(layout: Representation, model: str = "m") -> Fingerprint:
    """Return the fingerprint of a model with full attention and nothing else of note."""
    layers = len(layout.layers) if isinstance(layout, PortableLayout) else layout.layers
    meaning = Meaning(
        model=model,
        positions="none",
        adapter="none",
        kv_quantisation="none",
        kv_scales="none",
        naming=TOKENS,
        block_tokens=layout.block_tokens,
        kv_group=KvGroup.all_layers(layers),
    )
    return Fingerprint(meaning, layout)


FINGERPRINT = fingerprint_for(LAYOUT)


def blocks_for(seed: int, count: int = BLOCKS) -> npt.NDArray[np.float16]:
    """Return the blocks of a context."""
    shape = (count, LAYOUT.raw_bytes // 2)
    return np.random.default_rng(seed).integers(0, 9_999, shape).astype(np.float16)


def tokens_for(seed: int, count: int = BLOCKS) -> list[int]:
    """Return the tokens of a context."""
    return [seed * 1_000 + i for i in range(LAYOUT.block_tokens * count)]


def serves(session: Session, seed: int) -> None:
    """Save a context and fetch it; raise AssertionError if any block or byte differs."""
    session.save(tokens_for(seed), blocks_for(seed))
    found = np.zeros_like(blocks_for(seed))
    landed = session.fetch(tokens_for(seed), into=found)
    if landed.blocks != BLOCKS or not (found == blocks_for(seed)).all():
        raise AssertionError(f"context {seed}: {landed}")


def await_nothing_held(store: Store) -> None:
    """Wait until no lease or reservation is open, and every used slot belongs to a block."""
    view = StoreView(store)

    def is_nothing_held() -> bool:
        with view.still():
            return view.is_idle and view.used_slots() == len(view.copies(HOST))

    view.wait_until(is_nothing_held, "no lease or reservation is open, and no slot is lost")
