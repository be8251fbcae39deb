"""DNS names and services as lists of members."""

import itertools

import pytest

from holdfast.address import tcp_endpoint
from holdfast.clock import ManualClock
from holdfast.errors import MembershipError
from holdfast.membership.dns_source import DnsSource, SrvRecord, system_addresses
from holdfast.membership.members import Member
from holdfast.membership.membership import Membership
from holdfast.testing.membership_contract import MembershipContract, ReportedViews, wait_for_trouble

LOOK_S = 0.02


class TestMemberDnsAddressesAsSource(MembershipContract):
    def make_source(self):
        return DnsSource("pool.test:7070", LOOK_S, addresses=self.resolve)

    def resolve(self, host):
        assert host == "pool.test"
        if self.answers is None:
            raise MembershipError(f"{host}: no answer")
        return self.answers

    def publish(self, members):
        self.answers = [tcp_endpoint(member.address).host for member in members]

    def spoil(self):
        self.answers = None

    def member(self, number):
        return Member(id=f"10.0.0.{number}:7070", address=f"tcp://10.0.0.{number}:7070")


class TestMemberDnsServicesAsSource(TestMemberDnsAddressesAsSource):
    def make_source(self):
        return DnsSource("_holdfast._tcp.test", LOOK_S, services=self.services)

    def services(self, name):
        assert name == "_holdfast._tcp.test"
        return [SrvRecord(0, 1, 7070, host) for host in self.resolve("pool.test")]


def told_by(source):
    heard = ReportedViews()
    source.watch(heard)
    members = heard.until(lambda members: members)
    source.close()
    return members


def test_addresses_are_reported_sorted_and_without_duplicates():
    found = ["10.0.0.2", "fd00::1", "10.0.0.1", "10.0.0.2"]
    members = told_by(DnsSource("pool.test:7070", LOOK_S, addresses=lambda _: found))
    assert [(m.id, m.address) for m in members] == [
        ("10.0.0.1:7070", "tcp://10.0.0.1:7070"),
        ("10.0.0.2:7070", "tcp://10.0.0.2:7070"),
        ("[fd00::1]:7070", "tcp://[fd00::1]:7070"),
    ]


def test_only_srv_records_of_the_lowest_priority_become_members():
    records = [
        SrvRecord(10, 5, 7070, "b.test"),
        SrvRecord(10, 0, 7071, "a.test"),
        SrvRecord(20, 9, 7072, "spare.test"),
    ]
    members = told_by(DnsSource("_kv._tcp.test", LOOK_S, services=lambda _: records))
    assert members == (
        Member(id="a.test:7071", address="tcp://a.test:7071", weight=1.0),
        Member(id="b.test:7070", address="tcp://b.test:7070", weight=5.0),
    )


def test_an_answer_without_records_is_reported_as_trouble():
    source = DnsSource("pool.test:7070", LOOK_S, addresses=lambda _: [])
    source.watch(ReportedViews())
    assert "pool.test:7070: 0 members, not 1 to 1024" in wait_for_trouble(source)
    source.close()


def test_a_name_server_that_rotates_its_records_changes_no_view():
    every = [f"10.0.0.{number}" for number in range(1, 10)]
    clock = ManualClock()
    membership = Membership(clock)
    turn = itertools.count()
    source = DnsSource(
        "pool.test:7070", addresses=lambda _: [every[(next(turn) + k) % 9] for k in range(4)]
    )
    source._on_members = membership.observe
    for _ in range(9):
        source._one_round()
        clock.advance(1)
    epoch = membership.views().current.view.epoch
    assert len(membership.views().current.view.members) == 9
    for _ in range(200):
        source._one_round()
        clock.advance(1)
    assert membership.views().current.view.epoch == epoch


def test_system_addresses_uses_the_systems_resolver():
    assert "127.0.0.1" in system_addresses("127.0.0.1")
    with pytest.raises(MembershipError, match=r"no-such-host\.invalid: .*check the name"):
        system_addresses("no-such-host.invalid")


@pytest.mark.parametrize("name", ["pool.test", ":7070", "pool.test:", "pool.test:0", "p:65536"])
def test_a_name_without_a_port_is_refused(name):
    with pytest.raises(MembershipError, match="write host:port or _service"):
        DnsSource(name)
