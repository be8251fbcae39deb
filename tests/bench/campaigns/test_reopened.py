"""The campaigns on the disk tier notice a recovery that loses what is whole."""

import random

import pytest

from holdfast.buffers import aligned_buffer
from holdfast.tiers.disk import file, tier
from holdfast.tiers.disk.recovery import recover_regions
from holdfast.tiers.disk.region import SECTOR, SUPERBLOCKS, parse_superblock
from holdfast_bench.campaigns import reopened, torn
from holdfast_bench.campaigns.campaign import CampaignBudget


@pytest.fixture
def budget(tmp_path):
    return CampaignBudget(tries=200, seed=1, folder=tmp_path)


def _reopened(budget):
    (result,) = reopened.run(budget)
    return result


@pytest.mark.parametrize("campaign", [torn._whole_prefixes, _reopened])
@pytest.mark.parametrize("most", [0, 3])
def test_the_campaign_detects_a_recovery_that_loses_records(campaign, most, budget, monkeypatch):
    def forgetful(*said):
        for found in recover_regions(*said):
            yield found._replace(records=found.records[:most])

    assert campaign(budget).failures == []
    monkeypatch.setattr(tier, "recover_regions", forgetful)
    assert any("whole records are lost" in words for words in campaign(budget).failures)


def test_the_campaign_detects_a_file_refused_for_one_bad_superblock(budget, monkeypatch):
    def strict(extents):
        found = []
        for which in range(SUPERBLOCKS):
            block = aligned_buffer(SECTOR)
            extents.read(which * SECTOR, [block])
            found.append(parse_superblock(block))
        return max(found, key=lambda superblock: superblock.incarnation)

    monkeypatch.setattr(file, "read_superblock", strict)
    assert any("the file is refused" in words for words in _reopened(budget).failures)


@pytest.mark.parametrize("kind", reopened.STRIKES)
@pytest.mark.parametrize("name", reopened.CLASSES)
def test_every_fault_changes_a_byte(kind, name):
    for seed in range(10):
        rng = random.Random(seed)
        image = bytearray(reopened._lives()[0][0].medium.image)
        assert 1 <= reopened._damage(image, name, reopened.STRIKES[kind], rng) <= 3
        assert image != reopened._lives()[0][0].medium.image


def test_only_strikes_that_changed_a_byte_are_counted(budget, monkeypatch):
    changed = []

    def sometimes(image, start, end, rng):
        if rng.random() < 0.5:
            image[start] ^= rng.randrange(1, 256)
            changed.append(start)

    monkeypatch.setattr(reopened, "STRIKES", {"sometimes": sometimes})
    assert 0 < _reopened(budget).tried <= len(changed)
