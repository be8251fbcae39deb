"""Damage to every class of bytes of a disk that is opened again: a miss at worst.

What no strike touched must be found again, and a file with one good superblock be opened.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import TypeAlias

from holdfast.errors import FormatError
from holdfast.testing.campaign import Order, Tally
from holdfast.testing.workload import (
    GEOMETRY,
    REGION_BYTES,
    REGIONS,
    Laid,
    Life,
    check,
    live,
    whole,
)
from holdfast.tiers.disk.region import SECTOR, SUPERBLOCKS, parse_superblock

LIVES = 4
STRIKES_MAX = 3
ATTEMPTS = 100


Strike: TypeAlias = Callable[[bytearray, int, int, random.Random], None]

# Where each class of bytes begins in its structure, and ends.
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


def run(order: Order) -> Iterator[Tally]:
    """Strike one to three times, open, read everything."""
    tally = Tally("reopened", "faults")
    for number, dice in enumerate(order.rounds(tally)):
        life, before = dice.choice(_lives())
        image = bytearray(life.medium.image)
        name, (kind, strike) = dice.choice(CLASSES), dice.choice(list(STRIKES.items()))
        tally.tried += _damage(image, name, strike, dice)
        tally.counts[f"{kind} {name}"] += 1
        required = _required(image, life, before)
        tally.counts["records required"] += len(required)
        try:
            found, verified = check(image, life.records, required)
            tally.counts["records right"] += verified
            tally.counts["records detected"] += found - verified
        except FormatError:
            # Both superblocks are lost: the file is refused as a whole, and left as it is.
            tally.counts["files refused"] += 1
            allowed = not _uuids(image)
            tally.expect(allowed, f"round {number}: {kind} of a {name}: the file is refused")
        except (AssertionError, KeyError) as error:
            tally.fail(f"round {number}, {kind} of a {name}: {error!r}")
    required_most = tally.counts["records required"] > tally.tried
    order.expect_enough(tally, required_most, "too few records had to be there to tell")
    yield tally


def _required(image: bytearray, life: Life, before: dict[Laid, bytes]) -> dict[Laid, bytes]:
    """Return the records that no strike touched, of a file that is still known to be this one."""
    if _uuids(image) != {life.start[16:32]}:
        return {}
    return {laid: key for laid, key in whole(image, life).items() if before.get(laid) == key}


def _uuids(image: bytearray) -> set[bytes]:
    """Return the files that the superblocks of an image, as far as they parse, say it is."""
    found = set()
    for which in range(SUPERBLOCKS):
        with contextlib.suppress(FormatError):
            found.add(parse_superblock(bytes(image[which * SECTOR :][:SECTOR])).uuid)
    return found


def _damage(image: bytearray, name: str, strike: Strike, dice: random.Random) -> int:
    """Strike a class of bytes one to three times; return how often.

    What changes no byte, or undoes what was done, is no fault: it strikes again, as long as there
    may be something left to strike.
    """
    undamaged, faults = bytes(image), 0
    for _ in range(dice.randint(1, STRIKES_MAX)):
        before = bytes(image)
        for _ in range(ATTEMPTS):
            strike(image, *byte_class(name, dice), dice)
            if image not in (before, undamaged):
                faults += 1
                break
    return faults


@cache
def _lives() -> list[tuple[Life, dict[Laid, bytes]]]:
    """Return some lives, and what is whole at the end of each."""
    lives = [live(seed) for seed in range(LIVES)]
    return [(life, whole(life.medium.image, life)) for life in lives]


def byte_class(name: str, dice: random.Random) -> tuple[int, int]:
    """Return where one structure's bytes of a class begin and end in an image."""
    region = GEOMETRY.region_at(dice.randrange(REGIONS))
    for structure, at in (
        (_SUPERBLOCK, dice.randrange(2) * SECTOR),
        (_SNAPSHOT, GEOMETRY.snapshot_at(dice.randrange(2))),
        (_REGION, region),
        (_RECORD, region + dice.randrange(1, 15) * SECTOR),
    ):
        if name in structure:
            start, end = structure[name]
            return at + start, at + end
    raise KeyError(name)


def _flip(image: bytearray, start: int, end: int, dice: random.Random) -> None:
    for _ in range(dice.randrange(1, 4)):
        image[dice.randrange(start, end)] ^= 1 << dice.randrange(8)


def _zero(image: bytearray, start: int, end: int, dice: random.Random) -> None:
    at = dice.randrange(start, end)
    image[at:end] = bytes(end - at)


def _cut(image: bytearray, start: int, end: int, dice: random.Random) -> None:
    """Everything behind a byte of this class never arrived."""
    at = dice.randrange(start, end)
    image[at:] = bytes(len(image) - at)


def _swap(image: bytearray, start: int, _: int, dice: random.Random) -> None:
    """The sector goes where another belongs, and the other way round."""
    here = start // SECTOR * SECTOR
    there = dice.randrange(len(image) // SECTOR) * SECTOR
    one, other = image[here : here + SECTOR], image[there : there + SECTOR]
    image[here : here + SECTOR], image[there : there + SECTOR] = other, one


def _copy(image: bytearray, start: int, _: int, dice: random.Random) -> None:
    """The sector is written a second time, over another."""
    here = start // SECTOR * SECTOR
    there = dice.randrange(len(image) // SECTOR) * SECTOR
    image[there : there + SECTOR] = image[here : here + SECTOR]


def _mix(image: bytearray, start: int, end: int, dice: random.Random) -> None:
    """An older or younger image's bytes of this class."""
    image[start:end] = dice.choice(_lives())[0].medium.image[start:end]


STRIKES: dict[str, Strike] = {
    "flip": _flip,
    "zero": _zero,
    "cut": _cut,
    "swap": _swap,
    "copy": _copy,
    "mix": _mix,
}
