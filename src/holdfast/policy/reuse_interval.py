"""Admission by reuse interval: admit classes of blocks that return within a break-even interval.

Gray and Putzolu's five-minute rule ("The 5 Minute Rule for Trading Memory for Disc Accesses",
SIGMOD 1987; revisited 1997, 2007 and 2019) puts a page in the faster of two media if it is needed
again within a break-even interval. They derive it from prices; this rule derives it from the given
capacity of the faster tier, and from the measured time that a read from it saves over the tier
below. The break-even interval is that of the last class that fits.

A sample of each class's blocks is watched for the time from a use to the next one (the
product-limit estimate of Kaplan and Meier, JASA 1958, because most blocks have not returned yet). A
tier that keeps every block for a residency T after its use serves the share G(T) of the class's
next uses, and occupies space for m(T) seconds on average, so a served use costs m / G seconds of
space. For each T, classes are admitted in the order of cost until the tier is full, the last one in
part. The T that saves the most time is chosen.

Pure: no clock, no I/O, no randomness; a share of a class is drawn by the blocks' names.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from holdfast.policy.admit import Admission, AdmissionCandidate

FIRST_S = 0.25
BUCKETS = 25
"""Buckets of age double in length: from a quarter of a second to seven weeks."""

_ENDS = [FIRST_S * 2.0**number for number in range(BUCKETS)]
_WIDTHS = [end - start for start, end in itertools.pairwise([0.0, *_ENDS])]
_DECIDE_S = 10.0
_RATE_S = 1_800.0
"""Time constant of the moving average of a class's rate of use."""
_CLASSES_MAX = 256
_KNOWN = 8.0
"""Watched uses before a class is judged; until then it is admitted."""
_COUNTS_MAX = 4_096.0
_PRIOR_RETURNS = 0.02
"""Returns added to every age bucket, so that spare capacity goes to classes without returns."""
_FILLED = 0.9
"""Share of the capacity to plan for, because a cycle one block too long for a tier never hits."""
_EQUAL = 0.002
"""Relative difference below which savings are equal, and the setting that writes less is chosen."""
_TRIED = 64
"""One in this many names is admitted to a tier without a measured gain, to measure it again."""
_DRAW_MAX = 0xFFFF_FFFF


class ServedInterval(NamedTuple):
    """The effect of a residency on a class.

    `part`: share of its uses served. `spent_s`: mean time that a block occupies space. `worth`:
    seconds saved per byte served. `bytes_per_s`: rate of use.
    """

    group: Hashable
    part: float
    spent_s: float
    worth: float
    bytes_per_s: float

    @property
    def interval_s(self) -> float:
        """Seconds of space per use served, to be compared with the break-even interval."""
        return self.spent_s / self.part if self.part else math.inf


class ReuseIntervalSettings(NamedTuple):
    """The share of each class that is admitted, and its expected effect.

    `saved`: seconds saved a second. `written`: bytes admitted a second.
    """

    residency_s: float
    break_even_s: float
    shares: dict[Hashable, float]
    saved: float
    written: float


class ReuseInterval(Admission):
    """Admits blocks whose classes return within the break-even interval of `capacity_bytes`.

    `saved_s(nbytes)` returns the time that reading `nbytes` from this tier saves over the next one;
    without it all classes have equal worth. Do not use it on a medium that wears, because it
    rewrites blocks that were evicted early, nor if classes are not predictive and most blocks
    return once and soon.
    """

    def __init__(
        self,
        capacity_bytes: float,
        saved_s: Callable[[int], float] | None = None,
        watched: int = 65_536,
        sample: int = 4,
    ) -> None:
        self._capacity = _FILLED * capacity_bytes
        self._saved_s = saved_s
        self._sample = sample
        self._watch = _Watch(watched)
        self._classes: OrderedDict[Hashable, _Class] = OrderedDict()
        self._decided_s: float | None = None
        self.setting = ReuseIntervalSettings(0.0, math.inf, {}, 0.0, 0.0)

    def used(self, block: AdmissionCandidate, now_s: float, *, at_hand: bool = False) -> None:
        """Record the interval since the last use of a sampled name, and watch for the next use."""
        kind = self._classes.get(block.group)
        if kind is None:
            if len(self._classes) >= _CLASSES_MAX:
                self._classes.popitem(last=False)
            kind = self._classes[block.group] = _Class()
        kind.bytes += block.nbytes
        kind.nbytes += (block.nbytes - kind.nbytes) / (8.0 if kind.nbytes else 1.0)
        if block.name[-1] % self._sample:
            return
        self._classes.move_to_end(block.group)
        self._watch.use(block.name, kind, now_s, at_hand=at_hand)

    def allows(self, block: AdmissionCandidate, now_s: float) -> bool:
        """Return whether the block's name is in the admitted share of its class."""
        self._keep_time(now_s)
        share = self.setting.shares.get(block.group, 1.0)
        return share >= 1.0 or int.from_bytes(block.name[-12:-8], "little") < share * _DRAW_MAX

    def figures(self) -> dict[str, float]:
        """Return the current break-even interval, and the expected residency of blocks."""
        setting = self.setting
        known = {"residency_s": setting.residency_s} if setting.shares else {}
        if math.isfinite(setting.break_even_s):
            known["break_even_s"] = setting.break_even_s
        return known

    def _keep_time(self, now_s: float) -> None:
        if self._decided_s is None:
            self._decided_s = now_s
        past_s = now_s - self._decided_s
        if past_s < _DECIDE_S:
            return
        self._decided_s = now_s
        self._watch.age(now_s)
        for kind in self._classes.values():
            kind.keep_time(past_s)
        curves: list[list[ServedInterval]] = []
        for group, kind in self._classes.items():
            if kind.starts[0] >= _KNOWN:
                nbytes = max(kind.nbytes, 1.0)
                worth = 1.0 if self._saved_s is None else self._saved_s(int(nbytes)) / nbytes
                curves.append(kind.served(group, worth))
        if curves:
            self.setting = _best(self._capacity, list(zip(*curves, strict=True)))


def _best(
    capacity: float, by_residency: Sequence[Sequence[ServedInterval]]
) -> ReuseIntervalSettings:
    """Return the setting that saves most; of equal ones, the one that writes least."""
    settings = [
        _fill(capacity, end, served) for end, served in zip(_ENDS, by_residency, strict=True)
    ]
    most = max(setting.saved for setting in settings)
    if most <= 0.0:
        shares = dict.fromkeys(settings[0].shares, 1.0 / _TRIED)
        return settings[0]._replace(shares=shares, break_even_s=0.0)
    good = [setting for setting in settings if setting.saved >= (1.0 - _EQUAL) * most]
    return min(good, key=lambda setting: (setting.written, setting.residency_s))


def _fill(
    capacity: float, residency_s: float, classes: Sequence[ServedInterval]
) -> ReuseIntervalSettings:
    """Admit classes in the order of seconds saved per byte-second, until the capacity is used."""
    free, saved, written, break_even_s = capacity, 0.0, 0.0, math.inf
    shares = {each.group: 0.0 for each in classes}
    gains = [each for each in classes if each.worth > 0.0 and each.part > 0.0]
    for each in sorted(gains, key=lambda each: each.interval_s / each.worth):
        needed = each.bytes_per_s * each.spent_s
        share = min(1.0, free / needed) if needed > 0.0 else 1.0
        shares[each.group] = share
        saved += share * each.bytes_per_s * each.part * each.worth
        written += share * each.bytes_per_s
        free -= share * needed
        if share < 1.0:
            break_even_s = each.interval_s
            break
    return ReuseIntervalSettings(residency_s, break_even_s, shares, saved, written)


class _Class:
    """Reuse statistics of one class, by age bucket.

    `starts`: names that reached the bucket's age. `returns`: names used again at that age. `gains`:
    returns that no faster tier served. `left_s`: sum of the time from a return to the bucket's end.
    `nbytes`: mean block size. `bytes`: bytes used since the last `keep_time`.
    """

    def __init__(self) -> None:
        self.starts = [0.0] * BUCKETS
        self.returns = [0.0] * BUCKETS
        self.gains = [0.0] * BUCKETS
        self.left_s = [0.0] * BUCKETS
        self.nbytes = 0.0
        self.bytes = 0.0
        self._rate_bytes = 0.0
        self._rate_s = 0.0

    def keep_time(self, past_s: float) -> None:
        """Update the rate of use over the `past_s` seconds, and halve large counts."""
        kept = math.exp(-past_s / _RATE_S)
        self._rate_bytes = kept * self._rate_bytes + self.bytes
        self._rate_s = kept * self._rate_s + past_s
        self.bytes = 0.0
        if self.starts[0] > _COUNTS_MAX:
            for counts in (self.starts, self.returns, self.gains, self.left_s):
                counts[:] = [count / 2.0 for count in counts]

    def served(self, group: Hashable, worth: float) -> list[ServedInterval]:
        """Return the effect of a residency until the end of each bucket on this class."""
        alive, part, spent_s, curve = 1.0, 0.0, 0.0, []
        rate = self._rate_bytes / max(self._rate_s, 1e-9)
        for number, width_s in enumerate(_WIDTHS):
            watched, returns = self.starts[number] + 1.0, self.returns[number]
            left_s = self.left_s[number] / returns if returns else width_s / 2.0
            back = min((returns + _PRIOR_RETURNS) / watched, 1.0)
            part += alive * min((self.gains[number] + _PRIOR_RETURNS) / watched, 1.0)
            spent_s += alive * (width_s - back * left_s)
            alive *= 1.0 - back
            curve.append(ServedInterval(group, part, spent_s, worth, rate))
        return curve


class _Watch:
    """Watched names and their last uses, in queues by age bucket; at most `most` names."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._since: OrderedDict[bytes, tuple[float, _Class]] = OrderedDict()
        self._buckets: list[deque[tuple[bytes, float]]] = [deque() for _ in range(BUCKETS)]

    def use(self, name: bytes, kind: _Class, now_s: float, *, at_hand: bool) -> None:
        """Record the use of a name, if it is watched, and watch it for the next one."""
        known = self._since.get(name)
        if known is not None:
            self.age(now_s)
            if self._since.pop(name, None) is not None:
                since_s, before = known
                number = next(n for n, end in enumerate(_ENDS) if now_s - since_s < end)
                before.returns[number] += 1.0
                before.left_s[number] += _ENDS[number] - (now_s - since_s)
                before.gains[number] += not at_hand
        self._since[name] = (now_s, kind)
        self._buckets[0].append((name, now_s))
        kind.starts[0] += 1.0
        if len(self._since) > self._most:
            self._since.popitem(last=False)
            self.age(now_s)

    def age(self, now_s: float) -> None:
        """Move names that are older than their bucket to the next one; drop the oldest."""
        for number, bucket in enumerate(self._buckets):
            while bucket and now_s - bucket[0][1] >= _ENDS[number]:
                name, since_s = bucket.popleft()
                known = self._since.get(name)
                if known is None or known[0] != since_s:
                    continue
                if number + 1 == BUCKETS:
                    del self._since[name]
                    continue
                known[1].starts[number + 1] += 1.0
                self._buckets[number + 1].append((name, since_s))
