"""Tries members that are half open or back from an ejection, so that no user's request has to."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.tiers.pool.health import PoolHealth
from holdfast.tiers.pool.lookup import Lookup
from holdfast.tiers.pool.reach import Reach
from holdfast.tiers.pool.rounds import Rounds

TRIAL_S = 0.25
"""How often to look for somebody to try."""


class Trials:
    """A thread that asks members how they are while they are half open or back from an ejection.

    `keep` is called before each look: it says who the members are by then.
    """

    def __init__(
        self,
        lookup: Lookup,
        health: PoolHealth,
        reach: Reach,
        ask_s: float,
        keep: Callable[[], None],
    ) -> None:
        self._lookup = lookup
        self._health = health
        self._reach = reach
        self._ask_s = ask_s
        self._keep = keep
        self._rounds = Rounds("trials of pool members", self.hold, TRIAL_S, TRIAL_S)

    def start(self) -> None:
        """Start the thread."""
        self._rounds.start()

    def close(self) -> None:
        """Stop, after the trial under way."""
        self._rounds.close()

    def hold(self) -> None:
        """Try everybody who is due, until they are up or fail again."""
        self._keep()
        untried = set(self._health.untried())
        for member in self._lookup.members() if untried else ():
            while member.id in untried and not self._rounds.closing.is_set():
                call = self._reach.begin(member, 0, self._lookup.route(bytes(8)).digest)
                if self._reach.tell(call, lambda far: far.stats(self._ask_s)) is None:
                    break
                untried = set(self._health.untried())
