"""Apart: one eviction order for each domain, where it is decided first which domain gives way.

A domain's least valuable block is then found at once, however many blocks of others are worth less.
Every order has rows numbered by its own, so all of them together take what one would, and 8 bytes a
row more.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Hashable, Sequence

from holdfast.policy.base import Eviction, Weighing

_NOT_KNOWN = -1


class _Order:
    """One domain's policy, and which row of the index each of its own rows is."""

    def __init__(self, policy: Eviction) -> None:
        self.policy = policy
        self.rows = array("i")
        self.free: list[int] = []


class Apart:
    """Policies made by `make`, one for each value of `whose`, which names the domain of a row."""

    def __init__(self, make: Callable[[], Eviction], whose: Callable[[int], bytes]) -> None:
        self._make = make
        self._whose = whose
        self._orders: dict[bytes, _Order] = {}
        self._numbers = array("i")
        self._worth: Callable[[int], float] | None = None

    def insert(
        self, rows: Sequence[int], parents: Sequence[int], names: Sequence[Hashable], now_s: float
    ) -> None:
        """Add rows to their domain's order; what is in front of a row is of its domain."""
        end = len(rows)
        while end:  # mostly one domain; from the last one's to the first one's
            whose = self._whose(rows[end - 1])
            begin = end - 1
            while begin and self._whose(rows[begin - 1]) == whose:
                begin -= 1
            order, number = self._order(rows[begin]), self._number
            mine: list[int] = []
            fronts: list[int] = []
            for each in range(end - 1, begin - 1, -1):
                fronts.append(number(order, parents[each]) if parents[each] >= 0 else _NOT_KNOWN)
                mine.append(number(order, rows[each]))
            order.policy.insert(mine[::-1], fronts[::-1], names[begin:end], now_s)
            end = begin

    def touch(self, rows: Sequence[int], now_s: float) -> None:
        """Note one use of a chain's leading rows."""
        if rows:
            self._order(rows[0]).policy.touch(self._known(rows), now_s)

    def pass_by(self, row: int, now_s: float) -> None:
        """Put a row in use behind the others of its domain."""
        number = self._find(row)
        if number >= 0:
            self._order(row).policy.pass_by(number, now_s)

    def expect(self, rows: Sequence[int], at_s: float) -> None:
        """Note when a chain is needed again."""
        if rows:
            self._order(rows[0]).policy.expect(self._known(rows), at_s)

    def remove(self, row: int) -> None:
        """Take a row out."""
        number = self._find(row)
        if number >= 0:
            self._order(row).policy.remove(number)

    def forget(self, row: int) -> None:
        """Note that a row names no block any more; so does its number."""
        number = self._find(row)
        if number >= 0:
            order = self._order(row)
            order.policy.forget(number)
            order.free.append(number)
            self._numbers[row] = _NOT_KNOWN

    def victims(self, now_s: float) -> Generator[int, None, None]:
        """Yield the rows of one domain after the other."""
        for whose in list(self._orders):
            yield from self.victims_of(whose, now_s)

    def victims_of(self, whose: bytes, now_s: float) -> Generator[int, None, None]:
        """Yield a domain's rows, least valuable first; as for `victims`."""
        order = self._orders.get(whose)
        if order is not None:
            for number in order.policy.victims(now_s):
                yield order.rows[number]

    def weigh_by(self, worth: Callable[[int], float]) -> None:
        """Have every order that weighs ask this what a row is worth."""
        self._worth = worth
        for order in self._orders.values():
            self._weigh(order)

    def _order(self, row: int) -> _Order:
        whose = self._whose(row)
        order = self._orders.get(whose)
        if order is None:
            order = self._orders[whose] = _Order(self._make())
            self._weigh(order)
        return order

    def _weigh(self, order: _Order) -> None:
        worth = self._worth
        if worth is not None and isinstance(order.policy, Weighing):
            order.policy.weigh_by(lambda number: worth(order.rows[number]))

    def _find(self, row: int) -> int:
        return self._numbers[row] if 0 <= row < len(self._numbers) else _NOT_KNOWN

    def _known(self, rows: Sequence[int]) -> list[int]:
        return [number for row in rows if (number := self._find(row)) >= 0]

    def _number(self, order: _Order, row: int) -> int:
        """Return a row's number in its order, given now if it has none."""
        if row >= len(self._numbers):
            missing = row + 1 - len(self._numbers) + (len(self._numbers) >> 3)
            self._numbers.extend([_NOT_KNOWN] * missing)
        number = self._numbers[row]
        if number < 0:
            if order.free:
                number = order.free.pop()
                order.rows[number] = row
            else:
                number = len(order.rows)
                order.rows.append(row)
            self._numbers[row] = number
        return number
