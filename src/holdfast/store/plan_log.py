"""The last plans of a store: what each expected, and how it ended.

It has a lock of its own, as the estimates have. No I/O.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from holdfast.clock import Clock
from holdfast.errors import NotFollowed
from holdfast.plan.planner import Plan
from holdfast.status import PlanAccuracy, PlansStatus, PlanStatus, PlanTimes
from holdfast.store.activity import Activity
from holdfast.store.estimates import EngineId

PLANS_KEPT = 256
PLAN_NUMBER_BITS = 53
"""Random bits of a plan's number: what a JSON number holds exactly."""

_ROUGHLY_RIGHT = 0.25


class PlanEnding(NamedTuple):
    """How a plan ended: seconds until all was loaded and until the first token; 0: not known."""

    plan: int
    loaded_s: float
    first_token_s: float


class Delivery(NamedTuple):
    """How long an engine took to load fetched bytes of the node's memory into its pages."""

    nbytes: int
    seconds: float


@dataclass
class PlanRecord:
    """One plan: its question, its expectation and its outcome. Times in seconds.

    `first_block`: the first block that the engine does not have. `not_followed`: why the plan was
    not carried out; None if it was, or if its end is not known yet.
    """

    engine: EngineId
    prompt_tokens: int
    have_tokens: int
    held: int
    plan: Plan
    block_bytes: int
    number: int = 0
    at: float = 0.0
    landed: int | None = None
    fetched_s: float | None = None
    outcome: str = ""
    first_token_s: float | None = None
    first_block: int = 0
    not_followed: NotFollowed | None = None


class PlanLog:
    """The last `PLANS_KEPT` plans; `activity` counts how plans end. Thread-safe."""

    def __init__(self, clock: Clock, activity: Activity) -> None:
        self._clock = clock
        self._activity = activity
        self._lock = threading.Lock()
        self._plans: OrderedDict[int, PlanRecord] = OrderedDict()

    def add(self, record: PlanRecord, instead_of: int = 0) -> int:
        """Record a plan and return its number. `instead_of`: the plan that it replaces."""
        with self._lock:
            if self._own(instead_of, record.engine):
                del self._plans[instead_of]
            # A random number: a counter would reveal to a session how much others plan.
            number = 0
            while not number or number in self._plans:
                number = secrets.randbits(PLAN_NUMBER_BITS)
            record.number, record.at = number, self._clock.now()
            self._plans[number] = record
            while len(self._plans) > PLANS_KEPT:
                self._plans.popitem(last=False)
            return number

    def fetched(
        self, engine: EngineId, number: int, blocks: int, seconds: float, outcome: str
    ) -> None:
        """Record the result of a plan's fetch; of several ranks the slowest counts."""
        with self._lock:
            record = self._own(number, engine)
            if record is not None and seconds >= (record.fetched_s or 0.0):
                if record.not_followed is NotFollowed.NOT_FETCHED:
                    record.not_followed = None  # the engine had stopped waiting for it
                record.landed, record.fetched_s, record.outcome = blocks, seconds, outcome

    def ended(self, engine: EngineId, ending: PlanEnding) -> Delivery | None:
        """Record what the engine saw of a plan; return how it loaded the fetched blocks.

        Returns None if it loaded none, or did not carry out the plan.
        """
        with self._lock:
            record = self._own(ending.plan, engine)
            if record is None:
                return None
            if record.not_followed is NotFollowed.GONE:
                record.not_followed = None  # it has come back over another connection
            is_first = record.first_token_s is None
            if ending.first_token_s > 0:
                record.first_token_s = ending.first_token_s
            if record.landed is None and record.plan.blocks > record.first_block:
                record.not_followed = record.not_followed or NotFollowed.NOT_FETCHED
            if is_first and record.first_token_s is not None:
                if record.not_followed is not None:
                    self._activity.plan_not_followed(str(record.not_followed))
                elif record.plan.blocks > record.first_block:
                    self._activity.plan_ended(
                        record.plan.expected_s, record.first_token_s, record.plan.recompute_s
                    )
            nbytes = (record.landed or 0) * record.block_bytes
            after_s = ending.loaded_s - (record.fetched_s or 0.0)
            if record.not_followed is not None or not nbytes or after_s <= 0:
                return None
            return Delivery(nbytes, after_s)

    def not_followed(
        self, engine: EngineId, number: int, why: NotFollowed, first_token_s: float = 0.0
    ) -> None:
        """Note that an engine did not carry out a plan; `first_token_s` 0: there was no token."""
        with self._lock:
            record = self._own(number, engine)
            if record is not None:
                if record.not_followed is None and record.first_token_s is None:
                    self._activity.plan_not_followed(str(why))
                record.not_followed = why
                record.first_token_s = first_token_s if first_token_s > 0 else None

    def engine_gone(self, engine: EngineId, numbers: Iterable[int]) -> None:
        """Record that the connection of these plans ended; plans with a first token stay."""
        with self._lock:
            for number in numbers:
                record = self._own(number, engine)
                if record is not None and record.first_token_s is None:
                    record.not_followed = record.not_followed or NotFollowed.GONE

    def status(self) -> PlansStatus:
        """Return the last plans, newest first, and how often they were right."""
        with self._lock:
            now = self._clock.now()
            plans = [
                PlanStatus(
                    plan=record.number,
                    age_s=now - record.at,
                    engine=record.engine.name,
                    fingerprint=record.engine.fingerprint,
                    prompt_tokens=record.prompt_tokens,
                    have_tokens=record.have_tokens,
                    held_blocks=record.held,
                    blocks=record.plan.blocks,
                    reason=record.plan.reason,
                    expected=PlanTimes(record.plan.fetch_s, record.plan.expected_s),
                    recompute_s=record.plan.recompute_s,
                    deadline_s=record.plan.deadline_s,
                    actual=PlanTimes(record.fetched_s, record.first_token_s),
                    landed_blocks=record.landed,
                    outcome=record.outcome,
                    not_followed=record.not_followed and str(record.not_followed),
                )
                for record in reversed(self._plans.values())
            ]
            return PlansStatus(plans, plan_accuracy(self._plans.values()))

    def _own(self, number: int, engine: EngineId) -> PlanRecord | None:
        """Return a plan if it is that engine's; a peer may send any number."""
        record = self._plans.get(number)
        if record is None or record.engine._replace(fingerprint=engine.fingerprint) != engine:
            return None  # each rank has a fingerprint of its own
        return record


def plan_accuracy(records: Iterable[PlanRecord]) -> PlanAccuracy:
    """Return how many plans ended, and how far their first tokens were from the expected time.

    All figures but the last count only plans that were carried out, whose first token came, and
    whose time was expected: not plans for engines that have not reported their speed.
    """
    not_followed, late, errors = 0, 0, list[float]()
    for record in records:
        if record.not_followed is not None:
            not_followed += 1
        elif record.first_token_s and record.plan.expected_s:
            errors.append(abs(record.first_token_s / record.plan.expected_s - 1.0))
            late += record.outcome == "late"
    return PlanAccuracy(
        ended=len(errors),
        within_25_percent=sum(error <= _ROUGHLY_RIGHT for error in errors),
        median_error=median(errors) if errors else None,
        late=late,
        not_followed=not_followed,
    )
