"""Segments are spread by weight, and as few as possible move."""

import hashlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.membership.members import Member, MemberState, PoolView
from holdfast.membership.placement import RANKED_MAX, Placement, ramp_share

SEGMENTS = [hashlib.blake2b(str(i).encode(), digest_size=8).digest() for i in range(40_000)]


def member(number, **fields):
    return Member(id=f"flash-{number}", address=f"tcp://10.0.0.{number}:7070", **fields)


def members(count):
    return [member(number) for number in range(1, count + 1)]


def owners(placement, names=SEGMENTS):
    return [placement.order(name)[0].id for name in names]


def moved(before, after):
    return sum(a != b for a, b in zip(before, after, strict=True)) / len(before)


@pytest.mark.parametrize("count", [4, 8, 16])
def test_a_member_that_leaves_gives_up_its_own_segments_and_no_others(count):
    before = owners(Placement(members(count)))
    after = owners(Placement(members(count - 1)))
    gone = f"flash-{count}"
    assert all(a == b for a, b in zip(before, after, strict=True) if a != gone)
    assert moved(before, after) == pytest.approx(1 / count, rel=0.10)


@pytest.mark.parametrize("count", [4, 8, 16])
def test_a_member_that_joins_takes_its_share_evenly_from_all(count):
    before = owners(Placement(members(count - 1)))
    after = owners(Placement(members(count)))
    new = f"flash-{count}"
    assert all(b == new for a, b in zip(before, after, strict=True) if a != b)
    assert moved(before, after) == pytest.approx(1 / count, rel=0.10)
    for old in members(count - 1):
        lost = [b for a, b in zip(before, after, strict=True) if a == old.id and a != b]
        assert len(lost) / len(SEGMENTS) == pytest.approx(1 / count / (count - 1), rel=0.25)


def test_weights_are_respected():
    weights = {1: 1.0, 2: 2.0, 3: 4.0, 4: 0.5}
    counted = owners(Placement([member(n, weight=w) for n, w in weights.items()]))
    for number, weight in weights.items():
        share = counted.count(f"flash-{number}") / len(SEGMENTS)
        assert share == pytest.approx(weight / 7.5, rel=0.05)


def test_more_weight_only_draws_segments_in():
    before = owners(Placement(members(8)))
    after = owners(Placement([*members(7), member(8, weight=2.0)]))
    assert {b for a, b in zip(before, after, strict=True) if a != b} == {"flash-8"}
    assert after.count("flash-8") / len(SEGMENTS) == pytest.approx(2 / 9, rel=0.05)


@given(st.permutations(members(7)))
def test_the_order_of_the_list_moves_nothing(shuffled):
    there = Placement(members(7))
    here = Placement(shuffled)
    assert [here.order(name) for name in SEGMENTS[:50]] == [
        there.order(name) for name in SEGMENTS[:50]
    ]


def test_addresses_zones_and_incarnations_move_nothing():
    elsewhere = [
        Member(id=each.id, address="tcp://other:1", zone="b", incarnation="2")
        for each in members(8)
    ]
    assert owners(Placement(members(8))) == owners(Placement(elsewhere))


def test_only_joining_and_serving_members_are_given_segments():
    states = dict(enumerate(MemberState))
    placement = Placement([member(n, state=state) for n, state in states.items()])
    assert {each.state for each in placement.members} == {MemberState.JOINING, MemberState.SERVING}
    assert Placement([member(1, state=MemberState.DEAD)]).rank(SEGMENTS[0]) == ()


def test_shares_scale_weights():
    placement = Placement(members(4), {"flash-4": 0.25})
    share = owners(placement).count("flash-4") / len(SEGMENTS)
    assert share == pytest.approx(0.25 / 3.25, rel=0.05)


def test_rank_remembers_the_head_of_the_order():
    placement = Placement(members(16))
    for name in SEGMENTS[:20]:
        assert placement.rank(name) == tuple(placement.order(name)[:RANKED_MAX])
        assert placement.rank(name) is placement.rank(name)


def test_losing_one_of_sixteen_leaves_most_of_a_long_prefix_usable():
    # reliability.md 6.2: with k segments and one of n members lost, 1/k * sum (1 - 1/n)^j.
    chains, k, n = 8_000, 4, 16
    ideal = sum((1 - 1 / n) ** j for j in range(1, k + 1)) / k
    placement = Placement(members(n))
    chance = random.Random(16)
    usable = 0
    for _ in range(chains):
        keys = [chance.randbytes(16) for _ in range(k)]
        lost = f"flash-{chance.randint(1, n)}"
        owned = [placement.order(key[:8])[0].id == lost for key in keys]
        usable += (*owned, True).index(True)
    share = usable / (k * chains)
    assert share >= 0.84
    assert share == pytest.approx(ideal, abs=0.01)


def test_placement_does_not_change_between_hosts_or_versions():
    # Change these and every pool loses what it holds at the next upgrade.
    placement = Placement([member(n, weight=w) for n, w in [(1, 1.0), (2, 1.0), (3, 2.5), (4, 4)]])
    assert [
        "".join(each.id[-1] for each in placement.order(bytes.fromhex(name)))
        for name in GOLDEN_ORDERS
    ] == list(GOLDEN_ORDERS.values())
    assert PoolView.of(1, placement.members).digest == GOLDEN_DIGEST


GOLDEN_ORDERS = {
    "0000000000000000": "1423",
    "ffffffffffffffff": "1342",
    "0123456789abcdef": "1342",
    "fedcba9876543210": "4123",
    "686f6c6466617374": "4321",
    "00000000000000ff": "4231",
}
GOLDEN_DIGEST = 0xBF4CCD424EB53949


@given(st.floats(0, 1_000), st.floats(0, 1_000))
def test_a_share_grows_from_a_sixteenth_to_the_whole(age_s, more_s):
    assert 1 / 16 <= ramp_share(age_s, 300) <= ramp_share(age_s + more_s, 300) <= 1
    assert ramp_share(300, 300) == 1
    assert ramp_share(age_s, 0) == 1


def test_ranking_names_every_member_once():
    placement = Placement(members(16))
    everyone = set(placement.order(SEGMENTS[0]))
    assert len(everyone) == 16
    assert all(set(placement.order(name)) == everyone for name in SEGMENTS[:1_000])
