"""Leases pin rows until they end; a reservation is taken once."""

import pytest

from holdfast.blocks.namespace import Namespace
from holdfast.store.leases import LeaseTable, Reservation
from holdfast.tiers.base import NOWHERE, Place

NAMESPACE = Namespace(b"f" * 32, b"d" * 16, 1_024, 16)


@pytest.fixture
def pins():
    return {}


@pytest.fixture
def leases(pins):
    def pin(rows):
        for row in rows:
            pins[row] = pins.get(row, 0) + 1

    def unpin(rows):
        for row in rows:
            pins[row] -= 1

    return LeaseTable(pin, unpin)


def reservation(domain=b"d" * 16, places=(0, NOWHERE)):
    namespace = NAMESPACE._replace(domain=domain)
    keys = [bytes([i]) * 16 for i in range(len(places))]
    return Reservation(namespace, keys, b"", 0, b"", [Place(place) for place in places], 0)


def test_a_lease_pins_its_rows_until_it_is_released(leases, pins):
    number = leases.lease([1, 2], 10.0)
    assert number in leases
    assert pins == {1: 1, 2: 1}
    assert leases.release(number)
    assert not leases.release(number), "released twice"
    assert pins == {1: 0, 2: 0}


def test_a_shortened_lease_keeps_the_leading_rows(leases, pins):
    number = leases.lease([1, 2, 3], 10.0)
    leases.shorten(number, 1)
    assert pins == {1: 1, 2: 0, 3: 0}
    leases.release(number)
    assert not any(pins.values())


def test_leases_expire_unless_they_are_extended(leases, pins):
    first, second = leases.lease([1], 10.0), leases.lease([2], 10.0)
    assert leases.extend(second, 20.0)
    leases.expire(10.0)
    assert (first in leases, second in leases) == (False, True)
    assert pins == {1: 0, 2: 1}
    assert not leases.extend(first, 20.0)


def test_a_reservation_is_taken_once_and_counts_only_its_slots(leases):
    number = leases.reserve(reservation())
    assert leases.reservations == 1
    taken = leases.take_reservation(number)
    assert taken is not None
    assert taken.nbytes == NAMESPACE.slot_bytes
    assert leases.take_reservation(number) is None


def test_the_end_of_a_domain_ends_its_leases_and_reservations_only(leases, pins):
    domains = {1: b"a", 2: b"b"}
    mine, other = leases.lease([1], 10.0), leases.lease([2], 10.0)
    leases.reserve(reservation(b"a"))
    kept = leases.reserve(reservation(b"b"))
    ended = leases.end_domain(b"a", domains.__getitem__)
    assert [each.namespace.domain for each in ended] == [b"a"]
    assert (mine in leases, other in leases) == (False, True)
    assert pins == {1: 0, 2: 1}
    assert leases.take_reservation(kept) is not None


def test_lease_numbers_are_random_and_counted(leases):
    numbers = {leases.lease([1], 10.0) for _ in range(100)}
    assert len(numbers) == leases.issued == 100
    assert max(numbers) - min(numbers) > 1 << 32
    assert all(0 < number < 1 << 63 for number in numbers)
