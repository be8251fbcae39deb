"""The Python API over existing stores: blocks saved by one store are fetched by another."""

import json
import time

import numpy as np
import pytest

import holdfast
from holdfast.errors import Outcome
from holdfast.testing.embedded import fingerprint_for
from holdfast_bench.peers.mooncake_server import MooncakeServers
from holdfast_bench.peers.valkey_server import ValkeyServers

TOKENS = list(range(12 * 32))
LAYOUT = holdfast.Layout.portable(
    layers=2, kv_heads=2, head_size=16, dtype="float16", block_tokens=32
)
FINGERPRINT = fingerprint_for(LAYOUT)


@pytest.fixture(params=["files", "mooncake", "valkey"])
def tier(request, tmp_path):
    """The section of a shared tier in a configuration, with real servers for the test."""
    if request.param == "files":
        yield {"kind": "files", "path": str(tmp_path / "shared"), "capacity": "1 GiB"}
        return
    request.getfixturevalue(f"_{request.param}")
    if request.param == "mooncake":
        servers = MooncakeServers(tmp_path, 128 << 20)
        address = {"master": servers.address}
    else:
        servers = ValkeyServers(tmp_path)
        address = {"address": servers.addresses[0]}
    servers.start()
    yield {"kind": request.param, **address, "deadline_s": 20.0, "ask_s": 20.0}
    servers.close()


@pytest.fixture
def config(tier, tmp_path):
    """Return a function that writes the configuration file of a host with the tier."""
    key = tmp_path / "domain.key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)

    def write(name):
        file = tmp_path / f"{name}.yaml"
        tiers = [{"kind": "host", "capacity": "32 MiB"}, tier]
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


def test_blocks_of_one_store_are_covered_fetched_and_pinned_by_others(config, tier):
    blocks = np.random.default_rng(1).integers(0, 9_999, (12, LAYOUT.raw_bytes // 2))
    blocks = blocks.astype(np.float16)
    with holdfast.open(config("a")) as store:
        assert store.session(FINGERPRINT).save(TOKENS, blocks) == 12
        until(lambda: store.status().waiting_to_write == 0)
    with holdfast.open(config("b")) as store:
        session, found = store.session(FINGERPRINT), np.zeros_like(blocks)
        until(lambda: session.cover(TOKENS) == len(TOKENS))  # Mooncake's client may have to start
        landed = session.fetch(TOKENS, into=found, deadline_s=60.0)
        assert (landed.outcome, landed.sources) == (Outcome.OK, {tier["kind"]: 12})
        assert (found == blocks).all()
    with holdfast.open(config("c")) as store:
        session = store.session(FINGERPRINT)
        until(lambda: session.pin(TOKENS, ttl_s=60.0) == len(TOKENS))
        until(lambda: session.prestage(TOKENS) == len(TOKENS))
        assert session.fetch(TOKENS, into=np.zeros_like(blocks)).sources == {"host": 12}
