"""Every promise of `holdfast.policy.base.Eviction` as a test; a policy proves itself with these.

    class MyMachine(EvictionMachine):
        def make(self): return MyPolicy()

    TestMyMachine = MyMachine.TestCase

    class TestMyPolicy(EvictionContract):
        def make(self): return MyPolicy()

The machine plays a store against a model: chains come in whole or in part, are used, expected,
removed, forgotten and come back in other rows; victims are taken or left. A second policy has
everything happen to it that the first has, but that chains come to it block by block, from the end:
it must give up the same rows in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from itertools import zip_longest
from typing import NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast.policy.base import NEVER, Eviction

BLOCKS = 40
"""Blocks there are: `PARENT[i]` is the block in front of block `i`."""

PARENT = [-1] + [i - 1 if i % 4 else i // 3 for i in range(1, BLOCKS)]

_FULL = 12
"""Chains after which a store is full and one has to leave for one that comes."""

_blocks = st.integers(0, BLOCKS - 1)


def chain_of(block: int) -> list[int]:
    """Return the blocks from the head of the chain to `block`."""
    chain = [block]
    while PARENT[chain[-1]] >= 0:
        chain.append(PARENT[chain[-1]])
    return chain[::-1]


class _Here(NamedTuple):
    block: int
    front: int
    """The block in front, if its row was known when this one came in; else -1."""


class EvictionMachine(RuleBasedStateMachine):
    """A store's rows around a policy, in any order; subclasses make the policy."""

    def make(self) -> Eviction:
        """Return a new policy."""
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self.policy = self.make()
        self.stepwise = self.make()
        self.now_s = 0.0
        self.row_of: dict[int, int] = {}
        self.here: dict[int, _Here] = {}
        self.free = list(range(BLOCKS))

    @rule(block=_blocks, start=st.integers(0, 8))
    def come_in(self, block: int, start: int) -> None:
        """Insert a chain from block number `start` on; the rest may stay away."""
        chain = chain_of(block)
        for each in chain:
            if each not in self.row_of:
                self.row_of[each] = self.free.pop()
        names = chain[start:]
        rows = [self.row_of[each] for each in names]
        fronts = [self.row_of.get(PARENT[each], -1) for each in names]
        self.policy.insert(rows, fronts, names, self.now_s)
        for each, row, front in reversed(list(zip(names, rows, fronts, strict=True))):
            self.stepwise.insert([row], [front], [each], self.now_s)
            if row not in self.here:
                self.here[row] = _Here(each, PARENT[each] if front >= 0 else -1)
        self._touch([self.row_of[each] for each in chain])

    @rule(block=_blocks)
    def use(self, block: int) -> None:
        """Touch the leading rows that the store knows of, here or not."""
        self._touch(self._known(block))

    @rule(block=_blocks, in_s=st.sampled_from([-1.0, 0.0, 1.0, 50.0, NEVER]))
    def hint(self, block: int, in_s: float) -> None:
        """Expect a chain soon, late, never, or before now."""
        for policy in (self.policy, self.stepwise):
            policy.expect(self._known(block), self.now_s + in_s)

    @rule(seconds=st.sampled_from([0.5, 10.0, 100.0]))
    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds

    @rule(taken=st.lists(st.booleans(), max_size=12))
    def make_room(self, taken: list[bool]) -> None:
        """Take some victims and leave others."""
        seen: set[int] = set()
        for take, rows in zip(taken, self._victims(), strict=False):
            self._check(rows, seen)
            if take:
                self._leave(rows[0])

    @rule(block=_blocks)
    def quarantine(self, block: int) -> None:
        """Take a row out from the middle of its chain; it keeps its number."""
        row = self.row_of.get(block, -1)
        if row >= 0:
            self._leave(row)

    @rule(block=_blocks)
    def drop(self, block: int) -> None:
        """Take a block out and give its row to others."""
        row = self.row_of.pop(block, -1)
        if row < 0:
            return
        self._leave(row)
        self.policy.forget(row)
        self.stepwise.forget(row)
        self.free.append(row)
        for at, (each, front) in self.here.items():
            if front == block:
                self.here[at] = _Here(each, -1)

    @invariant()
    def yields_leaves_once(self) -> None:
        """A pass in which nothing is taken yields rows that nothing here builds upon, once each."""
        seen: set[int] = set()
        for rows in self._victims():
            self._check(rows, seen)

    def teardown(self) -> None:
        """Every row that is here is a victim in the end, and no other."""
        seen: set[int] = set()
        for rows in self._victims():
            self._check(rows, seen)
            self._leave(rows[0])
        assert not self.here, f"never offered: {self.here}"

    def _victims(self) -> Iterator[tuple[int, int]]:
        """Yield the next victim of both policies; of one that has none left, -1."""
        stepwise = self.stepwise.victims(self.now_s)
        return zip_longest(self.policy.victims(self.now_s), stepwise, fillvalue=-1)

    def _touch(self, rows: list[int]) -> None:
        self.policy.touch(rows, self.now_s)
        self.stepwise.touch(rows, self.now_s)

    def _check(self, rows: tuple[int, int], seen: set[int]) -> None:
        row, stepwise = rows
        assert row == stepwise, f"row {row}; chains come in block by block: {stepwise}"
        assert row in self.here, f"row {row} is not here"
        assert row not in seen, f"row {row} came twice"
        seen.add(row)
        builds = [at for at, each in self.here.items() if each.front == self.here[row].block]
        assert not builds, f"row {row} went before its children {builds}"

    def _leave(self, row: int) -> None:
        self.policy.remove(row)
        self.stepwise.remove(row)
        self.here.pop(row, None)

    def _known(self, block: int) -> list[int]:
        rows = []
        for each in chain_of(block):
            if each not in self.row_of:
                break
            rows.append(self.row_of[each])
        return rows


class EvictionContract:
    """The promises that need no machine."""

    def make(self) -> Eviction:
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
        for turn in range(50, 500):
            self._churn(policy, turn)
        assert _items(policy) <= 2 * before + 2_000

    def test_what_is_passed_by_is_met_after_the_others(self) -> None:
        """It is in use, as are rows that are not here, which are passed over."""
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

    def _churn(self, policy: Eviction, turn: int) -> None:
        rows = list(range(8 * (turn % 16), 8 * (turn % 16) + 8))
        enter(policy, rows, float(turn), name=turn)
        for use in range(10):
            policy.touch(rows[:use], float(turn))
            policy.expect(rows[:use], float(turn + use))
        if turn >= _FULL:
            for row in take(policy, 8, float(turn)):
                policy.forget(row)


def enter(policy: Eviction, rows: list[int], now_s: float = 0.0, name: int = 0) -> None:
    """Insert a chain, head first, as a store does; `name` tells blocks apart."""
    policy.insert(rows, [-1, *rows][: len(rows)], [(name, row) for row in rows], now_s)


def take(policy: Eviction, count: int, now_s: float = 0.0) -> list[int]:
    """Take up to so many victims out, as a store that needs room; return their rows in order."""
    taken: list[int] = []
    for row in policy.victims(now_s):
        policy.remove(row)
        taken.append(row)
        if len(taken) == count:
            break
    return taken


def _items(value: object) -> int:
    """How many items all containers below an object hold."""
    held = [getattr(value, name) for name in getattr(value, "__dict__", ())]
    if isinstance(value, dict):
        held += [*value.values()]
    elif isinstance(value, list | tuple):
        held += value
    own = len(value) if isinstance(value, Sized) and not isinstance(value, str | bytes) else 0
    return own + sum(_items(each) for each in held if hasattr(each, "__dict__") or _holds(each))


def _holds(value: object) -> bool:
    return isinstance(value, Sized) and not isinstance(value, str | bytes | tuple)
