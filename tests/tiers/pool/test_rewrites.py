"""What is written again: within a budget, once, and only what belonged to those who are gone."""

import random

from holdfast.blocks.namespace import Namespace
from holdfast.clock import ManualClock
from holdfast.membership.members import Member, MemberState
from holdfast.membership.placement import Placement
from holdfast.tiers.base import Place
from holdfast.tiers.pool import rewrites
from holdfast.tiers.pool.rewrites import LostBlocks, MisplacedBlocks

NAMESPACE = Namespace(b"f" * 16, b"d" * 16, 3_000, 16)
KEYS = [bytes([number]) * 16 for number in range(200)]
PLACES = [Place(random.Random(number).getrandbits(63)) for number in range(500)]


def placement(*numbers, **states):
    return Placement(
        [
            Member(
                id=f"n{n}",
                address=f"tcp://10.0.0.{n}:7070",
                state=states.get(f"n{n}", MemberState.SERVING),
            )
            for n in numbers
        ]
    )


def owners(placed):
    return {place: placed.rank(place.to_bytes(8, "little"))[0].id for place in PLACES}


def test_a_misplaced_block_is_returned_once_and_only_on_request():
    misplaced_blocks = MisplacedBlocks(ManualClock())
    misplaced_blocks.found(NAMESPACE, KEYS[:4])
    assert misplaced_blocks.take(NAMESPACE, KEYS[2:6]) == {KEYS[2], KEYS[3]}
    assert misplaced_blocks.take(NAMESPACE, KEYS[2:6]) == set()
    assert misplaced_blocks.take(NAMESPACE, KEYS[:2]) == {KEYS[0], KEYS[1]}
    assert misplaced_blocks.moved == 4


def test_misplaced_blocks_are_moved_within_the_byte_rate():
    clock = ManualClock()
    misplaced_blocks = MisplacedBlocks(clock, bytes_per_s=10.0 * NAMESPACE.slot_bytes)
    misplaced_blocks.found(NAMESPACE, KEYS)
    assert len(misplaced_blocks.take(NAMESPACE, KEYS[:50])) == 10
    assert misplaced_blocks.take(NAMESPACE, KEYS[50:60]) == set()
    clock.advance(0.5)
    assert len(misplaced_blocks.take(NAMESPACE, KEYS[60:100])) == 5
    clock.advance(3600)
    assert len(misplaced_blocks.take(NAMESPACE, KEYS[100:])) == 10
    assert misplaced_blocks.moved == 25


def test_the_number_of_remembered_misplaced_blocks_is_bounded(monkeypatch):
    monkeypatch.setattr(rewrites, "MISPLACED_MAX", 10)
    misplaced_blocks = MisplacedBlocks(ManualClock())
    misplaced_blocks.found(NAMESPACE, KEYS[:50])
    assert misplaced_blocks.take(NAMESPACE, KEYS) == set(KEYS[40:50])


def test_the_same_key_in_another_namespace_is_not_misplaced():
    misplaced_blocks, other = MisplacedBlocks(ManualClock()), NAMESPACE._replace(domain=b"o" * 16)
    misplaced_blocks.found(NAMESPACE, KEYS[:2])
    assert misplaced_blocks.take(other, KEYS[:2]) == set()
    assert misplaced_blocks.take(NAMESPACE, KEYS[:2]) == set(KEYS[:2])


def test_only_the_places_of_a_member_that_left_are_lost():
    losses, before = LostBlocks(placement(0, 1, 2, 3)), owners(placement(0, 1, 2, 3))
    assert losses.since(placement(0, 1, 2, 3), ()) is None
    lost = losses.since(placement(0, 1, 3), ())
    assert {place for place in PLACES if lost(place)} == {p for p in PLACES if before[p] == "n2"}
    assert losses.since(placement(0, 1, 3), ()) is None


def test_the_places_of_a_draining_member_are_lost_and_a_join_loses_none():
    losses = LostBlocks(placement(0, 1))
    assert losses.since(placement(0, 1, 2), ()) is None
    lost = losses.since(placement(0, 1, 2, n1=MemberState.DRAINING), ())
    assert {owners(placement(0, 1, 2))[place] for place in PLACES if lost(place)} == {"n1"}


def test_the_places_of_a_member_that_is_long_down_are_lost_once_per_outage():
    losses, three = LostBlocks(placement(0, 1, 2)), placement(0, 1, 2)
    lost = losses.since(three, {"n0"})
    assert {owners(three)[place] for place in PLACES if lost(place)} == {"n0"}
    assert losses.since(three, {"n0"}) is None
    assert losses.since(three, ()) is None
    assert losses.since(three, {"n0"}) is not None
    assert losses.since(placement(1, 2), {"n0"}) is not None, "and once more when it is out"
