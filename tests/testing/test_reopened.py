"""The campaigns on the disk tier notice a recovery that loses what is whole."""

import random

import pytest

from holdfast.buffers import aligned_buffer
from holdfast.testing import reopened, torn
from holdfast.testing.campaign import Order
from holdfast.tiers.disk import file, tier
from holdfast.tiers.disk.recovery import recover_regions
from holdfast.tiers.disk.region import SECTOR, SUPERBLOCKS, parse_superblock


@pytest.fixture
def order(tmp_path):
    return Order(tries=200, seed=1, folder=tmp_path, target=None)


def _reopened(order):
    (tally,) = reopened.run(order)
    return tally


@pytest.mark.parametrize("campaign", [torn._whole_prefixes, _reopened])
@pytest.mark.parametrize("most", [0, 3])
def test_a_recovery_that_forgets_records_is_found_out(campaign, most, order, monkeypatch):
    def forgetful(*said):
        for found in recover_regions(*said):
            yield found._replace(records=found.records[:most])

    assert campaign(order).failures == []
    monkeypatch.setattr(tier, "recover_regions", forgetful)
    assert any("whole records are lost" in words for words in campaign(order).failures)


def test_a_file_that_is_refused_for_one_bad_superblock_is_found_out(order, monkeypatch):
    def strict(extents):
        found = []
        for which in range(SUPERBLOCKS):
            block = aligned_buffer(SECTOR)
            extents.read(which * SECTOR, [block])
            found.append(parse_superblock(block))
        return max(found, key=lambda superblock: superblock.incarnation)

    monkeypatch.setattr(file, "read_superblock", strict)
    assert any("the file is refused" in words for words in _reopened(order).failures)


@pytest.mark.parametrize("kind", reopened.STRIKES)
@pytest.mark.parametrize("name", reopened.CLASSES)
def test_every_fault_changes_a_byte(kind, name):
    for seed in range(10):
        dice = random.Random(seed)
        image = bytearray(reopened._lives()[0][0].medium.image)
        assert 1 <= reopened._damage(image, name, reopened.STRIKES[kind], dice) <= 3
        assert image != reopened._lives()[0][0].medium.image


def test_only_strikes_that_changed_a_byte_are_counted(order, monkeypatch):
    changed = []

    def sometimes(image, start, end, dice):
        if dice.random() < 0.5:
            image[start] ^= dice.randrange(1, 256)
            changed.append(start)

    monkeypatch.setattr(reopened, "STRIKES", {"sometimes": sometimes})
    assert _reopened(order).tried <= len(changed)
