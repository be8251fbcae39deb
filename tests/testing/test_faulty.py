"""The faulty tier: every fault strikes, is counted, replays, and is noticed by who verifies."""

import pytest

from holdfast.errors import Outcome
from holdfast.testing.faulty import EVERY_FAULT, FaultyTier, InjectedFault
from holdfast.testing.tier_contract import Blocks, TierContract
from holdfast.tiers.base import TierGet, TierPut
from holdfast.tiers.cxl.kind import CxlOptions
from holdfast.tiers.cxl.tier import CxlTier

BLOCKS = Blocks(20_000)
SILENT = {
    InjectedFault.SHORT_READ, InjectedFault.FLIP_READ, InjectedFault.ZEROED_SECTOR_READ,
    InjectedFault.STALE_READ, InjectedFault.MISDIRECTED_READ, InjectedFault.FLIP_WRITE,
    InjectedFault.TRUNCATED_WRITE, InjectedFault.MISDIRECTED_WRITE,
}  # fmt: skip


class TestWithoutFaults(TierContract):
    """With an empty plan it is the tier it wraps."""

    def make_tier(self, folder, capacity_bytes):
        return FaultyTier(CxlTier(CxlOptions(capacity=capacity_bytes)), 0, {})


def run(seed, plan, turns=60):
    """Outcomes of writing and reading blocks, CORRUPT where an OK does not verify."""
    tier = FaultyTier(CxlTier(CxlOptions(capacity=16 << 20)), seed, plan, delay_s=0)
    written, read = [], []
    for number in range(turns):
        [place] = BLOCKS.reserve(tier).places
        [outcome] = tier.write([TierPut(place, BLOCKS.record(number))])
        written.append(outcome)
        if outcome is Outcome.OK:
            read += BLOCKS.load(tier, [number], [place])
    tier.close()
    return tier, written, read


@pytest.mark.parametrize("fault", sorted(SILENT))
def test_silently_damaged_records_never_verify(fault):
    tier, written, read = run(1, {fault: 0.5})
    assert tier.injected[fault] > 10
    assert set(written) == {Outcome.OK}
    assert read.count(Outcome.CORRUPT) > 5
    assert read.count(Outcome.OK) > 5


@pytest.mark.parametrize(
    ("fault", "expected"),
    [(InjectedFault.GONE_WRITE, Outcome.GONE), (InjectedFault.FULL_WRITE, Outcome.FULL)],
)
def test_a_failed_write_is_reported_and_frees_its_place(fault, expected):
    tier, written, read = run(1, {fault: 0.5})
    assert written.count(expected) == tier.injected[fault] > 10
    assert set(read) == {Outcome.OK}
    assert tier.usage().records == len(read)


def test_a_failed_read_is_reported():
    tier, _, read = run(1, {InjectedFault.GONE_READ: 0.5})
    assert read.count(Outcome.GONE) == tier.injected[InjectedFault.GONE_READ] > 10


@pytest.mark.parametrize("fault", [InjectedFault.DELAY_READ, InjectedFault.DELAY_WRITE])
def test_a_delay_changes_nothing_else(fault):
    tier, _, read = run(1, {fault: 0.5})
    assert set(read) == {Outcome.OK}
    assert tier.injected[fault] > 10


def test_the_same_seed_gives_the_same_faults():
    plan = dict.fromkeys(EVERY_FAULT, 0.05)
    one, other, third = run(7, plan), run(7, plan), run(8, plan)
    assert one[1:] == other[1:]
    assert one[0].injected == other[0].injected
    assert one[0].injected != third[0].injected
    assert len(one[0].injected) > 8


def test_the_callers_record_is_not_damaged():
    tier = FaultyTier(CxlTier(CxlOptions(capacity=16 << 20)), 3, {InjectedFault.FLIP_WRITE: 1.0})
    record = BLOCKS.record(0)
    before = bytes(record[16:])
    [place] = BLOCKS.reserve(tier).places
    assert tier.write([TierPut(place, record)]) == [Outcome.OK]
    assert bytes(record[16:]) == before
    tier.close()


def test_a_stale_read_is_another_whole_record():
    tier = FaultyTier(CxlTier(CxlOptions(capacity=16 << 20)), 3, {})
    places = BLOCKS.save(tier, range(4))
    BLOCKS.load(tier, range(4), places)
    tier._plan = {InjectedFault.STALE_READ: 1.0}
    into = BLOCKS.record(9)
    assert tier.read([TierGet(places[0], BLOCKS.key(0), into, BLOCKS.namespace)]) == [Outcome.OK]
    assert bytes(into[32:48]) in {BLOCKS.key(n) for n in range(4)}
    tier.close()
