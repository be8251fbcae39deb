"""Reopened campaign: damage each kind of structure on a disk, then open it: at worst a miss.

Every record that no damage touched must be found again, and a file with one good superblock must
open.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import TypeAlias

from holdfast.errors import FormatError
from holdfast.tiers.disk.region import SECTOR, SUPERBLOCKS, parse_superblock
from holdfast_bench.campaigns.campaign import CampaignBudget, CampaignResult
from holdfast_bench.campaigns.workload import (
    GEOMETRY,
    REGION_BYTES,
    REGIONS,
    DiskLife,
    WrittenRecord,
    check,
    live,
    whole,
)

LIVES = 4
STRIKES_MAX = 3
ATTEMPTS = 100


Strike: TypeAlias = Callable[[bytearray, int, int, random.Random], None]

# Byte ranges within each structure: name -> (start, end).
_SUPERBLOCK = {"superblock": (0, 56)}
_SNAPSHOT = {"snapshot": (0, 200)}
_REGION = {
    "region header": (0, 40),
    "footer entry": (REGION_BYTES - 64 - 4 * 136, REGION_BYTES - 64),
    "footer trailer": (REGION_BYTES - 64, REGION_BYTES),
}
_RECORD = {
    "record mark": (0, 16),
    "record identity": (16, 128),
    "record payload": (128, SECTOR - 16),
    "record tag": (SECTOR - 16, SECTOR),
}
CLASSES = (*_SUPERBLOCK, *_SNAPSHOT, *_REGION, *_RECORD)


def run(budget: CampaignBudget) -> Iterator[CampaignResult]:
    """Damage an image one to three times, open it and read every record."""
    result = CampaignResult("reopened", "faults")
    for number, rng in enumerate(budget.rounds(result)):
        life, before = rng.choice(_lives())
        image = bytearray(life.medium.image)
        name, (kind, strike) = rng.choice(CLASSES), rng.choice(list(STRIKES.items()))
        result.tried += _damage(image, name, strike, rng)
        result.counts[f"{kind} {name}"] += 1
        required = {}
        if _uuids(image) == {life.start[16:32]}:  # the superblocks identify the file
            found = whole(image, life).items()
            required = {written: key for written, key in found if before.get(written) == key}
        result.counts["records required"] += len(required)
        try:
            count, verified = check(image, life.records, required)
            result.counts["records right"] += verified
            result.counts["records detected"] += count - verified
        except FormatError:
            # Only a file without a good superblock may be refused.
            result.counts["files refused"] += 1
            allowed = not _uuids(image)
            result.expect(allowed, f"round {number}: {kind} of a {name}: the file is refused")
        except (AssertionError, KeyError) as error:
            result.fail(f"round {number}, {kind} of a {name}: {error!r}")
    required_most = result.counts["records required"] > result.tried
    budget.expect_enough(result, required_most, "too few records were required for a verdict")
    yield result


def _uuids(image: bytearray) -> set[bytes]:
    """Return the file ids in those superblocks of an image that parse."""
    found = set()
    for which in range(SUPERBLOCKS):
        with contextlib.suppress(FormatError):
            found.add(parse_superblock(bytes(image[which * SECTOR :][:SECTOR])).uuid)
    return found


def _damage(image: bytearray, name: str, strike: Strike, rng: random.Random) -> int:
    """Damage a class of bytes one to three times; return the number of faults.

    A strike that changes no byte, or restores the original image, is no fault and is repeated, at
    most `ATTEMPTS` times.
    """
    undamaged, faults = bytes(image), 0
    for _ in range(rng.randint(1, STRIKES_MAX)):
        before = bytes(image)
        for _ in range(ATTEMPTS):
            strike(image, *byte_class(name, rng), rng)
            if image not in (before, undamaged):
                faults += 1
                break
    return faults


@cache
def _lives() -> list[tuple[DiskLife, dict[WrittenRecord, bytes]]]:
    """Return some disk lives, each with the whole records at its end."""
    lives = [live(seed) for seed in range(LIVES)]
    return [(life, whole(life.medium.image, life)) for life in lives]


def byte_class(name: str, rng: random.Random) -> tuple[int, int]:
    """Return the range in an image of a class of bytes, in a random structure that has it."""
    region = GEOMETRY.region_at(rng.randrange(REGIONS))
    for structure, at in (
        (_SUPERBLOCK, rng.randrange(2) * SECTOR),
        (_SNAPSHOT, GEOMETRY.snapshot_at(rng.randrange(2))),
        (_REGION, region),
        (_RECORD, region + rng.randrange(1, 15) * SECTOR),
    ):
        if name in structure:
            start, end = structure[name]
            return at + start, at + end
    raise KeyError(name)


def _flip(image: bytearray, start: int, end: int, rng: random.Random) -> None:
    for _ in range(rng.randrange(1, 4)):
        image[rng.randrange(start, end)] ^= 1 << rng.randrange(8)


def _zero(image: bytearray, start: int, end: int, rng: random.Random) -> None:
    at = rng.randrange(start, end)
    image[at:end] = bytes(end - at)


def _cut(image: bytearray, start: int, end: int, rng: random.Random) -> None:
    """Zero the image from a random byte of the class to its end."""
    at = rng.randrange(start, end)
    image[at:] = bytes(len(image) - at)


def _swap(image: bytearray, start: int, _: int, rng: random.Random) -> None:
    """Swap the class's first sector with a random other one."""
    here = start // SECTOR * SECTOR
    there = rng.randrange(len(image) // SECTOR) * SECTOR
    one, other = image[here : here + SECTOR], image[there : there + SECTOR]
    image[here : here + SECTOR], image[there : there + SECTOR] = other, one


def _copy(image: bytearray, start: int, _: int, rng: random.Random) -> None:
    """Copy the class's first sector over a random other one."""
    here = start // SECTOR * SECTOR
    there = rng.randrange(len(image) // SECTOR) * SECTOR
    image[there : there + SECTOR] = image[here : here + SECTOR]


def _mix(image: bytearray, start: int, end: int, rng: random.Random) -> None:
    """Replace the bytes by those of another life's image."""
    image[start:end] = rng.choice(_lives())[0].medium.image[start:end]


STRIKES: dict[str, Strike] = {
    "flip": _flip,
    "zero": _zero,
    "cut": _cut,
    "swap": _swap,
    "copy": _copy,
    "mix": _mix,
}
