"""Power cuts: every subset of the last sectors written, enumerated; and random ones of 512 bytes.

A power cut leaves a prefix of what was written, and of the writes since the last flush any sectors:
later ones without earlier ones, half a record, half a footer. Short stretches of a log are cut in
every way there is. The kill of a process leaves a prefix, whole: then nothing may be missing.
Which records are whole is told from what was written, not by the code that recovers them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from holdfast.errors import FormatError
from holdfast.testing.campaign import Order, Tally
from holdfast.testing.extents import Write, crash_image
from holdfast.testing.workload import Laid, Life, check, live, whole
from holdfast.tiers.disk.region import SECTOR

SUBSET_SECTORS = 8
"""Sectors of which every subset is tried: 256 states, with or without each of them."""

STATES_A_LIFE = 400
LIVES = 512


def run(order: Order) -> Iterator[Tally]:
    """Cut every stretch in every way; cut whole lives at random; kill without a cut."""
    yield _every_subset(order.share(2))
    yield _random_sectors(order.share(2.5))
    yield _whole_prefixes(order.share(10))


def _every_subset(order: Order) -> Tally:
    """Enumerate: for stretch after stretch of a log, all subsets of its sectors."""
    tally = Tally("torn.every", "states")
    for number, dice in enumerate(order.rounds(tally)):
        life, stretches = _life(dice.randrange(LIVES))
        end, window = dice.choice(stretches)
        before = _image_of(life, end - len(window))
        for subset, image in enumerate(_subsets(before, _sectors(window))):
            _check(tally, image, life, f"round {number}, writes to {end}, subset {subset:b}", {})
        tally.counts["stretches"] += 1
    _expect_something_to_lose(tally, order)
    return tally


@lru_cache(maxsize=16)
def _life(seed: int) -> tuple[Life, list[tuple[int, Sequence[Write]]]]:
    """Return a life and the stretches of its log."""
    life = live(seed)
    return life, list(_stretches(life.medium.log))


def _stretches(log: Sequence[Write]) -> Iterator[tuple[int, Sequence[Write]]]:
    """Yield runs of unflushed writes that end behind each write, as long as subsets allow."""
    for end in range(1, len(log) + 1):
        start, sectors = end, 0
        while start and log[start - 1].data:
            sectors += len(log[start - 1].data) // SECTOR
            if sectors > SUBSET_SECTORS:
                break
            start -= 1
        if start < end:
            yield end, log[start:end]


def _image_of(life: Life, writes: int) -> bytearray:
    image = bytearray(life.start)
    for offset, data in life.medium.log[:writes]:
        image[offset : offset + len(data)] = data
    return image


def _sectors(window: Sequence[Write]) -> list[Write]:
    return [
        Write(offset + at, data[at : at + SECTOR])
        for offset, data in window
        for at in range(0, len(data), SECTOR)
    ]


def _subsets(before: bytearray, sectors: Sequence[Write]) -> Iterator[bytearray]:
    """Yield what every subset of these sectors leaves; bit by bit of its number, who arrived."""
    for subset in range(1 << len(sectors)):
        image = bytearray(before)
        for bit, (offset, data) in enumerate(sectors):
            if subset >> bit & 1:
                image[offset : offset + len(data)] = data
        yield image


def _random_sectors(order: Order) -> Tally:
    """Cut lives anywhere, 512 bytes at a time."""
    tally = Tally("torn.random", "states")
    for number, dice in enumerate(order.rounds(tally)):
        life = live(dice.randrange(1 << 30))
        for state in range(min(STATES_A_LIFE, order.tries - tally.tried)):
            image = crash_image(life.start, life.medium.log, random.Random(f"{number}/{state}"))  # noqa: S311
            _check(tally, image, life, f"round {number}, state {state}", {})
    _expect_something_to_lose(tally, order)
    return tally


def _whole_prefixes(order: Order) -> Tally:
    """Stop after each write: what was finished and not freed is there, and all of it verifies."""
    tally = Tally("torn.killed", "states")
    for number, dice in enumerate(order.rounds(tally)):
        life = live(dice.randrange(1 << 30))
        image = bytearray(life.start)
        for written, (offset, data) in enumerate(life.medium.log):
            image[offset : offset + len(data)] = data
            required = whole(image, life, written + 1)
            tally.counts["records required"] += len(required)
            where = f"round {number}, write {written}"
            found, verified = _check(tally, image, life, where, required)
            tally.expect(found == verified, f"{where}: a record is torn")
    _expect_something_to_lose(tally, order)
    required_most = tally.counts["records required"] > tally.tried
    order.expect_enough(tally, required_most, "too few records had to be there to tell")
    return tally


def _check(
    tally: Tally, image: bytearray, life: Life, where: str, required: Mapping[Laid, bytes]
) -> tuple[int, int]:
    tally.tried += 1
    try:
        found, verified = check(image, life.records, required)
    except (AssertionError, FormatError, KeyError) as error:
        tally.fail(f"{where}: {error!r}")
        return 0, 0
    tally.counts["records right"] += verified
    tally.counts["records torn"] += found - verified
    return found, verified


def _expect_something_to_lose(tally: Tally, order: Order) -> None:
    right = tally.counts["records right"]
    words = f"{right} records in {tally.tried} states: too few to tell"
    order.expect_enough(tally, right > tally.tried, words)
