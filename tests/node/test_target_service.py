"""What the connections of a target share is shared between domains too."""

import threading
from typing import NamedTuple

import pytest

from holdfast.blocks.world import World
from holdfast.limits import MIB
from holdfast.node.target_service import STAGED_MAX, Service
from holdfast.store.cover import Covered
from holdfast.store.store import Store


class Lent(NamedTuple):
    """What `lend` returns, as far as staging minds."""

    lease: bool


WORLD = World(b"f" * 16, b"d" * 16, 1024, 16)


@pytest.fixture
def service():
    with Store(4 * MIB, [], {"default": b"s" * 32}) as store:
        store.start()
        store.take_foreign()
        made = Service(store)
        yield made
        made.close()


def test_several_domains_share_what_may_be_under_way(service):
    """Of 2 MiB in all: one alone may have it all, beside others a half, and each one message."""
    with service.receiving(MIB, b"a") as first, service.receiving(MIB, b"a") as second:
        assert first
        assert second
        with service.receiving(MIB, b"a") as third, service.receiving(MIB, b"b") as other:
            assert not third
            assert other
            with service.receiving(1, b"b") as more:
                assert not more
    with service.receiving(1, b"b"), service.receiving(MIB, b"a") as again:
        assert again
        with service.receiving(1, b"a") as more:
            assert not more
    with service.receiving(2 * MIB, b"a") as all_of_it:
        assert all_of_it


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
    monkeypatch.setattr(service.store, "cover", lambda *_: Covered(1, {}))
    monkeypatch.setattr(service.store, "lend", lambda *_: Lent(gate.wait(60)))
    monkeypatch.setattr(service.store, "release", lambda *_: True)
    try:
        asked = [service.stage(WORLD, [b"k" * 16]) for _ in range(STAGED_MAX + 5)]
        assert sum(asked) == STAGED_MAX
        assert service.stage(WORLD._replace(domain=b"o" * 16), [b"k" * 16]) == 1
    finally:
        gate.set()


def test_what_nobody_can_stage_does_not_count_as_waiting(service, monkeypatch):
    monkeypatch.setattr(service.store, "cover", lambda *_: Covered(1, {}))
    with monkeypatch.context() as scarce:

        def refuse(_):
            raise RuntimeError("can't start new thread")

        scarce.setattr(threading.Thread, "start", refuse)
        assert [service.stage(WORLD, [b"k" * 16]) for _ in range(STAGED_MAX + 1)][-1] == 0
    monkeypatch.setattr(service.store, "lend", lambda *_: Lent(True))
    monkeypatch.setattr(service.store, "release", lambda *_: True)
    assert service.stage(WORLD, [b"k" * 16]) == 1
