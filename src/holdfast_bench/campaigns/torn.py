"""Torn campaign: power cuts that leave any subset of the sectors written since the last flush.

A power cut keeps all flushed writes and any subset of the sectors written after: later ones without
earlier ones, half a record, half a footer. For short runs of writes every subset is tested, for
whole logs random subsets of 512-byte sectors. A killed process leaves all of its writes: then no
record may be missing. The writes determine which records are whole, not the recovery code.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from holdfast.errors import FormatError
from holdfast.testing.extents import ExtentWrite, crash_image
from holdfast.tiers.disk.region import SECTOR
from holdfast_bench.campaigns.campaign import CampaignBudget, CampaignResult
from holdfast_bench.campaigns.workload import DiskLife, WrittenRecord, check, live, whole

SUBSET_SECTORS = 8
"""Most sectors in a run of writes whose subsets are enumerated: 256 states."""

STATES_A_LIFE = 400
LIVES = 512


def run(budget: CampaignBudget) -> Iterator[CampaignResult]:
    """Enumerate subsets of short runs; cut whole logs at random; stop without a power cut."""
    yield _every_subset(budget.share(2))
    yield _random_sectors(budget.share(2.5))
    yield _whole_prefixes(budget.share(10))


def _every_subset(budget: CampaignBudget) -> CampaignResult:
    """Check every subset of the sectors of random runs of writes."""
    result = CampaignResult("torn.every", "states")
    for number, rng in enumerate(budget.rounds(result)):
        life, runs = _life(rng.randrange(LIVES))
        end, writes = rng.choice(runs)
        before = bytearray(life.start)
        for offset, data in life.medium.log[: end - len(writes)]:
            before[offset : offset + len(data)] = data
        sectors = [
            ExtentWrite(offset + at, data[at : at + SECTOR])
            for offset, data in writes
            for at in range(0, len(data), SECTOR)
        ]
        for subset, image in enumerate(_subsets(before, sectors)):
            _check(result, image, life, f"round {number}, writes to {end}, subset {subset:b}", {})
        result.counts["runs of writes"] += 1
    _expect_records(result, budget)
    return result


@lru_cache(maxsize=16)
def _life(seed: int) -> tuple[DiskLife, list[tuple[int, Sequence[ExtentWrite]]]]:
    """Return a life and the runs of unflushed writes in its log."""
    life = live(seed)
    return life, list(_unflushed_runs(life.medium.log))


def _unflushed_runs(log: Sequence[ExtentWrite]) -> Iterator[tuple[int, Sequence[ExtentWrite]]]:
    """Yield for each write the longest unflushed run that ends with it, and the run's end.

    A run has at most `SUBSET_SECTORS` sectors; a write without data is a flush.
    """
    for end in range(1, len(log) + 1):
        start, sectors = end, 0
        while start and log[start - 1].data:
            sectors += len(log[start - 1].data) // SECTOR
            if sectors > SUBSET_SECTORS:
                break
            start -= 1
        if start < end:
            yield end, log[start:end]


def _subsets(before: bytearray, sectors: Sequence[ExtentWrite]) -> Iterator[bytearray]:
    """Yield the image after each subset of the sectors; bit `n` of its number is sector `n`."""
    for subset in range(1 << len(sectors)):
        image = bytearray(before)
        for bit, (offset, data) in enumerate(sectors):
            if subset >> bit & 1:
                image[offset : offset + len(data)] = data
        yield image


def _random_sectors(budget: CampaignBudget) -> CampaignResult:
    """Check random subsets of 512-byte sectors of whole logs."""
    result = CampaignResult("torn.random", "states")
    for number, rng in enumerate(budget.rounds(result)):
        life = live(rng.randrange(1 << 30))
        for state in range(min(STATES_A_LIFE, budget.tries - result.tried)):
            image = crash_image(life.start, life.medium.log, random.Random(f"{number}/{state}"))  # noqa: S311
            _check(result, image, life, f"round {number}, state {state}", {})
    _expect_records(result, budget)
    return result


def _whole_prefixes(budget: CampaignBudget) -> CampaignResult:
    """Stop after each write: every finished record that was not freed is found and verifies."""
    result = CampaignResult("torn.killed", "states")
    for number, rng in enumerate(budget.rounds(result)):
        life = live(rng.randrange(1 << 30))
        image = bytearray(life.start)
        for written, (offset, data) in enumerate(life.medium.log):
            image[offset : offset + len(data)] = data
            required = whole(image, life, written + 1)
            result.counts["records required"] += len(required)
            where = f"round {number}, write {written}"
            found, verified = _check(result, image, life, where, required)
            result.expect(found == verified, f"{where}: a record is torn")
    _expect_records(result, budget)
    required_most = result.counts["records required"] > result.tried
    budget.expect_enough(result, required_most, "too few records were required for a verdict")
    return result


def _check(
    result: CampaignResult,
    image: bytearray,
    life: DiskLife,
    where: str,
    required: Mapping[WrittenRecord, bytes],
) -> tuple[int, int]:
    result.tried += 1
    try:
        found, verified = check(image, life.records, required)
    except (AssertionError, FormatError, KeyError) as error:
        result.fail(f"{where}: {error!r}")
        return 0, 0
    result.counts["records right"] += verified
    result.counts["records torn"] += found - verified
    return found, verified


def _expect_records(result: CampaignResult, budget: CampaignBudget) -> None:
    right = result.counts["records right"]
    message = f"{right} records in {result.tried} states: too few for a verdict"
    budget.expect_enough(result, right > result.tried, message)
