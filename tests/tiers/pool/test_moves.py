"""What is written again: within a budget, once, and only what belonged to those who are gone."""

import random

from holdfast.clock import ManualClock
from holdfast.tiers.base import Place
from holdfast.tiers.pool import moves
from holdfast.tiers.pool.members import Member, State
from holdfast.tiers.pool.moves import Losses, Strays
from holdfast.tiers.pool.placement import Placement

KEYS = [bytes([number]) * 16 for number in range(200)]
PLACES = [Place(random.Random(number).getrandbits(63)) for number in range(500)]


def placement(*numbers, **states):
    return Placement(
        [
            Member(
                id=f"n{n}",
                address=f"tcp://10.0.0.{n}:7070",
                state=states.get(f"n{n}", State.SERVING),
            )
            for n in numbers
        ]
    )


def owners(placed):
    return {place: placed.rank(place.to_bytes(8, "little"))[0].id for place in PLACES}


def test_a_stray_is_told_once_and_only_if_asked_for():
    strays = Strays(ManualClock())
    strays.found(KEYS[:4])
    assert strays.take(KEYS[2:6], 100) == {KEYS[2], KEYS[3]}
    assert strays.take(KEYS[2:6], 100) == set()
    assert strays.take(KEYS[:2], 100) == {KEYS[0], KEYS[1]}
    assert strays.moved == 4


def test_no_more_is_moved_than_the_budget_allows_in_any_second():
    clock = ManualClock()
    strays = Strays(clock, bytes_per_s=1000.0)
    strays.found(KEYS)
    assert len(strays.take(KEYS[:50], 100)) == 10
    assert strays.take(KEYS[50:60], 100) == set()
    clock.advance(0.5)
    assert len(strays.take(KEYS[60:100], 100)) == 5
    clock.advance(3600)
    assert len(strays.take(KEYS[100:], 100)) == 10
    assert strays.moved + strays.left == 200


def test_only_so_many_strays_are_remembered(monkeypatch):
    monkeypatch.setattr(moves, "STRAYS_MAX", 10)
    strays = Strays(ManualClock())
    strays.found(KEYS[:50])
    assert strays.take(KEYS, 1) == set(KEYS[40:50])


def test_a_member_that_left_takes_its_places_along_and_no_others():
    losses, before = Losses(placement(0, 1, 2, 3)), owners(placement(0, 1, 2, 3))
    assert losses.since(placement(0, 1, 2, 3), ()) is None
    lost = losses.since(placement(0, 1, 3), ())
    assert {place for place in PLACES if lost(place)} == {p for p in PLACES if before[p] == "n2"}
    assert losses.since(placement(0, 1, 3), ()) is None


def test_one_that_drains_counts_as_leaving_and_one_that_joins_does_not():
    losses = Losses(placement(0, 1))
    assert losses.since(placement(0, 1, 2), ()) is None
    lost = losses.since(placement(0, 1, 2, n1=State.DRAINING), ())
    assert {owners(placement(0, 1, 2))[place] for place in PLACES if lost(place)} == {"n1"}


def test_one_that_is_down_for_long_counts_once_until_it_is_up_again():
    losses, three = Losses(placement(0, 1, 2)), placement(0, 1, 2)
    lost = losses.since(three, {"n0"})
    assert {owners(three)[place] for place in PLACES if lost(place)} == {"n0"}
    assert losses.since(three, {"n0"}) is None
    assert losses.since(three, ()) is None
    assert losses.since(three, {"n0"}) is not None
    assert losses.since(placement(1, 2), {"n0"}) is not None, "and once more when it is out"
