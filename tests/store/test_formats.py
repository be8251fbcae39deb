"""Records of an earlier or later format, after an upgrade and a downgrade: misses, never errors."""

import logging

import pytest

from holdfast.blocks import envelope
from holdfast.errors import Outcome
from holdfast.testing.extents import MemoryExtents, tier_on
from holdfast.testing.memory import SharedMemoryTier
from holdfast.tiers.disk.region import SECTOR

MIB = 1 << 20
REGION_BYTES = 17 * SECTOR
"""Three of the harness's records of five sectors fit."""


@pytest.fixture
def build(monkeypatch):
    """Call with a format: from then on this process writes and reads it, as another build does."""

    def of(number):
        monkeypatch.setattr(envelope, "FORMAT", number)

    return of


@pytest.mark.parametrize("ends", ["closed", "killed"])
@pytest.mark.parametrize("other", [1, 3])
def test_a_disk_with_blocks_of_another_format_serves_misses_and_takes_new_blocks(
    harness, build, caplog, other, ends
):
    caplog.set_level(logging.WARNING)
    medium = MemoryExtents.formatted(REGION_BYTES, 8)
    build(other)
    one = harness(MIB, tier_on(medium))
    chain = one.chain(1, 10)
    one.save(chain)
    one.flush()
    left = MemoryExtents(medium.image)
    if ends == "closed":
        one.store.close()
        left = medium
    build(2)
    again = harness(MIB, tier_on(left))
    again.store.recovery.wait()
    assert again.store.status().recovered_blocks == 0
    assert again.read(chain) == 0
    assert again.save(chain) == 10
    again.leave_memory()
    assert again.read(chain) == 10
    assert not caplog.records


def test_a_downgrade_finds_its_own_blocks_beside_those_of_the_later_build(harness, build):
    medium = MemoryExtents.formatted(REGION_BYTES, 16)
    one = harness(MIB, tier_on(medium))
    old, new = one.chain(1, 5), one.chain(2, 5)
    one.save(old)
    one.flush()
    build(3)
    later = harness(MIB, tier_on(crashed := MemoryExtents(medium.image)))
    later.store.recovery.wait()
    assert later.read(old) == 0
    later.save(new)
    later.flush()
    build(2)
    again = harness(MIB, tier_on(MemoryExtents(crashed.image)))
    again.store.recovery.wait()
    assert again.read(old) == 5
    assert again.read(new) == 0
    assert again.save(new) == 5


@pytest.mark.parametrize("other", [1, 3])
def test_a_shared_tier_keeps_records_of_another_format(harness, build, other):
    records = {}
    build(other)
    one = harness(MIB, SharedMemoryTier(records))
    chain = one.chain(1, 4)
    one.save(chain)
    one.flush()
    kept = dict(records)
    assert len(kept) == 4
    build(2)
    two = harness(MIB, SharedMemoryTier(records))
    assert two.store.look(two.namespace, chain.keys, 60.0).blocks == 4
    fetched = two.store.fetch(two.namespace, chain.keys, 60.0)
    assert (len(fetched.places), fetched.outcome) == (0, Outcome.UNREADABLE)
    assert records == kept
    assert two.save(chain) == 4
    assert two.read(chain) == 4
    build(other)
    one.leave_memory()
    assert one.read(chain) == 4
