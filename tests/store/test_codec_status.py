"""What a store says of its codecs: raw and stored bytes by tier and domain, choice and counters."""

import time

import numpy as np
import pytest

import holdfast
from holdfast.metrics import node_samples
from holdfast.testing.embedded import BLOCKS, FINGERPRINT, blocks_for, serves, tokens_for

MIB = 1 << 20
CONTEXTS = 4


@pytest.fixture
def opened(tmp_path):
    file = tmp_path / "host.yaml"
    file.write_text(
        f"""tiers:
  - {{kind: host, capacity: 32 MiB}}
  - {{kind: disk, path: {tmp_path / "blocks"}, capacity: 64 MiB, codec: planes}}
"""
    )

    def open_store():
        return holdfast.open(str(file))

    return open_store


def written(store):
    """The status once nothing waits to be written."""
    until = time.monotonic() + 60
    while (status := store.status()).waiting_to_write:
        assert time.monotonic() < until, "the disk does not take the blocks"
        time.sleep(0.005)
    return status


def sizes(status):
    """Stored and raw bytes of the default domain on the disk."""
    [domain] = [each for each in status.domains if each.domain == "default"]
    return domain.used_bytes["disk"], domain.raw_bytes["disk"]


def test_blocks_of_half_precision_take_fewer_bytes_on_a_disk_that_encodes(opened):
    with opened() as store:
        session = store.session(FINGERPRINT)
        for seed in range(CONTEXTS):
            serves(session, seed)
        status = written(store)
        used, raw = sizes(status)
        [codec] = status.codecs
        assert 0 < used < raw
        assert (codec.tier, codec.mode, codec.encodes) == ("disk", "planes", True)
        assert (codec.held_bytes, codec.held_raw_bytes) == (used, raw)
        assert codec.encoded == CONTEXTS * BLOCKS
        assert (codec.kept_raw, codec.mismatches, codec.undecodable) == (0, 0, 0)
        [host] = [d.used_bytes["host"] for d in status.domains if d.domain == "default"]
        assert host == raw
        values = {(each.name, *each.labels): each.value for each in node_samples(status)}
        assert values["tier_raw_bytes", "disk"] == values["domain_raw_bytes", "default", "disk"]


def test_a_new_disk_without_any_setting_stores_raw_records(tmp_path):
    with holdfast.open(host=32 * MIB, disk=64 * MIB, path=str(tmp_path / "store")) as store:
        serves(store.session(FINGERPRINT), 1)
        used, raw = sizes(written(store))
        [codec] = store.status().codecs
    assert used == raw
    assert (codec.mode, codec.encodes, codec.encoded) == ("auto", False, 0)


def test_raw_and_stored_bytes_survive_a_restart_and_end_with_the_blocks(opened):
    with opened() as store:
        session = store.session(FINGERPRINT)
        for seed in range(CONTEXTS):
            serves(session, seed)
        before = sizes(written(store))
    with opened() as store:
        store.recovery.wait()
        assert sizes(store.status()) == before
        found = np.zeros_like(blocks_for(0))
        landed = store.session(FINGERPRINT).fetch(tokens_for(0), into=found)
        assert (landed.blocks, landed.sources) == (BLOCKS, {"disk": BLOCKS})
        assert (found == blocks_for(0)).all()
        assert store.status().codecs[0].decoded == BLOCKS
        store.drop("*")
        assert sizes(store.status()) == (0, 0)
