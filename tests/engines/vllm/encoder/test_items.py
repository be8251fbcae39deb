"""An encoder output is found whole or not at all, whatever its length."""

import hashlib
import struct

import numpy as np
import pytest

pytest.importorskip("vllm")

import holdfast
from holdfast import Outcome
from holdfast.blocks.fingerprint import Fingerprint, KvGroup, Meaning
from holdfast.blocks.layout import OpaqueLayout
from holdfast.engines.vllm.encoder.items import (
    BLOCK_BYTES,
    EncoderItem,
    load_item,
    save_item,
)
from holdfast.named_blocks import memory_of

NAME = hashlib.sha256(b"an image").digest()


@pytest.fixture
def session():
    meaning = Meaning(
        model="m", positions="none", adapter="none", kv_quantisation="none", kv_scales="none",
        naming="engine content", block_tokens=1, kv_group=KvGroup.all_layers(1),
    )  # fmt: skip
    layout = OpaqueLayout(
        dtype="float32", block_tokens=1, layers=1, nbytes=BLOCK_BYTES, arrangement="a",
        engine="engine", engine_version="1",
    )  # fmt: skip
    with holdfast.open(host="32 MiB") as store:
        session = store.named_session(Fingerprint(meaning, layout))
        yield session
        session.close()


def item(rows, width=64, dtype="float32", seed=0):
    size = {"float32": 4, "bfloat16": 2}[dtype]
    data = np.random.default_rng(seed).bytes(rows * width * size)
    return EncoderItem(rows, width, dtype, data)


@pytest.mark.parametrize("rows", [1, 1023, 1024, 4096])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_item_comes_back_as_it_was(session, rows, dtype):
    saved = item(rows, dtype=dtype)
    assert save_item(session, NAME, saved) is Outcome.OK
    assert load_item(session, NAME, 60.0) == saved


def test_an_item_that_was_not_saved_is_not_found(session):
    save_item(session, NAME, item(3))
    assert load_item(session, hashlib.sha256(b"another").digest(), 60.0) is None


def test_an_item_of_which_a_block_is_missing_is_not_found(session):
    save_item(session, NAME, item(4096))
    first = np.empty(BLOCK_BYTES, np.uint8)
    assert session.get([NAME + bytes(4)], [memory_of(first)]) == [Outcome.OK]
    alone = hashlib.sha256(b"alone").digest()
    assert session.put([alone + bytes(4)], [memory_of(first)]) == [Outcome.OK]
    assert load_item(session, alone, 60.0) is None


@pytest.mark.parametrize(
    "header",
    [
        pytest.param(b"\0" * 64, id="of zeros"),
        pytest.param(("hf-enc-1", 8, 1, 1, "float32"), id="whose length is another"),
        pytest.param(("hf-enc-1", 1 << 60, 1 << 30, 1 << 28, "float32"), id="of a terabyte"),
        pytest.param(("hf-enc-1", 4, 1, 1, "object"), id="of another type"),
        pytest.param(("hf-enc-9", 4, 1, 1, "float32"), id="of another version"),
    ],
)
def test_an_item_with_a_wrong_header_is_not_found(session, header):
    block = np.zeros(BLOCK_BYTES, np.uint8)
    if not isinstance(header, bytes):
        magic, nbytes, rows, width, dtype = header
        header = struct.pack(
            "<8sQII16s24x", magic.encode(), nbytes, rows & 0xFFFFFFFF, width, dtype.encode()
        )
    block[: len(header)] = np.frombuffer(header, np.uint8)
    session.put([NAME + bytes(4)], [memory_of(block)])
    assert load_item(session, NAME, 60.0) is None
