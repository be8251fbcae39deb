"""The list of fault campaigns, with the budget and the result that all of them use.

A campaign repeats one kind of fault and counts the outcomes. The payload of a test block is a
function of its key, so every byte read can be checked without a record of what was saved. After a
wrong byte the campaign continues; `failures` names the round, which the seed can repeat.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROUNDS_A_TRY = 8
ROUNDS_MORE = 50
"""At most `ROUNDS_A_TRY` rounds for each try ordered, plus `ROUNDS_MORE`, so that a campaign whose
rounds have no effect ends."""

FAILURES_KEPT = 20
"""Failures whose message is kept; further ones are only counted."""

FORCED_SWITCH_S = 0.0005
"""Interpreter switch interval, the same as a node's: a thread gets the GIL soon after I/O."""


class CampaignResult:
    """The counts of one part of a campaign: tries, failures, and counts by name for the report."""

    def __init__(self, what: str, unit: str) -> None:
        self.what = what
        self.unit = unit
        self.tried = 0
        self.failed = 0
        self.skipped = ""
        """Why the part was skipped, "" if it was not."""
        self.each_may_fail = True
        """Whether each try has a verdict of its own, so that a failure rate can be estimated."""
        self.counts: Counter[str] = Counter()
        self.figures: dict[str, float] = {}
        self.failures: list[str] = []

    def fail(self, message: str) -> None:
        self.failed += 1
        if len(self.failures) < FAILURES_KEPT:
            self.failures.append(message)

    def expect(self, condition: object, message: str) -> None:
        if not condition:
            self.fail(message)

    def longest(self, name: str, seconds: float) -> None:
        """Record the longest of some times as a figure, `NAME_longest_s`."""
        key = f"{name}_longest_s"
        self.figures[key] = max(self.figures.get(key, 0.0), seconds)


def selects(part: str, what: str) -> bool:
    """Whether a part such as `flips.sealed` selects the result `what`, such as `flips.sealed.disk`.

    A part is the name of a result, or the beginning of one up to a dot.
    """
    return f"{what}.".startswith(f"{part}.")


class CampaignBudget(NamedTuple):
    """How many tries each result gets, for how long, and from which seed.

    `seconds` count from the first round of each result. `folder` is for files. `on_progress` is
    called after each round; when `stopped` returns true, no round begins. `part` selects results by
    name or prefix (`flips.wire`, `flips.sealed`), "" selects all; with `whole`, the selected part
    gets all of the tries and the time instead of its share.
    """

    tries: int
    seed: int
    folder: Path
    seconds: float = float("inf")
    on_progress: Callable[[CampaignResult], None] = lambda _: None
    stopped: Callable[[], bool] = lambda: False
    part: str = ""
    whole: bool = False

    def wants(self, what: str) -> bool:
        """Whether `part` selects the result of this name."""
        return not self.part or selects(self.part, what)

    def rounds(self, result: CampaignResult) -> Iterator[random.Random]:
        """Yield the random generator of each round until the tries or the time are used up.

        Round `n` of a seed does not depend on earlier rounds, as far as the code allows. If most
        rounds make no try, the rounds end early with a failure.
        """
        if not self.wants(result.what):
            return
        number = 0
        until = time.monotonic() + self.seconds
        while result.tried < self.tries and time.monotonic() < until and not self.stopped():
            if number >= ROUNDS_A_TRY * self.tries + ROUNDS_MORE:
                result.fail(f"{number} rounds made only {result.tried} {result.unit}")
                return
            seed = f"{self.seed}/{result.what}/{number}"
            yield random.Random(seed)  # noqa: S311 - rounds must replay
            number += 1
            self.on_progress(result)

    def expect_enough(self, result: CampaignResult, condition: object, message: str) -> None:
        """Count a failure if the campaign did too little for a verdict and was not interrupted."""
        if not self.stopped():
            result.expect(condition, message)

    def share(self, parts: float) -> CampaignBudget:
        """Return the budget of one of `parts` equal parts of a campaign: its tries and time."""
        if self.whole:
            return self
        return self._replace(tries=max(1, round(self.tries / parts)), seconds=self.seconds / parts)


class Campaign(NamedTuple):
    """One campaign: its name, a description, and the number of tries in `make soak`.

    The module of that name has a function `run` that takes a `CampaignBudget` and yields each
    result when it is complete. `parts`: the names of the results, without that of the campaign;
    empty for a single result.
    """

    name: str
    about: str
    tries: int
    unit: str
    parts: tuple[str, ...] = ()

    def results(self) -> list[str]:
        """Return the full names of the results, in the order in which `run` yields them."""
        return [f"{self.name}.{part}" for part in self.parts] or [self.name]


CAMPAIGNS = (
    Campaign(
        "flips",
        "damage to stored and sent records, on every tier",
        800_000,
        "faults",
        ("host", "disk", "pool", "sealed.disk", "sealed.pool", "wire"),
    ),
    Campaign("reopened", "damage to a disk that is opened again", 200_000, "faults"),
    Campaign(
        "torn",
        "every subset of sectors that a power cut may leave",
        1_000_000,
        "states",
        ("every", "random", "killed"),
    ),
    Campaign(
        "crash", "kill -9 at every failpoint and at random", 10_000, "kills", ("store", "node")
    ),
    Campaign("durable", "kill -9 right after an acknowledged `sync`", 1_000, "kills"),
    Campaign(
        "injected",
        "EIO, ENOSPC, short transfers: tiers, system calls",
        200_000,
        "faults",
        ("tier", "medium", "calls"),
    ),
    Campaign(
        "forged",
        "forged, replayed, cross-domain, other-fingerprint requests",
        1_250_000,
        "tries",
        ("domains", "fingerprints", "tokens"),
    ),
    Campaign(
        "timing",
        "whether response times reveal what another domain holds",
        80_000,
        "samples",
        ("store", "store.control", "target", "target.control"),
    ),
    Campaign(
        "fuzz",
        "mutated frames, messages, envelopes, regions and settings",
        2_000_000,
        "inputs",
        (
            "requests",
            "replies",
            "target.requests",
            "target.replies",
            "envelope",
            "region",
            "token",
            "members",
            "config",
        ),
    ),
    Campaign(
        "locks",
        "two domains that take page-locked memory from each other",
        2_000_000,
        "blocks",
    ),
    Campaign(
        "chaos",
        "targets of a pool killed, stopped, late, mute, cut off, lying",
        900,
        "faults",
        ("faults", "calls", "blocks"),
    ),
)
"""Every campaign in the order they run; `holdfast_bench.campaigns.NAME` is its module."""
