"""Bad members are refused with path, key, value, limit and remedy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import MembershipError
from holdfast.membership.member_list import (
    MEMBERS_MAX,
    WEIGHT_MAX,
    as_data,
    read_member,
    read_members,
)
from holdfast.membership.members import Member, MemberState

GOOD = {"id": "a", "address": "tcp://10.0.0.1:7070"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weight": -1}, ["members.0.weight: -1 ", "above 0 and at most 10000", "correct it"]),
        ({"weight": 0}, ["members.0.weight: 0 ", "state: draining"]),
        ({"weight": float("nan")}, ["members.0.weight: nan "]),
        ({"weight": True}, ["members.0.weight: True "]),
        ({"weight": "4"}, ["members.0.weight: '4' "]),
        ({"weight": WEIGHT_MAX * 2}, ["members.0.weight: 20000.0 "]),
        ({"id": ""}, ["members.0.id: '' ", "1 to 253", "correct it"]),
        ({"id": 7}, ["members.0.id: 7 ", "in quotes"]),
        ({"id": "a/b"}, ["members.0.id: 'a/b' "]),
        ({"id": "x" * 254}, ["members.0.id: 'xxx", "253"]),
        ({"zone": ["a"]}, ["members.0.zone: ['a'] "]),
        ({"state": "up"}, ["members.0.state: 'up' ", "joining, serving, draining, dead"]),
        ({"state": []}, ["members.0.state: [] "]),
        ({"wait": 2}, ["members.0.wait: unknown key", "remove it", "id, address, weight"]),
        ({"address": "10.0.0.1"}, ["members.0.address: '10.0.0.1' ", "tcp://host:port"]),
        ({"address": "tcp://h:0"}, ["members.0.address: 'tcp://h:0' ", "1 to 65535"]),
        ({"address": "tcp://h:65536"}, ["members.0.address: 'tcp://h:65536' "]),
        ({"address": "tcp://fd00::1:80"}, ["members.0.address: ", "[v6]:port"]),
        (
            {"address": "unix:///run/holdfast/node.sock"},
            ["members.0.address: 'unix:///run/holdfast/node.sock' ", "; write tcp://host:port or "],
        ),
        ({"address": None}, ["members.0.address: "]),
    ],
)
def test_a_bad_field_is_named_with_its_limit_and_remedy(change, said):
    with pytest.raises(MembershipError) as refused:
        read_members({"members": [{**GOOD, **change}]}, "/etc/pool.yaml")
    message = str(refused.value)
    assert message.startswith("/etc/pool.yaml: ")
    for part in said:
        assert part in message


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (None, "holds nothing, not a mapping"),
        ([GOOD], "holds list, not a mapping"),
        ({}, "members: nothing, not a list"),
        ({"members": "a"}, "members: str, not a list"),
        ({"members": ["a"]}, "members.0: 'a' is str; write id: and address:"),
        ({"members": [GOOD], "epoch": 1}, "epoch: unknown key; remove it; known here: members"),
        ({"members": [{"id": "a"}]}, "members.0.address: missing; add it"),
        ({"members": [{"address": "tcp://a:1"}]}, "members.0.id: missing; add it"),
        (
            {"members": [GOOD, {**GOOD, "address": "tcp://b:1"}]},
            "members.1.id: 'a' is also that of members.0; give each member its own",
        ),
        (
            {"members": [GOOD, {**GOOD, "id": "b"}]},
            "members.1.address: 'tcp://10.0.0.1:7070' is also that of members.0",
        ),
        ({"members": [GOOD] * (MEMBERS_MAX + 1)}, f"at most {MEMBERS_MAX}; split the pool"),
    ],
)
def test_an_invalid_list_is_refused_with_its_file_and_reason(data, said):
    with pytest.raises(MembershipError) as refused:
        read_members(data, "/etc/pool.yaml")
    assert str(refused.value).startswith("/etc/pool.yaml: ")
    assert said in str(refused.value)


def test_an_empty_list_is_valid():
    assert read_members({"members": []}, "x") == ()


words = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,20}", fullmatch=True)


@given(
    st.builds(
        Member,
        id=words,
        address=st.integers(1, 65_535).map(lambda port: f"tcp://host:{port}"),
        weight=st.floats(0.001, WEIGHT_MAX),
        zone=words,
        state=st.sampled_from(MemberState),
        incarnation=words,
    )
)
def test_a_member_survives_a_round_trip_through_data(member):
    assert read_member(as_data(member), "x") == member


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=5) | st.integers(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["members", "id", "address", "weight"]), inner)
        ),
        max_leaves=8,
    )
)
def test_any_data_is_a_list_of_members_or_refused(data):
    try:
        read_members(data, "x")
    except MembershipError as error:
        assert str(error).startswith("x: ")  # noqa: PT017  # some data is a list
