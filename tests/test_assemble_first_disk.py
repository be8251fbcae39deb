"""Another configuration neither hides nor destroys what a node has on its disks."""

import os
import shutil

import pytest

from holdfast import Retention
from holdfast.assemble import open_store
from holdfast.config import parse
from holdfast.errors import ConfigError
from holdfast.testing.embedded import BLOCKS, FINGERPRINT, LAYOUT, blocks_for, tokens_for

MIB = 1 << 20
TOKENS = BLOCKS * LAYOUT.block_tokens


@pytest.fixture
def config(tmp_path):
    """Return a configuration with these disks; `acme` has a key of its own."""
    key = tmp_path / "acme.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(32))

    def configure(*folders, **acme):
        tiers = [{"kind": "host", "capacity": 16 * MIB}]
        for folder in folders:
            path = str(tmp_path / folder)
            tiers.append({"kind": "disk", "path": path, "capacity": 16 * MIB})
        domains = {"acme": {"key_file": str(key), **acme}}
        return parse({"listen": f"{tmp_path}/node.sock", "tiers": tiers, "domains": domains})

    return configure


def save(config, *domains, seed=1):
    with open_store(config) as store:
        for domain in domains:
            session = store.session(FINGERPRINT, domain)
            session.save(tokens_for(seed), blocks_for(seed), Retention.DURABLE)
            assert session.sync(tokens_for(seed)) == TOKENS


def found(config, domain="acme", seed=1):
    """Open a store; return the tokens that it holds, its records, and those it cannot open."""
    with open_store(config) as store:
        assert store.recovery.wait(60)
        disk = store.status().tiers[-1]
        held = store.session(FINGERPRINT, domain).cover(tokens_for(seed))
        return held, disk.records, disk.unlisted_records


@pytest.mark.parametrize("domain", ["acme", "default"])
@pytest.mark.parametrize("folders", [("fast", "old"), ("new", "fast", "old")])
def test_another_first_disk_is_refused_with_both_files_and_the_remedy(
    config, tmp_path, domain, folders
):
    save(config("old"), domain)
    with pytest.raises(ConfigError) as refused:
        open_store(config(*folders))
    words = str(refused.value)
    for name in ("default.key", "keyring.json", "durable.log"):
        move = f'mv "{tmp_path / "old" / name}" "{tmp_path / folders[0] / name}"'
        assert move in words
    assert "former order" in words
    assert not (tmp_path / folders[0]).exists(), "nothing is made for it"
    assert found(config("old"), domain)[0] == TOKENS


def test_the_files_moved_as_the_error_says_keep_what_was_saved(config, tmp_path):
    save(config("old"), "acme", "default")
    (tmp_path / "fast").mkdir()
    for name in ("default.key", "keyring.json", "durable.log"):
        shutil.move(tmp_path / "old" / name, tmp_path / "fast" / name)
    for domain in ("acme", "default"):
        assert found(config("fast", "old"), domain)[0] == TOKENS


def test_two_disks_that_are_swapped_are_refused_and_keep_their_blocks(config):
    save(config("a", "b"), "acme")
    with pytest.raises(ConfigError, match=r"former order"):
        open_store(config("b", "a"))
    assert found(config("a", "b"))[0] == TOKENS


def test_a_file_that_both_disks_have_is_not_missed(config, tmp_path):
    save(config("a", "b"), "acme", "default")
    shutil.copy(tmp_path / "a" / "default.key", tmp_path / "b" / "default.key")
    shutil.copy(tmp_path / "a" / "keyring.json", tmp_path / "b" / "keyring.json")
    assert found(config("b", "a"))[0] == TOKENS


def test_sealed_blocks_outlast_a_start_without_sealing(config):
    save(config("disk"), "acme")
    assert found(config("disk", seal=False)) == (0, BLOCKS, BLOCKS)
    assert found(config("disk")) == (TOKENS, BLOCKS, 0)


def test_sealed_blocks_outlast_a_start_without_the_key_ring(config, tmp_path):
    save(config("disk"), "acme")
    ring = tmp_path / "disk" / "keyring.json"
    shutil.move(ring, tmp_path / "kept")
    assert found(config("disk")) == (0, BLOCKS, BLOCKS)
    save(config("disk"), "acme", seed=2)
    shutil.move(tmp_path / "kept", ring)
    assert found(config("disk")) == (TOKENS, 2 * BLOCKS, BLOCKS)


def test_a_block_saved_again_under_another_ring_is_found_under_either(config, tmp_path):
    save(config("disk"), "acme")
    ring, other = tmp_path / "disk" / "keyring.json", tmp_path / "other"
    shutil.move(ring, tmp_path / "kept")
    save(config("disk"), "acme")
    shutil.move(ring, other)
    for each in (tmp_path / "kept", other):
        shutil.copy(each, ring)
        ring.chmod(0o600)
        assert found(config("disk")) == (TOKENS, 2 * BLOCKS, BLOCKS)


def test_what_is_dropped_while_it_cannot_be_opened_does_not_come_back(config):
    save(config("disk"), "acme")
    with open_store(config("disk", seal=False)) as store:
        assert store.recovery.wait(60)
        store.drop("*")
        assert store.status().tiers[-1].unlisted_records == 0
    assert found(config("disk")) == (0, 0, 0)


@pytest.mark.parametrize("how", ["erase", "retire"])
def test_records_whose_key_was_destroyed_are_freed_at_the_next_start(config, tmp_path, how):
    save(config("disk"), "acme")
    image = tmp_path / "blocks"
    shutil.copy(tmp_path / "disk" / "blocks.holdfast", image)
    with open_store(config("disk")) as store:
        if how == "erase":
            store.erase("acme")
        else:
            store.rotate("acme")
            store.retire("acme", allow_loss=True)
    shutil.copy(image, tmp_path / "disk" / "blocks.holdfast")
    assert found(config("disk")) == (0, 0, 0)


def test_new_blocks_take_the_space_of_records_that_cannot_be_opened(config):
    save(config("disk"), "acme")
    with open_store(config("disk", seal=False)) as store:
        assert store.recovery.wait(60)
        session = store.session(FINGERPRINT, "acme")
        number, seed = 64, 2
        while store.status().tiers[-1].unlisted_records:
            session.save(tokens_for(seed, number), blocks_for(seed, number))
            session.sync(tokens_for(seed, number))
            seed += 1
            assert seed < 1_000, "the disk has evicted no region"
        assert session.cover(tokens_for(seed - 1, number)) == number * LAYOUT.block_tokens
