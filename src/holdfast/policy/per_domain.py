"""Per-domain eviction: one eviction policy per domain, for tiers that choose the domain first.

The least valuable block of a domain is found without a search past other domains' blocks. Each
policy has its own row numbers, so all together take the memory of one policy plus 8 bytes a row.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Generator, Hashable, Sequence

from holdfast.policy.base import EvictionPolicy, Weighing

_NOT_KNOWN = -1


class _DomainOrder:
    """One domain's policy, and the index row of each of its row numbers."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.rows = array("i")
        self.free: list[int] = []


class PerDomainEviction:
    """Policies created by `make`, one per domain; `domain_of` returns the domain of a row.

    The policy of a domain that is not `known` ends with the domain's last block, because peers may
    name any number of domains.
    """

    def __init__(
        self,
        make: Callable[[], EvictionPolicy],
        domain_of: Callable[[int], bytes],
        known: Container[bytes],
    ) -> None:
        self._make = make
        self._domain_of = domain_of
        self._known_domains = known
        self._orders: dict[bytes, _DomainOrder] = {}
        self._numbers = array("i")
        self._worth: Callable[[int], float] | None = None

    def insert(
        self, rows: Sequence[int], parents: Sequence[int], names: Sequence[Hashable], now_s: float
    ) -> None:
        """Add rows to their domain's order; a row's parent is in the same domain."""
        end = len(rows)
        while end:  # one run of rows of a domain at a time, from the end; usually there is one
            domain = self._domain_of(rows[end - 1])
            begin = end - 1
            while begin and self._domain_of(rows[begin - 1]) == domain:
                begin -= 1
            order, number = self._order(rows[begin]), self._number
            own_rows: list[int] = []
            own_parents: list[int] = []
            for each in range(end - 1, begin - 1, -1):
                parent = parents[each]
                own_parents.append(number(order, parent) if parent >= 0 else _NOT_KNOWN)
                own_rows.append(number(order, rows[each]))
            order.policy.insert(own_rows[::-1], own_parents[::-1], names[begin:end], now_s)
            end = begin

    def touch(self, rows: Sequence[int], now_s: float) -> None:
        """Record one use of a chain's leading rows."""
        if numbers := self._known(rows):
            self._order(rows[0]).policy.touch(numbers, now_s)

    def pass_by(self, row: int, now_s: float) -> None:
        """Move a row in use behind the other rows of its domain."""
        number = self._find(row)
        if number >= 0:
            self._order(row).policy.pass_by(number, now_s)

    def expect(self, rows: Sequence[int], at_s: float) -> None:
        """Hint when a chain is needed again."""
        if numbers := self._known(rows):
            self._order(rows[0]).policy.expect(numbers, at_s)

    def remove(self, row: int) -> None:
        """Remove a row."""
        number = self._find(row)
        if number >= 0:
            self._order(row).policy.remove(number)

    def forget(self, row: int) -> None:
        """Forget a removed row, and free its number."""
        number = self._find(row)
        if number >= 0:
            order = self._order(row)
            order.policy.forget(number)
            order.free.append(number)
            self._numbers[row] = _NOT_KNOWN
            domain = self._domain_of(row)
            if len(order.free) == len(order.rows) and domain not in self._known_domains:
                del self._orders[domain]

    def victims(self, now_s: float) -> Generator[int, None, None]:
        """Yield the rows of one domain after the other, each domain's least valuable first.

        There is no order between domains: a store chooses the domain, and calls `victims_of`.
        """
        for domain in list(self._orders):
            yield from self.victims_of(domain, now_s)

    def victims_of(self, domain: bytes, now_s: float) -> Generator[int, None, None]:
        """Yield a domain's rows, least valuable first, under the rules of `victims`."""
        order = self._orders.get(domain)
        if order is not None:
            for number in order.policy.victims(now_s):
                yield order.rows[number]

    def weigh_by(self, worth: Callable[[int], float]) -> None:
        """Set the function of a row's worth in every order that weighs blocks."""
        self._worth = worth
        for order in self._orders.values():
            self._weigh(order)

    def _order(self, row: int) -> _DomainOrder:
        domain = self._domain_of(row)
        order = self._orders.get(domain)
        if order is None:
            order = self._orders[domain] = _DomainOrder(self._make())
            self._weigh(order)
        return order

    def _weigh(self, order: _DomainOrder) -> None:
        worth = self._worth
        if worth is not None and isinstance(order.policy, Weighing):
            order.policy.weigh_by(lambda number: worth(order.rows[number]))

    def _find(self, row: int) -> int:
        return self._numbers[row] if 0 <= row < len(self._numbers) else _NOT_KNOWN

    def _known(self, rows: Sequence[int]) -> list[int]:
        return [number for row in rows if (number := self._find(row)) >= 0]

    def _number(self, order: _DomainOrder, row: int) -> int:
        """Return a row's number in its order, assigning one if it has none."""
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
