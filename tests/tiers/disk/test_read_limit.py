"""Reads of a disk tier keep the rate limit, and a close does not wait for it."""

import contextlib
import math
import threading

from holdfast.buffers import aligned_buffer
from holdfast.errors import Outcome
from holdfast.testing.extents import MemoryExtents
from holdfast.testing.tier_contract import Blocks
from holdfast.tiers.base import TierGet
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.read_limit import ReadLimit
from holdfast.tiers.disk.region import SECTOR
from holdfast.tiers.disk.tier import DiskTier

MIB = 1 << 20
BLOCKS = Blocks(5 * SECTOR - 144)


class Clock:
    def __init__(self):
        self.at, self.slept = 100.0, []

    def now(self):
        return self.at

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.at += seconds


def read(limit, nbytes):
    with limit.paced(nbytes):
        pass


def test_reads_wait_for_the_rate_limit_and_idle_time_gives_no_credit():
    clock = Clock()
    limit = ReadLimit(MIB, clock.now, clock.sleep)
    read(limit, MIB)
    read(limit, MIB // 2)
    clock.at += 10.0
    read(limit, MIB // 4)
    assert clock.slept == [1.0, 0.5, 0.25]


def test_threads_share_the_rate_limit():
    clock, done = Clock(), []
    limit = ReadLimit(MIB, clock.now, done.append)
    threads = [threading.Thread(target=read, args=(limit, MIB)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == [1.0, 2.0, 3.0]


def test_without_a_limit_no_read_waits():
    clock = Clock()
    limit = ReadLimit(math.inf, clock.now, clock.sleep)
    read(limit, MIB)
    read(limit, MIB)
    assert clock.slept == []


def test_a_close_does_not_wait_for_a_read_that_keeps_the_limit(monkeypatch):
    closed = []

    def close_meanwhile(_seconds):
        closing = threading.Thread(target=tier.close, daemon=True)
        closing.start()
        closing.join(30)
        closed.append(not closing.is_alive())

    medium = MemoryExtents.formatted(32 * SECTOR, 4)
    config = DiskConfig(path="memory", capacity_bytes=medium.size, read_bytes_per_s=1.0)
    with contextlib.closing(DiskTier(config, open_extents=lambda _: medium)) as tier:
        places = BLOCKS.save(tier, range(2))
        monkeypatch.setattr(tier._read_limit, "_sleep", close_meanwhile)
        BLOCKS.load(tier, range(2), places)
    assert closed == [True]


def test_a_read_counts_the_bytes_on_the_medium_and_not_those_of_its_buffer(monkeypatch):
    medium, waits = MemoryExtents.formatted(32 * SECTOR, 4), []
    config = DiskConfig(path="memory", capacity_bytes=medium.size, read_bytes_per_s=SECTOR)
    with contextlib.closing(DiskTier(config, open_extents=lambda _: medium)) as tier:
        places = BLOCKS.save(tier, range(2))
        monkeypatch.setattr(tier._read_limit, "_sleep", waits.append)
        gets = [
            TierGet(place, BLOCKS.key(i), aligned_buffer(20 * SECTOR), BLOCKS.namespace)
            for i, place in enumerate(places)
        ]
        assert tier.read(gets) == [Outcome.OK, Outcome.OK]
    assert [math.ceil(seconds) for seconds in waits] == [10]
