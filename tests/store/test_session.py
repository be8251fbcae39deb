"""A session speaks tokens and blocks, and refuses what does not fit."""

import numpy as np
import pytest

import holdfast
from holdfast.errors import BlockError, ConfigError, Outcome

LAYOUT = holdfast.Layout.portable(
    layers=2, kv_heads=2, head_size=16, dtype="float16", block_tokens=32
)
FINGERPRINT = holdfast.Fingerprint(
    model="m", layout=LAYOUT, positions="none", adapter="none", kv_quantisation="none"
)


@pytest.fixture
def store():
    with holdfast.open(host="16 MiB") as opened:
        yield opened


def blocks_for(count: int, seed: int = 0) -> np.ndarray:
    shape = (count, LAYOUT.payload_bytes // 2)
    return np.random.default_rng(seed).integers(0, 9_999, shape).astype(np.float16)


def test_blocks_of_any_dtype_come_back_as_they_were(store) -> None:
    session, tokens, blocks = store.session(FINGERPRINT), list(range(100)), blocks_for(3)
    assert session.save(tokens, blocks) == 3
    found = np.zeros_like(blocks)
    landed = session.fetch(tokens, into=found)
    assert (landed.tokens, landed.blocks, landed.outcome) == (96, 3, Outcome.OK)
    assert landed.sources == {"host": 3}
    assert (found == blocks).all()


def test_a_context_that_goes_on_gets_its_prefix_and_keeps_its_rest(store) -> None:
    session, blocks = store.session(FINGERPRINT), blocks_for(5)
    session.save(list(range(96)), blocks[:3])
    found = np.full_like(blocks, 7)
    landed = session.fetch(list(range(160)), into=found)
    assert landed.blocks == 3
    assert (found[:3] == blocks[:3]).all()
    assert (found[3:] == 7).all()
    assert session.cover(list(range(160))) == 96


def test_another_fingerprint_is_another_world(store) -> None:
    store.session(FINGERPRINT).save(list(range(64)), blocks_for(2))
    other = holdfast.Fingerprint(
        model="n", layout=LAYOUT, positions="none", adapter="none", kv_quantisation="none"
    )
    assert store.session(other).cover(list(range(64))) == 0


def test_too_few_tokens_for_a_block_is_nothing_to_do(store) -> None:
    session = store.session(FINGERPRINT)
    assert session.save([1, 2, 3], blocks_for(0)) == 0
    assert session.fetch([1, 2, 3], into=blocks_for(0)).outcome is Outcome.MISS


def test_rows_that_do_not_fit_are_refused_with_both_numbers(store) -> None:
    session = store.session(FINGERPRINT)
    with pytest.raises(BlockError, match="2 blocks given, but the tokens fill 3"):
        session.save(list(range(96)), blocks_for(2))
    with pytest.raises(BlockError, match=f"the layout says {LAYOUT.payload_bytes}"):
        session.save(list(range(96)), blocks_for(3)[:, :-1].copy())
    with pytest.raises(BlockError, match="contiguous"):
        session.save(list(range(96)), np.asfortranarray(blocks_for(3)))
    assert session.cover(list(range(96))) == 0


def test_an_unknown_domain_is_named(store) -> None:
    with pytest.raises(ConfigError, match="'acme' is not configured; known: default; ask for"):
        store.session(FINGERPRINT, domain="acme")


def test_a_disk_needs_a_folder() -> None:
    with pytest.raises(ConfigError, match="disk and path go together"):
        holdfast.open(host="16 MiB", disk="1 GiB")


@pytest.mark.parametrize("deadline_s", [float("inf"), float("nan"), -1.0, 1e300])
def test_deadlines_out_of_range_are_refused_and_nothing_is_leased(store, deadline_s) -> None:
    session = store.session(FINGERPRINT)
    session.save(list(range(96)), blocks_for(3))
    with pytest.raises(BlockError, match=r"deadline_s: .* is not from 0 to 86400 seconds"):
        session.fetch(list(range(96)), into=blocks_for(3), deadline_s=deadline_s)
    assert not store.states.leases


def test_a_copy_that_breaks_off_keeps_neither_lease_nor_slots(store) -> None:
    session, blocks = store.session(FINGERPRINT), blocks_for(3)
    session.save(list(range(96)), blocks)
    blocks.flags.writeable = False
    with pytest.raises(TypeError, match="read-only"):
        session.fetch(list(range(96)), into=blocks)
    assert not store.states.leases
