"""What every campaign has in common: how much to do, from which seed, and what came of it.

A campaign does one thing to a store many times over and counts. Its oracle needs no history: the
payload of a test block is a function of its key, so every byte read is checked. A campaign that
finds a wrong byte goes on and says so in `failures`, with the round to repeat it.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, TypeAlias

from holdfast.store.store import Store

ROUNDS_A_TRY = 8
ROUNDS_MORE = 50
"""So many rounds at most are made for what was ordered: what does nothing would go on for ever."""

FAILURES_KEPT = 20
"""Failures told in full; more are counted."""

FORCED_SWITCH_S = 0.0005
"""As in a node: threads that come back from I/O get the interpreter soon."""

OpenTarget: TypeAlias = Callable[[Store], AbstractContextManager[str]]
"""Serves a store to other nodes while it is entered; gives its `tcp://` address."""


class Tally:
    """The count of one campaign at one place. `counts` holds what else is worth telling."""

    def __init__(self, what: str, unit: str) -> None:
        self.what = what
        self.unit = unit
        self.tried = 0
        self.failed = 0
        self.skipped = ""
        """Why nothing was done, where that is so."""
        self.each_may_fail = True
        """Whether every try has a verdict, so that few failures in many tries tell of a rate."""
        self.counts: Counter[str] = Counter()
        self.figures: dict[str, float] = {}
        self.failures: list[str] = []

    def fail(self, words: str) -> None:
        """Note something that must never happen."""
        self.failed += 1
        if len(self.failures) < FAILURES_KEPT:
            self.failures.append(words)

    def expect(self, truth: object, words: str) -> None:
        """Note a failure unless this is so."""
        if not truth:
            self.fail(words)


class Order(NamedTuple):
    """What was ordered: how many tries of a tally or for how long, and the seed of all of it.

    `seconds` count from the first round of each tally. `folder` is for files, `target` opens a
    target; `said` is told how far it is; once `stopped`, no round begins. `part` names the tallies
    that are wanted (`flips.wire`, `flips.sealed`), "" all; with `whole` that part gets all of the
    tries and the time, not its share.
    """

    tries: int
    seed: int
    folder: Path
    target: OpenTarget
    seconds: float = float("inf")
    said: Callable[[Tally], None] = lambda _: None
    stopped: Callable[[], bool] = lambda: False
    part: str = ""
    whole: bool = False

    def wants(self, what: str) -> bool:
        """Whether this tally was ordered."""
        return not self.part or f"{what}.".startswith(f"{self.part}.")

    def rounds(self, tally: Tally) -> Iterator[random.Random]:
        """Yield the dice of one round after the other until there was enough of it.

        Round `n` of a seed is the same whatever came before it, as far as the code allows. Where
        rounds come to nothing, they end after some, and that is a failure.
        """
        if not self.wants(tally.what):
            return
        number = 0
        until = time.monotonic() + self.seconds
        while tally.tried < self.tries and time.monotonic() < until and not self.stopped():
            if number >= ROUNDS_A_TRY * self.tries + ROUNDS_MORE:
                tally.fail(f"{number} rounds, and no more than {tally.tried} {tally.unit}")
                return
            yield self.dice(tally.what, number)
            number += 1
            self.said(tally)

    def expect_enough(self, tally: Tally, truth: object, words: str) -> None:
        """Note a failure unless so much was done that it tells something, or it was broken off."""
        if not self.stopped():
            tally.expect(truth, words)

    def dice(self, what: str, number: int) -> random.Random:
        """Return the dice of one round."""
        return random.Random(f"{self.seed}/{what}/{number}")  # noqa: S311 - rounds must replay

    def share(self, parts: float) -> Order:
        """Return the order for one of so many parts of a campaign; time is shared, too."""
        if self.whole:
            return self
        return self._replace(tries=max(1, round(self.tries / parts)), seconds=self.seconds / parts)


class Campaign(NamedTuple):
    """One campaign: its name, what it is about, how much `make soak` asks of it, and the code.

    `module` has a function `run` that takes an `Order` and yields tallies, each when it is done.
    """

    name: str
    about: str
    tries: int
    unit: str


CAMPAIGNS = (
    Campaign("flips", "damage to stored and sent records, on every tier", 800_000, "faults"),
    Campaign("reopened", "damage to a disk that is opened again", 200_000, "faults"),
    Campaign("torn", "every subset of sectors that a power cut may leave", 1_000_000, "states"),
    Campaign("crash", "kill -9 at every failpoint and at random", 10_000, "kills"),
    Campaign("injected", "EIO, ENOSPC, short transfers: tiers, system calls", 200_000, "faults"),
    Campaign(
        "forged", "forged, replayed, cross-domain, other-fingerprint asks", 1_250_000, "tries"
    ),
    Campaign("timing", "whether time betrays what another domain holds", 80_000, "samples"),
    Campaign(
        "fuzz", "mutated frames, messages, envelopes, regions and settings", 2_000_000, "inputs"
    ),
    Campaign(
        "chaos", "targets of a pool killed, stopped, late, mute, cut off, lying", 900, "faults"
    ),
)
"""Every campaign, in the order they run; `holdfast.testing.NAME` holds each."""
