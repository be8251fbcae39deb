"""The contract of eviction policies finds memory that grows with the calls, wherever it is."""

from collections import OrderedDict, deque

import pytest

from holdfast.testing.policy_contract import EvictionContract, _items


class Oldest:
    """Evicts the row that was inserted first, and keeps its rows in a slot."""

    __slots__ = ("_rows",)

    def __init__(self):
        self._rows = OrderedDict()

    def insert(self, rows, parents, names, now_s):
        self._rows |= dict.fromkeys(rows)

    def touch(self, rows, now_s):
        pass

    expect = touch

    def remove(self, row):
        self._rows.pop(row, None)

    def forget(self, row):
        pass

    def victims(self, now_s):
        return list(self._rows)


class Hoarder(Oldest):
    """Remembers every touch, in a deque in a slot of another object."""

    __slots__ = ("_log",)

    def __init__(self):
        super().__init__()
        self._log = Log()

    def touch(self, rows, now_s):
        self._log.touched.append(tuple(rows))


class Log:
    __slots__ = ("touched",)

    def __init__(self):
        self.touched = deque()


def test_a_policy_with_slots_is_measured_too():
    contract = EvictionContract()
    contract.make = Oldest
    contract.test_memory_follows_the_rows_and_not_the_calls()


def test_a_policy_that_remembers_every_call_breaks_the_contract():
    contract = EvictionContract()
    contract.make = Hoarder
    with pytest.raises(AssertionError):
        contract.test_memory_follows_the_rows_and_not_the_calls()


def test_items_are_counted_once_in_every_kind_of_container():
    shared = [1, 2, 3]
    assert _items([shared, shared, {4, 5}, deque([6]), {"a": (7, 8)}]) == 5 + 3 + 2 + 1 + 1 + 2
