"""What the connections of a target share is shared between domains too."""

import contextlib

import pytest

from holdfast.blocks.envelope import read_header
from holdfast.blocks.namespace import Namespace, domain_id
from holdfast.errors import Outcome
from holdfast.limits import MIB
from holdfast.node.remote.service import TargetService
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.testing.payloads import key_of, record_of

PEERS = StoreOptions(serves_peers=True)


NAMESPACE = Namespace(b"f" * 16, b"d" * 16, 1024, 16)
A, B = domain_id(b"a" * 32), domain_id(b"b" * 32)


def put(store, record):
    slots = store.receive_slots([read_header(record)[0]])
    slots[0].slot[:] = record
    assert store.publish_received(slots) == [Outcome.OK]


@pytest.fixture
def service():
    with Store(
        4 * MIB,
        [],
        {"default": b"s" * 32, "a": b"a" * 32, "b": b"b" * 32},
        StoreOptions(serves_peers=True),
    ) as store:
        store.start()
        yield TargetService(store)


def test_domains_share_the_receive_budget(service):
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


def test_unknown_domains_together_get_the_receive_budget_of_one_domain(service):
    with contextlib.ExitStack() as stack:
        names = [bytes([i]) * 16 for i in range(20)]
        granted = [stack.enter_context(service.receiving(MIB // 4, name)) for name in names]
        assert sum(granted) == 8
        assert stack.enter_context(service.receiving(MIB, A))
        assert not stack.enter_context(service.receiving(1, B)), "half as much again, and no more"


def test_a_domain_with_stored_records_counts_as_known(service):
    stranger, guest = b"x" * 16, NAMESPACE._replace(domain=b"g" * 16)
    with service.receiving(2 * MIB, stranger):
        with service.receiving(1, guest.domain) as first:
            assert not first
        put(service.store, record_of(guest, key_of(1)))
        with service.receiving(1, guest.domain) as again:
            assert again
