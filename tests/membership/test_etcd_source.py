"""Members in a real etcd: registered under leases, watched, and outliving etcd itself."""

import itertools
import logging
import time

import msgspec
import pytest

from holdfast.errors import MembershipError
from holdfast.membership import etcd_source
from holdfast.membership.etcd_client import (
    EtcdClient,
    EtcdEntry,
    EtcdOptions,
    EtcdSnapshot,
    _Header,
)
from holdfast.membership.etcd_source import EtcdRegistration, EtcdSource
from holdfast.membership.member_list import as_data
from holdfast.membership.members import Member, MemberState
from holdfast.membership.poller import Poller
from holdfast.testing.membership_contract import MembershipContract, ReportedViews, wait_for_trouble

NUMBERS = itertools.count()
A = Member(id="flash-a", address="tcp://10.0.0.1:7070", weight=4.0, zone="z1", incarnation="i1")
B = Member(id="flash-b", address="tcp://10.0.0.2:7070")


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    monkeypatch.setattr(etcd_source, "_PAUSE_S", 0.02)
    monkeypatch.setattr(etcd_source, "_PAUSE_MAX_S", 0.1)


@pytest.fixture
def options(etcd_url):
    """A prefix of its own for each test."""
    return EtcdOptions(
        endpoints=(etcd_url,), prefix=f"/test-{next(NUMBERS)}/members", timeout_s=60.0
    )


@pytest.fixture
def closing():
    """A list of what to close at the end, the last first."""
    opened = []
    yield opened
    for each in reversed(opened):
        each.close()


@pytest.fixture
def heard(options, closing):
    """What a watcher of the test's prefix has been told."""
    heard = ReportedViews()
    source = EtcdSource(options)
    closing.append(source)
    source.watch(heard)
    return heard


def ids(members):
    return sorted(member.id for member in members)


def key_of(options, name):
    return f"{options.prefix}/{name}".encode()


class TestMemberEtcdAsSource(MembershipContract):
    @pytest.fixture(autouse=True)
    def _etcd(self, etcd_server, options):
        self.server, self.options = etcd_server, options
        yield
        self.server.start()

    def make_source(self):
        return EtcdSource(self.options)

    def publish(self, members):
        self.server.start()
        etcd = EtcdClient(self.options)
        wanted = {key_of(self.options, m.id): msgspec.json.encode(as_data(m)) for m in members}
        lease = etcd.grant(300)
        for key, value in wanted.items():
            etcd.put(key, value, lease)
        for entry in etcd.snapshot(f"{self.options.prefix}/".encode()).entries:
            if entry.key not in wanted:
                passing = etcd.grant(300)
                etcd.put(entry.key, b"", passing)
                etcd.revoke(passing)

    def spoil(self):
        self.server.stop()


def test_a_watcher_sees_every_field_of_a_registered_member(options, heard, closing):
    closing.append(EtcdRegistration(options, A))
    assert heard.until(lambda members: len(members) == 1) == (A,)


def test_a_member_that_closes_is_gone_at_once(options, heard):
    ours, other = EtcdRegistration(options, A, ttl_s=300), EtcdRegistration(options, B, ttl_s=300)
    heard.until(lambda members: ids(members) == ["flash-a", "flash-b"])
    ours.close()
    heard.until(lambda members: ids(members) == ["flash-b"])
    other.close()
    heard.until(lambda members: members == ())


def test_a_member_that_closes_is_gone_at_once_though_an_endpoint_is_dead(options, heard, etcd_url):
    endpoints = ("http://127.0.0.1:1", etcd_url)
    ours = EtcdRegistration(msgspec.structs.replace(options, endpoints=endpoints), A, ttl_s=3)
    heard.until(lambda members: ids(members) == ["flash-a"])
    lease = ours._lease
    ours.close()
    assert EtcdClient(options).keep_alive(lease) == 0


def test_a_lease_that_no_endpoint_revokes_is_logged_with_the_last_error(
    options, heard, etcd_server, caplog
):
    ours = EtcdRegistration(options, A, ttl_s=2)
    heard.until(lambda members: ids(members) == ["flash-a"])
    etcd_server.stop()
    try:
        ours.close()
    finally:
        etcd_server.start()
    [line] = [each.getMessage() for each in caplog.records if "ends by itself" in each.getMessage()]
    assert line.startswith("registration of flash-a in etcd: http://")


def test_a_member_that_dies_is_gone_when_its_lease_ends(options, heard, closing):
    closing.append(EtcdRegistration(options, B))
    dying = EtcdRegistration(options, A, ttl_s=2)
    heard.until(lambda members: ids(members) == ["flash-a", "flash-b"])
    Poller.close(dying)  # as kill -9 would: the lease is neither renewed nor revoked
    heard.until(lambda members: ids(members) == ["flash-b"])


def test_a_lease_is_kept_alive(options, heard, closing):
    registration = EtcdRegistration(options, A, ttl_s=9)
    closing.append(registration)
    heard.until(lambda members: ids(members) == ["flash-a"])
    lease, calls = registration._lease, 0
    ended = []
    renew = registration._etcd.keep_alive

    def counted(number):
        nonlocal calls
        left_s = renew(number)
        calls += 1
        ended.append(left_s == 0)
        if calls == 4:
            done.set()
        return left_s

    done = etcd_source.threading.Event()
    registration._etcd.keep_alive = counted
    assert done.wait(60)  # four thirds of the lease's time
    assert not any(ended)
    assert registration._lease == lease
    assert len(heard.lists[-1]) == 1


def test_a_lost_lease_is_replaced(options, heard, closing):
    registration = EtcdRegistration(options, A, ttl_s=2)
    closing.append(registration)
    heard.until(lambda members: ids(members) == ["flash-a"])
    before = len(heard.lists)
    EtcdClient(options).revoke(registration._lease)
    heard.until(lambda members: ids(members) == ["flash-a"] and len(heard.lists) > before)
    assert wait_for_trouble(registration, gone=True) == ""


def test_a_member_announces_that_it_drains(options, heard, closing):
    registration = EtcdRegistration(options, A)
    closing.append(registration)
    heard.until(lambda members: len(members) == 1)
    registration.announce(MemberState.DRAINING)
    heard.until(lambda members: members[0].state is MemberState.DRAINING)


def test_a_restarted_member_replaces_its_old_registration(options, heard, closing):
    first = EtcdRegistration(options, A, ttl_s=300)
    heard.until(lambda members: ids(members) == ["flash-a"])
    Poller.close(first)
    again = msgspec.structs.replace(A, incarnation="i2")
    closing.append(EtcdRegistration(options, again, ttl_s=300))
    heard.until(lambda members: members == (again,))
    assert EtcdClient(options).keep_alive(first._lease) > 0
    EtcdClient(options).revoke(first._lease)
    assert EtcdClient(options).snapshot(key_of(options, "")).entries


def test_a_replaced_member_closes_without_removing_its_successor(options, heard, closing):
    old = EtcdRegistration(options, A, ttl_s=300)
    heard.until(lambda members: ids(members) == ["flash-a"])
    moved = msgspec.structs.replace(A, address="tcp://10.9.9.9:7000")
    closing.append(EtcdRegistration(options, moved, ttl_s=300))
    heard.until(lambda members: [one.address for one in members] == [moved.address])
    old.announce(MemberState.DRAINING)
    end = time.monotonic() + 60
    while "another target has registered this id" not in old.trouble():
        assert time.monotonic() < end
        time.sleep(0.05)
    old.close()
    time.sleep(1.0)
    assert {one.address for one in heard.lists[-1]} == {moved.address}
    assert heard.lists[-1][0].state is not MemberState.DRAINING


def test_a_removed_entry_is_registered_again(options, heard, closing):
    closing.append(EtcdRegistration(options, A, ttl_s=2))
    heard.until(lambda members: ids(members) == ["flash-a"])
    etcd, before = EtcdClient(options), len(heard.lists)
    etcd._call("/v3/kv/deleterange", {"key": key_of(options, "flash-a")}, dict[str, object])
    heard.until(lambda members: ids(members) == ["flash-a"] and len(heard.lists) > before)


def test_members_and_watchers_outlive_etcd(etcd_server, options, heard, closing):
    registration = EtcdRegistration(options, A, ttl_s=15)
    closing.append(registration)
    heard.until(lambda members: ids(members) == ["flash-a"])
    etcd_server.stop()
    before = len(heard.lists) - 1
    assert "127.0.0.1" in wait_for_trouble(registration)
    etcd_server.start()
    assert wait_for_trouble(registration, gone=True) == ""
    closing.append(EtcdRegistration(options, B))
    heard.until(lambda members: ids(members) == ["flash-a", "flash-b"])
    assert all(heard.lists[before:])


def test_a_bad_entry_is_left_out_with_one_log_line(options, heard, closing, caplog):
    caplog.set_level(logging.WARNING)
    closing.append(EtcdRegistration(options, B))
    heard.until(lambda members: ids(members) == ["flash-b"])
    etcd = EtcdClient(options)
    lease = etcd.grant(300)
    etcd.put(key_of(options, "flash-x"), b'{"id": "flash-x", "address": "here"}', lease)
    etcd.put(key_of(options, "flash-x"), b'{"id": "flash-x", "address": "here"}', lease)
    etcd.put(key_of(options, "flash-y"), b"not json", lease)
    etcd.put(key_of(options, "flash-z"), msgspec.json.encode(as_data(A)), lease)
    closing.append(EtcdRegistration(options, A))
    heard.until(lambda members: ids(members) == ["flash-a", "flash-b"])
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    assert f"etcd {options.prefix}/flash-x.address: 'here' is not" in said[0]
    assert f"etcd {options.prefix}/flash-y: not JSON" in said[1]
    assert f"etcd {options.prefix}/flash-z.id: 'flash-a' is not the key's 'flash-z'" in said[2]


def test_a_silent_watch_is_set_up_again(options, closing):
    closing.append(EtcdRegistration(options, A))
    heard, source = ReportedViews(), EtcdSource(options, silence_s=0.1)
    closing.append(source)
    source.watch(heard)
    heard.until(lambda members: ids(members) == ["flash-a"])
    before = len(heard.lists)
    heard.until(lambda _: len(heard.lists) >= before + 3)
    assert source.trouble() == ""


def test_a_watch_from_a_compacted_revision_ends_without_an_error(options):
    etcd = EtcdClient(options)
    lease = etcd.grant(300)
    for number in range(5):
        etcd.put(key_of(options, "flash-a"), str(number).encode(), lease)
    revision = etcd.snapshot(b"/").header.revision
    etcd._call("/v3/kv/compaction", {"revision": str(revision)}, dict[str, object])
    changes = list(etcd.changes(key_of(options, ""), revision - 3, 5.0))
    assert all(not entries for entries in changes)


def test_the_next_endpoint_is_asked_when_one_is_gone(etcd_url, options):
    options = msgspec.structs.replace(options, endpoints=("http://127.0.0.1:1", etcd_url))
    etcd = EtcdClient(options)
    with pytest.raises(MembershipError, match=r"http://127\.0\.0\.1:1: "):
        etcd.grant(10)
    assert etcd.grant(10) > 0


def test_a_prefix_that_begins_with_another_is_a_separate_pool(options, heard, closing):
    other = msgspec.structs.replace(options, prefix=f"{options.prefix}-2")
    theirs, source = ReportedViews(), EtcdSource(other)
    closing.append(source)
    source.watch(theirs)
    closing.append(EtcdRegistration(other, B))
    theirs.until(lambda members: ids(members) == ["flash-b"])
    closing.append(EtcdRegistration(options, A))
    heard.until(lambda members: ids(members) == ["flash-a"])
    assert not any("flash-b" in ids(members) for members in heard.lists)


@pytest.mark.parametrize(
    ("member", "ttl_s", "said"),
    [
        (msgspec.structs.replace(A, weight=-1.0), 10, "member.weight: -1.0 is not above 0"),
        (A, 0, "lease of 0 s: not from 2 to 300 s"),
    ],
)
def test_a_member_that_watchers_reject_is_not_registered(member, ttl_s, said):
    with pytest.raises(MembershipError, match=said.replace(".", r"\.")):
        EtcdRegistration(EtcdOptions(endpoints=("http://127.0.0.1:1",)), member, ttl_s)


def test_no_endpoints_is_refused():
    with pytest.raises(MembershipError, match="no endpoints"):
        EtcdSource(EtcdOptions(endpoints=()))


class Snapshots:
    """An etcd that has what the test says, and reports no changes."""

    def __init__(self):
        self.entries = []

    def snapshot(self, _prefix):
        return EtcdSnapshot(_Header(), self.entries)

    def changes(self, *_):
        return iter(())


def test_a_bad_entry_is_remembered_no_longer_than_its_key():
    source = EtcdSource(EtcdOptions(endpoints=("http://127.0.0.1:1",), prefix="/p"))
    source._on_members, source._etcd = ReportedViews(), Snapshots()
    source._apply([EtcdEntry(f"/p/{name}".encode(), b"not JSON") for name in "abc"])
    source._apply([EtcdEntry(b"/p/a", None)])
    assert source._left_out.keys() == {b"/p/b", b"/p/c"}
    source._etcd.entries = [EtcdEntry(b"/p/b", b"not JSON")]
    source._one_round()
    assert source._left_out.keys() == {b"/p/b"}
