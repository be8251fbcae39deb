"""The contract of `policy.base.EvictionPolicy` as tests: two subclasses test one policy.

    class MyMachine(EvictionMachine):
        def make(self): return MyPolicy()

    TestMyMachine = MyMachine.TestCase

    class TestMyPolicy(EvictionContract):
        def make(self): return MyPolicy()

The machine compares a policy with a model under random operations of a store: chains are inserted
completely or in part, used, expected, removed, forgotten and inserted again in other rows; victims
are evicted or skipped. A second policy object gets the same operations, but chains are inserted
block by block from the end; it must return the same victims in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import zip_longest
from typing import NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast.policy.base import NEVER, EvictionPolicy

BLOCKS = 40
"""Number of blocks; `PARENT[i]` is the parent of block `i`, -1 for none."""

PARENT = [-1] + [i - 1 if i % 4 else i // 3 for i in range(1, BLOCKS)]

_FULL = 12
"""Number of inserted chains from which each new one evicts another."""

_blocks = st.integers(0, BLOCKS - 1)


def chain_of(block: int) -> list[int]:
    """Return the blocks from the head of the chain to `block`."""
    chain = [block]
    while PARENT[chain[-1]] >= 0:
        chain.append(PARENT[chain[-1]])
    return chain[::-1]


class _Inserted(NamedTuple):
    block: int
    parent: int
    """The parent block, if its row was known when this block was inserted; else -1."""


class EvictionMachine(RuleBasedStateMachine):
    """Random operations of a store on a policy; subclasses make the policy."""

    def make(self) -> EvictionPolicy:
        """Return a new policy."""
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self.policy = self.make()
        self.stepwise = self.make()
        self.now_s = 0.0
        self.row_of: dict[int, int] = {}
        self.inserted: dict[int, _Inserted] = {}
        self.free = list(range(BLOCKS))

    @rule(block=_blocks, start=st.integers(0, 8))
    def insert(self, block: int, start: int) -> None:
        """Insert a chain from its `start`-th block on; earlier blocks may be absent."""
        chain = chain_of(block)
        for each in chain:
            if each not in self.row_of:
                self.row_of[each] = self.free.pop()
        names = chain[start:]
        rows = [self.row_of[each] for each in names]
        parents = [self.row_of.get(PARENT[each], -1) for each in names]
        self.policy.insert(rows, parents, names, self.now_s)
        for each, row, parent in reversed(list(zip(names, rows, parents, strict=True))):
            self.stepwise.insert([row], [parent], [each], self.now_s)
            if row not in self.inserted:
                self.inserted[row] = _Inserted(each, PARENT[each] if parent >= 0 else -1)
        self._touch([self.row_of[each] for each in chain])

    @rule(block=_blocks)
    def use(self, block: int) -> None:
        """Touch the leading known rows of a chain, inserted or not."""
        self._touch(self._known(block))

    @rule(block=_blocks, in_s=st.sampled_from([-1.0, 0.0, 1.0, 50.0, NEVER]))
    def hint(self, block: int, in_s: float) -> None:
        """Expect a chain soon, late, never, or in the past."""
        for policy in (self.policy, self.stepwise):
            policy.expect(self._known(block), self.now_s + in_s)

    @rule(seconds=st.sampled_from([0.5, 10.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(evicted=st.lists(st.booleans(), max_size=12))
    def evict(self, evicted: list[bool]) -> None:
        """Evict some victims and skip others."""
        seen: set[int] = set()
        for is_evicted, rows in zip(evicted, self._victims(), strict=False):
            self._check(rows, seen)
            if is_evicted:
                self._remove(rows[0])

    @rule(block=_blocks)
    def quarantine(self, block: int) -> None:
        """Remove a row from the middle of its chain; the block keeps the row."""
        row = self.row_of.get(block, -1)
        if row >= 0:
            self._remove(row)

    @rule(block=_blocks)
    def drop(self, block: int) -> None:
        """Remove a block and make its row available to others."""
        row = self.row_of.pop(block, -1)
        if row < 0:
            return
        self._remove(row)
        self.policy.forget(row)
        self.stepwise.forget(row)
        self.free.append(row)
        for at, (each, parent) in self.inserted.items():
            if parent == block:
                self.inserted[at] = _Inserted(each, -1)

    @invariant()
    def yields_leaves_once(self) -> None:
        """A pass without evictions yields each leaf at most once, and only leaves."""
        seen: set[int] = set()
        for rows in self._victims():
            self._check(rows, seen)

    def teardown(self) -> None:
        """Evict all: every inserted row becomes a victim, and no other row."""
        seen: set[int] = set()
        for rows in self._victims():
            self._check(rows, seen)
            self._remove(rows[0])
        assert not self.inserted, f"never returned as victims: {self.inserted}"

    def _victims(self) -> Iterator[tuple[int, int]]:
        """Yield the next victim of both policies; -1 for a policy that has none left."""
        stepwise = self.stepwise.victims(self.now_s)
        return zip_longest(self.policy.victims(self.now_s), stepwise, fillvalue=-1)

    def _touch(self, rows: list[int]) -> None:
        self.policy.touch(rows, self.now_s)
        self.stepwise.touch(rows, self.now_s)

    def _check(self, rows: tuple[int, int], seen: set[int]) -> None:
        row, stepwise = rows
        assert row == stepwise, f"row {row}; with chains inserted block by block: {stepwise}"
        assert row in self.inserted, f"row {row} is not inserted"
        assert row not in seen, f"row {row} was returned twice"
        seen.add(row)
        block = self.inserted[row].block
        children = [at for at, each in self.inserted.items() if each.parent == block]
        assert not children, f"row {row} was returned before its children {children}"

    def _remove(self, row: int) -> None:
        self.policy.remove(row)
        self.stepwise.remove(row)
        self.inserted.pop(row, None)

    def _known(self, block: int) -> list[int]:
        rows = []
        for each in chain_of(block):
            if each not in self.row_of:
                break
            rows.append(self.row_of[each])
        return rows


class EvictionContract:
    """The tests without random operations."""

    def make(self) -> EvictionPolicy:
        """Return a new policy."""
        raise NotImplementedError

    def test_offers_nothing_when_nothing_is_here(self) -> None:
        policy = self.make()
        policy.touch([3], 1.0)
        policy.expect([3], 2.0)
        policy.remove(3)
        policy.forget(3)
        assert list(policy.victims(3.0)) == []

    def test_a_chain_leaves_from_its_end(self) -> None:
        policy = self.make()
        enter(policy, [0, 1, 2, 3], 0.0)
        assert take(policy, 4, 1.0) == [3, 2, 1, 0]

    def test_a_chain_that_comes_back_is_whole_again(self) -> None:
        policy = self.make()
        enter(policy, [0, 1, 2, 3], 0.0)
        take(policy, 3, 1.0)
        enter(policy, [0, 1, 2, 3], 2.0)
        assert take(policy, 4, 3.0) == [3, 2, 1, 0]

    def test_memory_follows_the_rows_and_not_the_calls(self) -> None:
        policy = self.make()
        for turn in range(50):
            self._churn(policy, turn)
        before = _items(policy)
        assert before > 0, "the policy refers to no container"
        for turn in range(50, 500):
            self._churn(policy, turn)
        assert _items(policy) <= 2 * before + 2_000

    def test_what_is_passed_by_is_met_after_the_others(self) -> None:
        """Rows in use are passed by; so are rows that are not inserted."""
        policy = self.make()
        for row in range(8):
            enter(policy, [row], float(row), name=row)
        first = take(policy, 1, 9.0)[0]
        left = [row for row in range(8) if row != first]
        met = next(iter(policy.victims(9.0)))
        for again in range(3):  # one use may not be enough
            policy.pass_by(met, 10.0 + again)
        policy.pass_by(first, 10.0)
        assert next(iter(policy.victims(14.0))) != met
        assert sorted(policy.victims(14.0)) == left

    def _churn(self, policy: EvictionPolicy, turn: int) -> None:
        rows = list(range(8 * (turn % 16), 8 * (turn % 16) + 8))
        enter(policy, rows, float(turn), name=turn)
        for use in range(10):
            policy.touch(rows[:use], float(turn))
            policy.expect(rows[:use], float(turn + use))
        if turn >= _FULL:
            for row in take(policy, 8, float(turn)):
                policy.forget(row)


def enter(policy: EvictionPolicy, rows: list[int], now_s: float = 0.0, name: int = 0) -> None:
    """Insert a chain, head first, as a store does; `name` distinguishes chains."""
    policy.insert(rows, [-1, *rows][: len(rows)], [(name, row) for row in rows], now_s)


def take(policy: EvictionPolicy, count: int, now_s: float = 0.0) -> list[int]:
    """Evict up to `count` victims, as a full store does; return their rows in order."""
    taken: list[int] = []
    for row in policy.victims(now_s):
        policy.remove(row)
        taken.append(row)
        if len(taken) == count:
            break
    return taken


def _items(policy: object) -> int:
    """Return the number of items in all containers that an object refers to, through any object."""
    items, found, left = 0, dict[int, object](), [policy]
    while left:
        value = left.pop()
        if id(value) in found or isinstance(value, str | bytes | range | type):
            continue
        found[id(value)] = value  # kept, so that no other object gets its id
        if isinstance(value, Collection):
            items += len(value)
            left += value.values() if isinstance(value, Mapping) else value
        left += (getattr(value, name) for name in _attributes(value) if hasattr(value, name))
    return items


def _attributes(value: object) -> Iterator[str]:
    """Yield the names of an object's attributes, those in slots of its classes too."""
    yield from getattr(value, "__dict__", ())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        yield from [slots] if isinstance(slots, str) else slots
