"""What a tier of another package reports is shown as plain values, or with the reason why not."""

import enum
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from holdfast.byte_size import Size
from holdfast.status import MemberStatus, TierStatus
from holdfast.testing.memory import MemoryTier, SharedMemoryTier
from holdfast.tiers.base import TierUsage
from holdfast.tiers.reported import (
    ENTRIES_MAX,
    TEXT_CHARS_MAX,
    description,
    shared_status,
    tier_status,
)


class Colour(enum.Enum):
    RED = "red"


def local(usage):
    """A tier whose `usage` returns this, or raises it."""

    class Local(MemoryTier):
        def usage(self):
            if isinstance(usage, Exception):
                raise usage
            return usage

    return Local(1 << 20)


def shared(described=None, members=None):
    """A shared tier that reports these, or raises them."""

    class Shared(SharedMemoryTier):
        def describe(self):
            if isinstance(described, Exception):
                raise described
            return described

        def member_health(self):
            if isinstance(members, Exception):
                raise members
            return members

    return Shared({}, name="mine")


@pytest.mark.parametrize("capacity", [Size(1 << 28), np.int64(1 << 28)])
def test_integers_of_other_types_are_plain_integers(capacity):
    told = tier_status(local(TierUsage(capacity, 0, np.uint8(3))))
    assert told == TierStatus("memory", capacity_bytes=1 << 28, records=3)
    assert msgspec.json.encode(told)


@pytest.mark.parametrize(
    ("usage", "why"),
    [
        (None, "usage() is of type NoneType, not TierUsage"),
        ({"capacity_bytes": 1}, "usage() is of type dict, not TierUsage"),
        (TierUsage("1 GiB", 0, 0), "usage().capacity_bytes is '1 GiB', not an integer >= 0"),
        (TierUsage(1, -1, 0), "usage().used_bytes is -1, not an integer >= 0"),
        (TierUsage(1, 0, True), "usage().records is True, not an integer >= 0"),
        (TierUsage(1, 0, 0, 0.5), "usage().read_bytes is 0.5, not an integer >= 0"),
        (TierUsage(1 << 64, 0, 0), "usage().capacity_bytes is an integer of more than 63 bits"),
        (TierUsage(Path("a"), 0, 0), "usage().capacity_bytes is of type PosixPath, not a plain"),
        (OSError(5, "disk on \x1b[31mfire"), "OSError: [Errno 5] disk on \\x1b[31mfire"),
    ],
)
def test_an_invalid_usage_of_a_tier_is_reported_as_trouble_and_raises_no_error(usage, why):
    told = tier_status(local(usage))
    assert told.trouble.startswith(why)
    assert (told.capacity_bytes, told.used_bytes) == (0, 0)
    assert msgspec.json.encode(told)


def test_a_description_is_reduced_to_plain_values():
    told = {
        "members": [{"id": "a", "address": "x", "share": np.float32(0.5), "phase": Colour.RED}],
        "capacity": Size(7),
        "rate": math.nan,
        "note": "x" * 2 * TEXT_CHARS_MAX,
        "pair": (1, None),
    }
    found = description(shared(told))
    assert found["tier"] == "mine"
    assert found["members"] == [{"id": "a", "address": "x", "share": 0.5, "phase": "red"}]
    assert (found["capacity"], found["rate"], found["pair"]) == (7, None, [1, None])
    assert len(found["note"]) == TEXT_CHARS_MAX
    assert type(found["capacity"]) is int
    assert msgspec.msgpack.encode(found)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (None, "TypeError"),
        ({"members": 3}, "ValidationError"),
        ({"members": [{"share": "half"}]}, "ValidationError"),
        ({"where": Path("a")}, "describe().where is of type PosixPath, not a plain value"),
        ({"a": {1: 2}}, "describe().a has a key of type int, not str"),
        ({"a": list(range(ENTRIES_MAX + 1))}, "describe().a exceeds 1024 entries or 6 levels"),
        ({"a": [[[[[[[1]]]]]]]}, "describe().a.0.0.0.0.0 exceeds 1024 entries or 6 levels"),
        (RuntimeError("no"), "RuntimeError: no"),
    ],
)
def test_an_invalid_description_of_a_tier_is_reported_as_trouble(told, why):
    found = description(shared(told))
    assert found["members"] == []
    assert found["trouble"].startswith(why)


def test_the_health_of_members_is_read_from_structs_and_mappings():
    members = [MemberStatus("a", ejected=True), {"target": "b", "latency_s": 0.5, "colour": "red"}]
    told = shared_status(shared(members=members))
    assert told.members == [MemberStatus("a", ejected=True), MemberStatus("b", latency_s=0.5)]
    assert not told.trouble


@pytest.mark.parametrize("members", [None, [3], [{"phase": "closed"}], ["a"], ValueError("no")])
def test_invalid_members_of_a_shared_tier_are_reported_as_trouble(members):
    told = shared_status(shared(members=members))
    assert (told.reachable, told.members) == (True, [])
    assert told.trouble
