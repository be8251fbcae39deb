"""What the connections of a target share is shared between domains too."""

import contextlib
import threading
from typing import NamedTuple

import pytest

from holdfast.blocks.envelope import read_header
from holdfast.blocks.namespace import Namespace, domain_id
from holdfast.errors import Outcome
from holdfast.limits import MIB
from holdfast.node.remote.service import STAGED_MAX, TargetService
from holdfast.store.lookup import HeldPrefix
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.testing.payloads import key_of, record_of

PEERS = StoreOptions(serves_peers=True)


class Lent(NamedTuple):
    """What `fetch_unverified` returns, as far as staging minds."""

    lease: bool


NAMESPACE = Namespace(b"f" * 16, b"d" * 16, 1024, 16)
A, B = domain_id(b"a" * 32), domain_id(b"b" * 32)


def put(store, record):
    berths = store.receive_slots([read_header(record)[0]])
    berths[0].slot[:] = record
    assert store.publish_received(berths) == [Outcome.OK]


@pytest.fixture
def service():
    with Store(
        4 * MIB,
        [],
        {"default": b"s" * 32, "a": b"a" * 32, "b": b"b" * 32},
        StoreOptions(serves_peers=True),
    ) as store:
        store.start()
        made = TargetService(store)
        yield made
        made.close()


def test_several_domains_share_what_may_be_under_way(service):
    """Of 2 MiB in all: one alone may have it all, beside others a half, and each one message."""
    with service.receiving(MIB, A) as first, service.receiving(MIB, A) as second:
        assert first
        assert second
        with service.receiving(MIB, A) as third, service.receiving(MIB, B) as other:
            assert not third
            assert other
            with service.receiving(1, B) as more:
                assert not more
    with service.receiving(1, B), service.receiving(MIB, A) as again:
        assert again
        with service.receiving(1, A) as more:
            assert not more
    with service.receiving(2 * MIB, A) as all_of_it:
        assert all_of_it


def test_names_that_are_made_up_have_no_more_room_than_one_domain(service):
    with contextlib.ExitStack() as stack:
        names = [bytes([i]) * 16 for i in range(20)]
        granted = [stack.enter_context(service.receiving(MIB // 4, name)) for name in names]
        assert sum(granted) == 8
        assert stack.enter_context(service.receiving(MIB, A))
        assert not stack.enter_context(service.receiving(1, B)), "half as much again, and no more"


def test_a_domain_whose_records_are_here_is_no_stranger(service):
    stranger, guest = b"x" * 16, NAMESPACE._replace(domain=b"g" * 16)
    with service.receiving(2 * MIB, stranger):
        with service.receiving(1, guest.domain) as first:
            assert not first
        put(service.store, record_of(guest, key_of(1)))
        with service.receiving(1, guest.domain) as again:
            assert again


def test_leases_that_are_asked_for_together_have_no_more_than_one_after_the_other(service):
    """Of 1 MiB in all: what one may take yet is set aside before it climbs."""
    with service.leasing(MIB // 2, 60) as first, service.leasing(MIB, 60) as second:
        assert (first.granted, second.granted) == (MIB // 2, MIB // 2)
        with service.leasing(1, 60) as third:
            assert third.granted == 0
        first.taken = MIB // 4
    with service.leasing(MIB, 60) as rest:
        assert rest.granted == MIB - MIB // 4, "what was not taken went back"


def test_one_domain_can_not_fill_the_line_of_what_is_to_be_staged(service, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(service.store, "cover", lambda *_: HeldPrefix(1, {}))
    monkeypatch.setattr(service.store, "fetch_unverified", lambda *_: Lent(gate.wait(60)))
    monkeypatch.setattr(service.store, "release", lambda *_: True)
    try:
        asked = [service.stage(NAMESPACE, [b"k" * 16]) for _ in range(STAGED_MAX + 5)]
        assert sum(asked) == STAGED_MAX
        assert service.stage(NAMESPACE._replace(domain=b"o" * 16), [b"k" * 16]) == 1
    finally:
        gate.set()


def test_what_nobody_can_stage_does_not_count_as_waiting(service, monkeypatch):
    monkeypatch.setattr(service.store, "cover", lambda *_: HeldPrefix(1, {}))
    with monkeypatch.context() as scarce:

        def refuse(_):
            raise RuntimeError("can't start new thread")

        scarce.setattr(threading.Thread, "start", refuse)
        assert [service.stage(NAMESPACE, [b"k" * 16]) for _ in range(STAGED_MAX + 1)][-1] == 0
    monkeypatch.setattr(service.store, "fetch_unverified", lambda *_: Lent(True))
    monkeypatch.setattr(service.store, "release", lambda *_: True)
    assert service.stage(NAMESPACE, [b"k" * 16]) == 1
