"""The Python API over a bucket: what one store saves, another with empty tiers fetches."""

import json
import time

import numpy as np
import obstore
import pytest

import holdfast
from holdfast.blocks.envelope import HEADER_BYTES
from holdfast.errors import Outcome
from holdfast.testing.embedded import fingerprint_for
from holdfast.tiers.segments.format import read_head

TOKENS = list(range(12 * 32))
LAYOUT = holdfast.Layout.portable(
    layers=2, kv_heads=2, head_size=16, dtype="float16", block_tokens=32
)
FINGERPRINT = fingerprint_for(LAYOUT)


@pytest.fixture
def config(side, tmp_path):
    """Return a function that writes the configuration file of a host with the tier."""
    key = tmp_path / "domain.key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)

    def write(name):
        file = tmp_path / f"{name}.yaml"
        bucket = {"kind": "object", "url": side.options().url, "endpoint": side.endpoint}
        bucket |= {"credentials_file": str(side.credentials), "ask_s": 20.0, "deadline_s": 20.0}
        bucket["gather_s"] = 0
        disk = {"kind": "disk", "path": str(tmp_path / f"{name}-disk"), "capacity": "64 MiB"}
        tiers = [{"kind": "host", "capacity": "32 MiB"}, disk, bucket]
        domains = {"default": {"key_file": str(key)}}
        listen = f"unix://{tmp_path}/{name}.sock"
        file.write_text(json.dumps({"listen": listen, "tiers": tiers, "domains": domains}))
        return str(file)

    return write


def until(condition):
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_a_store_with_empty_tiers_fetches_from_the_bucket(config, side):
    blocks = np.random.default_rng(1).integers(0, 9_999, (12, LAYOUT.raw_bytes // 2))
    blocks = blocks.astype(np.float16)
    with holdfast.open(config("a")) as store:
        assert store.session(FINGERPRINT).save(TOKENS, blocks) == 12
        until(lambda: store.status().waiting_to_write == 0)
    assert any(not name.startswith("index/") for name in side.names())
    with holdfast.open(config("b")) as store:
        session, found = store.session(FINGERPRINT), np.zeros_like(blocks)
        until(lambda: session.cover(TOKENS) == len(TOKENS))
        landed = session.fetch(TOKENS, into=found, deadline_s=60.0)
        assert (landed.outcome, list(landed.sources.values())) == (Outcome.OK, [12])
        assert next(iter(landed.sources)).startswith("object")
        assert (found == blocks).all()


def test_a_flipped_byte_in_the_bucket_costs_its_block_and_the_next_ones(config, side):
    blocks = np.arange(12 * (LAYOUT.raw_bytes // 2)).reshape(12, -1).astype(np.float16)
    with holdfast.open(config("a")) as store:
        assert store.session(FINGERPRINT).save(TOKENS, blocks) == 12
        until(lambda: store.status().waiting_to_write == 0)
    for name in side.names("7d/"):
        path = f"{side.prefix}/{name}"
        data = bytearray(bytes(obstore.get(side.store(), path).bytes()))
        _, records = read_head(bytes(data))
        data[records[len(records) // 2].start + HEADER_BYTES + 9] ^= 1
        obstore.put(side.store(), path, bytes(data), use_multipart=False)
    with holdfast.open(config("b")) as store:
        session, found = store.session(FINGERPRINT), np.zeros_like(blocks)
        until(lambda: session.cover(TOKENS) == len(TOKENS))
        landed = session.fetch(TOKENS, into=found, deadline_s=60.0)
        assert landed.outcome is not Outcome.OK
        assert landed.blocks < 12
        assert (found[: landed.blocks] == blocks[: landed.blocks]).all()
