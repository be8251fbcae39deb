"""Admission by reuse interval: whether a block comes back within the break-even interval.

Gray and Putzolu's five-minute rule ("The 5 Minute Rule for Trading Memory for Disc Accesses",
SIGMOD 1987; revisited 1997, 2007 and 2019) puts a page in the faster of two media if it is needed
again within a break-even interval. Theirs follows from prices, ours from what is bought already:
the bytes of the faster tier, and how much sooner a block comes from there than from the tier below,
as measured. The break-even interval is then that of the last block that still has room.

For each class of blocks a sample is watched: how long after a use the next one comes, if it does
(the product-limit estimate of Kaplan and Meier, JASA 1958, since most have not come back yet). A
tier that keeps every block for a residency T after its use then serves the part G(T) of a class's
next uses and spends m(T) seconds of room on each, so that a use served costs m / G seconds. Of all
T, and of all ways to let classes in, cheapest first and the last one in part, the one is taken that
saves the most time.

Pure: no clock, no I/O, no randomness; the part of a class is drawn by the blocks' names.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from holdfast.policy.admit import Admission, Candidate

FIRST_S = 0.25
BUCKETS = 25
"""Ages are told apart by powers of two: from a quarter of a second to seven weeks."""

_ENDS = [FIRST_S * 2.0**number for number in range(BUCKETS)]
_WIDTHS = [end - start for start, end in itertools.pairwise([0.0, *_ENDS])]
_DECIDE_S = 10.0
_RATE_S = 1_800.0
"""How fast uses of a class come is the mean of about this long."""
_CLASSES_MAX = 256
_KNOWN = 8.0
"""Uses watched before a class is judged; until then it gets the benefit of the doubt."""
_COUNTS_MAX = 4_096.0
_HOPE = 0.02
"""What never came back yet may: counted as so many returns at every age. It makes room that nobody
else needs go to whoever is unknown, or is no use."""
_FILLED = 0.9
"""Part of the capacity that is counted on: a cycle that fits all but a block never hits."""
_SURE = 0.002
"""Settings that save as much, within this part, are told apart by what they write."""
_TRIED = 64
"""One name in so many is taken by a tier that seems no faster than the one below: measured anew."""
_DRAW_MAX = 0xFFFF_FFFF


class Served(NamedTuple):
    """What a class gets from a residency: the part of its uses served, the seconds spent on each.

    `worth` is the time that a byte served saves, `bytes_per_s` how many are used.
    """

    group: Hashable
    part: float
    spent_s: float
    worth: float
    bytes_per_s: float

    @property
    def interval_s(self) -> float:
        """Seconds of room that a use served costs: what is held against the break-even interval."""
        return self.spent_s / self.part if self.part else math.inf


class Setting(NamedTuple):
    """How much of each class is let in, and what that is expected to do."""

    residency_s: float
    break_even_s: float
    shares: dict[Hashable, float]
    saved: float
    written: float


class ReuseInterval(Admission):
    """Take blocks whose classes come back within the break-even interval of `capacity_bytes`.

    `saved_s(nbytes)` says how much sooner so many bytes come from this tier than from the next one;
    None, and any gain is like any other. Do not use it on a medium that wears (it writes again what
    it holds too briefly), nor where classes say nothing and most blocks come back once and soon.
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
        self.setting = Setting(0.0, math.inf, {}, 0.0, 0.0)

    def used(self, block: Candidate, now_s: float, *, at_hand: bool = False) -> None:
        """Learn from one in `sample` names when it came back, and watch it anew."""
        kind = self._class(block.group)
        kind.bytes += block.nbytes
        kind.nbytes += (block.nbytes - kind.nbytes) / (8.0 if kind.nbytes else 1.0)
        if block.name[-1] % self._sample:
            return
        self._watch.back(block.name, now_s, at_hand=at_hand)
        self._watch.begin(block.name, kind, now_s)

    def admit(self, block: Candidate, now_s: float) -> bool:
        """Whether this class has room, or the part of it that the block's name falls in."""
        self._keep_time(now_s)
        share = self.setting.shares.get(block.group, 1.0)
        return share >= 1.0 or int.from_bytes(block.name[4:8], "little") < share * _DRAW_MAX

    def figures(self) -> dict[str, float]:
        """Return the break-even interval in force, and how long blocks are expected to stay."""
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
        curves = [
            kind.served(group, self._worth(kind))
            for group, kind in self._classes.items()
            if kind.starts[0] >= _KNOWN
        ]
        if curves:
            self.setting = _best(self._capacity, list(zip(*curves, strict=True)))

    def _worth(self, kind: _Class) -> float:
        if self._saved_s is None:
            return 1.0
        nbytes = max(kind.nbytes, 1.0)
        return self._saved_s(int(nbytes)) / nbytes

    def _class(self, group: Hashable) -> _Class:
        found = self._classes.get(group)
        if found is None:
            if len(self._classes) >= _CLASSES_MAX:
                self._classes.popitem(last=False)
            found = self._classes[group] = _Class()
        return found


def _best(capacity: float, by_residency: Sequence[Sequence[Served]]) -> Setting:
    """Return the setting that saves most; of those that save as much, the one that writes least."""
    settings = [
        _fill(capacity, end, served) for end, served in zip(_ENDS, by_residency, strict=True)
    ]
    most = max(setting.saved for setting in settings)
    if most <= 0.0:
        shares = dict.fromkeys(settings[0].shares, 1.0 / _TRIED)
        return settings[0]._replace(shares=shares, break_even_s=0.0)
    good = [setting for setting in settings if setting.saved >= (1.0 - _SURE) * most]
    return min(good, key=lambda setting: (setting.written, setting.residency_s))


def _fill(capacity: float, residency_s: float, classes: Sequence[Served]) -> Setting:
    """Let classes in while there is room for so long, those first whose byte-seconds save most."""
    room, saved, written, break_even_s = capacity, 0.0, 0.0, math.inf
    shares = {each.group: 0.0 for each in classes}
    gains = [each for each in classes if each.worth > 0.0 and each.part > 0.0]
    for each in sorted(gains, key=lambda each: each.interval_s / each.worth):
        needed = each.bytes_per_s * each.spent_s
        share = min(1.0, room / needed) if needed > 0.0 else 1.0
        shares[each.group] = share
        saved += share * each.bytes_per_s * each.part * each.worth
        written += share * each.bytes_per_s
        room -= share * needed
        if share < 1.0:
            break_even_s = each.interval_s
            break
    return Setting(residency_s, break_even_s, shares, saved, written)


class _Class:
    """How blocks of one class come back: by age, how many got there, returned, and were missed."""

    __slots__ = (
        "_rate_bytes",
        "_rate_s",
        "bytes",
        "gains",
        "left_s",
        "nbytes",
        "returns",
        "starts",
    )

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
        """Take in what was used in the time past; old counts count less."""
        kept = math.exp(-past_s / _RATE_S)
        self._rate_bytes = kept * self._rate_bytes + self.bytes
        self._rate_s = kept * self._rate_s + past_s
        self.bytes = 0.0
        if self.starts[0] > _COUNTS_MAX:
            for counts in (self.starts, self.returns, self.gains, self.left_s):
                counts[:] = [count / 2.0 for count in counts]

    def served(self, group: Hashable, worth: float) -> list[Served]:
        """Return what a residency until the end of each bucket would do for this class."""
        alive, part, spent_s, curve = 1.0, 0.0, 0.0, []
        rate = self._rate_bytes / max(self._rate_s, 1e-9)
        for number, width_s in enumerate(_WIDTHS):
            watched = self.starts[number] + 1.0
            back = min((self.returns[number] + _HOPE) / watched, 1.0)
            part += alive * min((self.gains[number] + _HOPE) / watched, 1.0)
            spent_s += alive * (width_s - back * self._left_s(number, width_s))
            alive *= 1.0 - back
            curve.append(Served(group, part, spent_s, worth, rate))
        return curve

    def _left_s(self, number: int, width_s: float) -> float:
        """Return how much of a bucket was left, on average, when those that came back in it did."""
        returns = self.returns[number]
        return self.left_s[number] / returns if returns else width_s / 2.0


class _Watch:
    """Names under watch since their last use, in order of age."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._since: OrderedDict[bytes, tuple[float, _Class]] = OrderedDict()
        self._lines: list[deque[tuple[bytes, float]]] = [deque() for _ in range(BUCKETS)]

    def begin(self, name: bytes, kind: _Class, now_s: float) -> None:
        """Watch a name that is not watched."""
        self._since[name] = (now_s, kind)
        self._lines[0].append((name, now_s))
        kind.starts[0] += 1.0
        if len(self._since) > self._most:
            self._since.popitem(last=False)
            self.age(now_s)

    def back(self, name: bytes, now_s: float, *, at_hand: bool) -> None:
        """End the watch of a name that is used again, if it is watched."""
        known = self._since.get(name)
        if known is None:
            return
        self.age(now_s)
        if self._since.pop(name, None) is None:
            return
        since_s, kind = known
        number = next(n for n, end in enumerate(_ENDS) if now_s - since_s < end)
        kind.returns[number] += 1.0
        kind.left_s[number] += _ENDS[number] - (now_s - since_s)
        kind.gains[number] += not at_hand

    def age(self, now_s: float) -> None:
        """Note which names have got older than their bucket."""
        for number, line in enumerate(self._lines):
            while line and now_s - line[0][1] >= _ENDS[number]:
                name, since_s = line.popleft()
                known = self._since.get(name)
                if known is None or known[0] != since_s:
                    continue
                if number + 1 == BUCKETS:
                    del self._since[name]
                    continue
                known[1].starts[number + 1] += 1.0
                self._lines[number + 1].append((name, since_s))
