"""Slices of portable contexts: written at one tensor-parallel size, read at others."""

import contextlib
import signal
import subprocess
import sys
import threading
import time

import msgspec
import numpy as np
import pytest

import holdfast
from holdfast import Outcome
from holdfast.blocks.layout import HeadState, LatentState, PortableLayout
from holdfast.blocks.payload_part import SliceCopy
from holdfast.errors import BlockError, RefusedError
from holdfast.testing.embedded import fingerprint_for
from holdfast.wire.local import messages as m
from holdfast.wire.local.client import Client
from holdfast_bench.harness.process import wait_until

LAYOUT = holdfast.Layout.portable(
    layers=3, kv_heads=4, head_size=8, dtype="float16", block_tokens=16
)
MODEL = fingerprint_for(LAYOUT)
BLOCKS = 5
TOKENS = list(range(BLOCKS * 16))
SHAPE = (BLOCKS, 3, 2, 4, 16, 8)
"""Of a context as elements: block, layer, k or v, head, token, dim."""
KV = np.random.default_rng(3).integers(0, 9_999, SHAPE).astype(np.float16)
LATENT = holdfast.Layout.portable_latent(layers=2, latent_size=40, dtype="int8", block_tokens=16)


@pytest.fixture
def node(lasting_node):
    """A node that holds no block."""
    yield lasting_node
    with contextlib.closing(Client(lasting_node.address, m.Hello(m.PROTOCOL, "t"), 60.0)) as client:
        client.call(m.Drop("*"), m.ReportReply, 60.0)


def rank_session(store, rank, size, fingerprint=MODEL):
    layout_slice = fingerprint.representation.rank(rank, size)
    return store.session(fingerprint, layout_slice=layout_slice)


def heads_of(rank, size):
    """Return what one rank computes: its share of the heads, or a copy of one head."""
    share = max(4 // size, 1)
    first = rank * 4 // size
    return np.ascontiguousarray(KV[:, :, :, first : first + share]).reshape(BLOCKS, -1)


def save_ranks(store, size, ranks=None):
    """Save a context rank by rank; return what each save published."""
    ranks = range(size) if ranks is None else ranks
    return [rank_session(store, r, size).save(TOKENS, heads_of(r, size)) for r in ranks]


def fetch(session, row_bytes):
    found = np.zeros((BLOCKS, row_bytes), np.uint8)
    landed = session.fetch(TOKENS, into=found)
    return landed, found


@pytest.mark.parametrize("written_at", [1, 2, 4, 8])
def test_a_context_written_at_one_size_is_read_at_any(store, written_at):
    assert sum(save_ranks(store, written_at)) == BLOCKS
    whole = np.zeros((BLOCKS, LAYOUT.raw_bytes // 2), np.float16)
    assert store.session(MODEL).fetch(TOKENS, into=whole).blocks == BLOCKS
    assert (whole == KV.reshape(BLOCKS, -1)).all()
    for read_at in (1, 2, 4, 8):
        for rank in range(read_at):
            found = np.zeros_like(heads_of(rank, read_at))
            landed = rank_session(store, rank, read_at).fetch(TOKENS, into=found)
            assert landed.blocks == BLOCKS
            assert (found == heads_of(rank, read_at)).all()


def test_another_engine_reads_what_this_one_wrote(store):
    """Nothing in a portable fingerprint names the engine, its version or its device."""
    save_ranks(store, 2)
    fields = msgspec.to_builtins(MODEL)
    theirs = msgspec.convert(fields, holdfast.Fingerprint)
    assert "engine" not in str(fields)
    found = np.zeros_like(heads_of(3, 4))
    assert rank_session(store, 3, 4, theirs).fetch(TOKENS, into=found).blocks == BLOCKS
    assert (found == heads_of(3, 4)).all()


def test_a_block_is_held_when_its_last_part_is_saved(store):
    assert save_ranks(store, 2, [1]) == [0]
    assert store.session(MODEL).cover(TOKENS) == 0
    assert save_ranks(store, 2, [0]) == [BLOCKS]
    assert store.session(MODEL).cover(TOKENS) == len(TOKENS)
    assert save_ranks(store, 2) == [0, 0]


def test_ranks_that_save_at_the_same_time_fill_the_same_blocks(store):
    sessions = [rank_session(store, rank, 4) for rank in range(4)]
    saved = [0] * 4

    def save(rank):
        saved[rank] = sessions[rank].save(TOKENS, heads_of(rank, 4))

    threads = [threading.Thread(target=save, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(saved) == BLOCKS
    _, found = fetch(store.session(MODEL), LAYOUT.raw_bytes)
    assert (found.view(np.float16) == KV.reshape(BLOCKS, -1)).all()


def test_layers_of_pipeline_stages_fill_one_record(store):
    stages = [range(2), range(2, 3)]
    for stage in stages:
        rows = np.ascontiguousarray(KV[:, stage.start : stage.stop]).reshape(BLOCKS, -1)
        session = store.session(MODEL, layout_slice=LAYOUT.slice(layers=stage))
        saved = session.save(TOKENS, rows)
    assert saved == BLOCKS
    one_head = LAYOUT.slice(layers=range(1, 3), heads=range(2, 3))
    found = np.zeros((BLOCKS, one_head.nbytes // 2), np.float16)
    assert store.session(MODEL, layout_slice=one_head).fetch(TOKENS, into=found).blocks == BLOCKS
    assert (found == KV[:, 1:3, :, 2].reshape(BLOCKS, -1)).all()


def test_state_that_ranks_replicate_is_written_once(store):
    model = fingerprint_for(LATENT)
    rows = np.random.default_rng(4).integers(0, 99, (BLOCKS, LATENT.raw_bytes), np.int8)
    wrong = np.zeros_like(rows)
    assert rank_session(store, 1, 2, model).save(TOKENS, wrong) == 0
    assert store.session(model).cover(TOKENS) == 0
    assert rank_session(store, 0, 2, model).save(TOKENS, rows) == BLOCKS
    for rank in range(2):
        _, found = fetch(rank_session(store, rank, 2, model), LATENT.raw_bytes)
        assert (found.view(np.int8) == rows).all()


def test_layers_of_unlike_kinds_and_head_counts_are_divided_layer_by_layer(store):
    layers = (HeadState(2, 6, 4), LatentState(10), HeadState(4, 3, 5))
    layout = PortableLayout("int8", 16, layers)
    model = fingerprint_for(layout)
    rng = np.random.default_rng(5)
    whole = rng.integers(0, 99, (BLOCKS, layout.raw_bytes), np.uint8)
    for rank in range(2):
        part = layout.rank(rank, 2)
        runs = [whole[:, run.offset : run.offset + run.nbytes] for run in part.runs()]
        saved = rank_session(store, rank, 2, model).save(TOKENS, np.concatenate(runs, axis=1))
    assert saved == BLOCKS
    _, found = fetch(store.session(model), layout.raw_bytes)
    assert (found == whole).all()


def test_a_slice_is_read_from_a_lower_tier_after_a_restart(tmp_path):
    """The whole record is read there, because its checksum covers it."""
    tiers = {"host": "16 MiB", "disk": "16 MiB", "path": str(tmp_path / "disk")}
    with holdfast.open(**tiers) as store:
        save_ranks(store, 2)
    with holdfast.open(**tiers) as store:
        assert store.recovery.wait(60.0)
        found = np.zeros_like(heads_of(3, 4))
        landed = rank_session(store, 3, 4).fetch(TOKENS, into=found)
    assert (landed.blocks, landed.sources) == (BLOCKS, {"disk": BLOCKS})
    assert (found == heads_of(3, 4)).all()


def interrupt(*_):
    raise KeyboardInterrupt


def test_a_save_that_is_interrupted_leaves_nothing_and_the_next_one_is_whole(store, monkeypatch):
    before = store.status().abandoned_blocks
    save_ranks(store, 2, [0])
    session = rank_session(store, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(SliceCopy, "write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.save(TOKENS, heads_of(1, 2))
    until = time.monotonic() + 60
    while store.status().abandoned_blocks < before + BLOCKS:
        assert time.monotonic() < until
        time.sleep(0.02)
    assert store.status().tickets == 0
    assert store.session(MODEL).cover(TOKENS) == 0
    assert save_ranks(store, 2) == [0, BLOCKS]


WRONG = {
    "head count": PortableLayout("float16", 16, (HeadState(8, 4, 4),) * 3),
    "layer count": PortableLayout("float16", 16, (HeadState(2, 8, 8),) * 6),
    "dtype": PortableLayout("bfloat16", 16, LAYOUT.layers),
    "order of sizes": PortableLayout("float16", 16, (HeadState(4, 4, 12),) * 3),
}


@pytest.mark.parametrize("layout", WRONG.values(), ids=WRONG)
def test_a_record_read_with_a_wrong_layout_is_a_miss(store, layout):
    save_ranks(store, 2)
    assert layout.raw_bytes == LAYOUT.raw_bytes
    wrong = fingerprint_for(layout)
    for session, row_bytes in (
        (store.session(wrong), layout.raw_bytes),
        (rank_session(store, 1, 2, wrong), layout.rank(1, 2).nbytes),
    ):
        assert session.cover(TOKENS) == 0
        landed, found = fetch(session, row_bytes)
        assert (landed.blocks, landed.outcome) == (0, Outcome.MISS)
        assert not found.any()


def test_rows_of_another_size_are_refused(store):
    """A rank that believes to be of another size has rows of another length."""
    session = rank_session(store, 0, 2)
    size = LAYOUT.rank(0, 2).nbytes
    with pytest.raises(BlockError, match=f"a block has {size // 2} bytes, the layout says {size}"):
        session.save(TOKENS, heads_of(0, 4))
    with pytest.raises(BlockError, match=f"a block has {2 * size} bytes, the layout says {size}"):
        session.fetch(TOKENS, into=np.zeros((BLOCKS, 2 * size), np.uint8))


def test_a_slice_of_another_layout_is_refused(store):
    other = fingerprint_for(WRONG["dtype"])
    with pytest.raises(BlockError, match="slice of another layout than the fingerprint's"):
        store.session(other, layout_slice=LAYOUT.rank(0, 2))
    with pytest.raises(BlockError, match=r"layout_slice is of type range; .*layout.rank\(0, 2\)"):
        store.session(MODEL, layout_slice=range(2))


HELLO = m.Hello(
    m.PROTOCOL,
    "test",
    MODEL.digest(),
    raw_bytes=LAYOUT.raw_bytes,
    block_tokens=16,
)


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("ffffffff01000000", "bytes 4294967295 to 4294967296 of a payload of 6144"),
        ("0000000001180000", "bytes 0 to 6145 of a payload of 6144"),
        ("00", "1 bytes are not up to"),
    ],
)
def test_a_node_refuses_a_part_outside_the_record(node, part, expected):
    with pytest.raises(RefusedError, match=expected):
        Client(node.address, msgspec.structs.replace(HELLO, part=bytes.fromhex(part)), 60.0)


KILLED_RANK = """
import os, sys
sys.path.insert(0, sys.argv[2])
from test_slices import HELLO, LAYOUT, MODEL, TOKENS, rank_session
import holdfast
from holdfast.blocks.envelope import HEADER_BYTES
from holdfast.client.session import ANSWER_S, RemoteSession
from holdfast.wire.local import messages as m
backend = RemoteSession(sys.argv[1], MODEL, "default", LAYOUT.rank(1, 2))
chain = holdfast.Session(backend).chain(TOKENS)
client = backend._connection.client(60.0)
reserve = m.Reserve(chain.packed(), chain.parent(0), 0, chain.segment(0))
reserved = client.call(reserve, m.Reserved, ANSWER_S)
assert min(reserved.places) >= 0
for place in reserved.places[:2]:  # some blocks, and of these only a part
    start = place + HEADER_BYTES
    client.arena.view[start : start + 2000] = bytes([255]) * 2000
print("writing", flush=True)
sys.stdin.read()
"""


def test_a_rank_killed_before_its_commit_leaves_nothing_and_the_next_save_is_whole(node):
    folder = __file__.rpartition("/")[0]
    argv = [sys.executable, "-c", KILLED_RANK, node.address, folder]
    with holdfast.open(node.address, domain="default") as store:
        assert save_ranks(store, 2, [0]) == [0]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
            assert rank.stdout.readline() == b"writing\n"
            assert save_ranks(store, 2, [1]) == [0]  # another process writes this part
            rank.send_signal(signal.SIGKILL)
        wait_until(node.process, lambda: store.status().tickets == 0, 60)
        assert store.session(MODEL).cover(TOKENS) == 0
        assert save_ranks(store, 2) == [0, BLOCKS]
        _, found = fetch(store.session(MODEL), LAYOUT.raw_bytes)
        assert (found.view(np.float16) == KV.reshape(BLOCKS, -1)).all()
