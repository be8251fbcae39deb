"""Admission: whether a block is worth a write to a tier below memory.

Flash wears, and where contexts seldom return most writes are for nothing. Yet any fixed rule is
wrong on some workload: writing at the second use only saves 76 % of the writes of one public trace
and 6 % of another's, and costs 42 % and 4 % of the hits (docs/reference/policies.md). So the rule
is an option of each tier, and the one that learns is asked per class of blocks.

Pure: no clock, no I/O, no randomness; chances are drawn from the blocks' names, which are hashes.
Not thread-safe: the store calls it under its lock.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import NamedTuple, Protocol

DAY_S = 86_400.0
USES_MAX = 4
"""Uses of a block that make a difference: chances of another hardly change after that."""


class Candidate(NamedTuple):
    """A block that could be written: its key (16 bytes of a hash), its class, size and domain."""

    name: bytes
    group: Hashable
    nbytes: int
    domain: bytes = b""
    uses: int = 1
    """How often it was used since it came in, up to `USES_MAX`."""


class Admission(Protocol):
    """Whether blocks are worth a write; told of every use, asked before every write.

    A rule says what it minds; of the rest nothing is the answer.
    """

    def used(self, block: Candidate, now_s: float, *, at_hand: bool = False) -> None:
        """Note one use of a block, its first included; its class is that from now on.

        `at_hand`: a faster tier had it, so that this one could not have helped.
        """
        del block, now_s, at_hand

    def admit(self, block: Candidate, now_s: float) -> bool:
        """Return whether to write a block; True is taken for a write, False may be asked again."""
        ...

    def allows(self, block: Candidate, now_s: float) -> bool:
        """Return what `admit` would, but do not take it for a write: another rule is asked yet."""
        return self.admit(block, now_s)

    def charge(self, block: Candidate) -> None:
        """Take a block for written that was allowed; for rules that count what is written."""
        del block

    def gave_up(self, name: bytes, now_s: float) -> None:
        """Note that the tier gave a block up to make room for others."""
        del name, now_s

    def figures(self) -> dict[str, float]:
        """Return what people may want to know of the rule, by name."""
        return {}


class Counting(Admission):
    """Asks first and counts then, so that nothing is spent on what another rule refuses."""

    def admit(self, block: Candidate, now_s: float) -> bool:
        """Whether it is allowed; if so it is charged, here and where a rule inside counts."""
        allowed = self.allows(block, now_s)
        if allowed:
            self.charge(block)
        return allowed

    @abstractmethod
    def allows(self, block: Candidate, now_s: float) -> bool:
        """Return what `admit` would, with nothing spent."""


class Always(Admission):
    """Take everything: right where space lasts and nothing wears, and where most comes back."""

    def admit(self, block: Candidate, now_s: float) -> bool:
        """Yes."""
        del block, now_s
        return True


class SecondTouch(Admission):
    """Take blocks at their second use within the last `names` to twice as many different ones.

    After the doorkeeper of Einziger et al., "TinyLFU: a highly efficient cache admission policy"
    (2017): names are remembered in Bloom filters, two generations of 16 bits a name; one in 200
    strangers is taken for known. Do not use it where most blocks come back once and soon (a chat's
    next turn): it costs them a recompute each.
    """

    def __init__(self, names: int) -> None:
        self._once = _Recent(names)
        self._twice = _Recent(names)

    def used(self, block: Candidate, now_s: float, *, at_hand: bool = False) -> None:
        """Note a use: the first that is known of, or a further one."""
        del now_s, at_hand
        if block.name in self._once:
            self._twice.add(block.name)
        else:
            self._once.add(block.name)

    def admit(self, block: Candidate, now_s: float) -> bool:
        """Whether the block was used twice."""
        del now_s
        return block.name in self._twice


class ReusePrediction(Admission):
    """Take blocks of classes whose blocks come back: the chance is learnt per class.

    A sample of names is watched: used again before `watched` further ones came in, or not. A class
    about which little is known yet gets the benefit of the doubt. Do not use it where classes say
    nothing (one model, one tenant, every block new): it then takes all or none.
    """

    def __init__(self, least_chance: float = 0.1, watched: int = 65_536, sample: int = 4) -> None:
        self._least = least_chance
        self._watched_max = watched
        self._sample = sample
        self._watched: OrderedDict[bytes, Hashable] = OrderedDict()
        self._classes: dict[Hashable, _Class] = {}

    def used(self, block: Candidate, now_s: float, *, at_hand: bool = False) -> None:
        """Learn from one in `sample` names: it came back, and is watched anew."""
        del now_s, at_hand
        name = block.name
        if name[-1] % self._sample:
            return
        before = self._watched.pop(name, None)
        if before is not None:
            self._class(before).note(1.0)
        self._watched[name] = block.group
        if len(self._watched) > self._watched_max:
            _, missed = self._watched.popitem(last=False)
            self._class(missed).note(0.0)

    def chance(self, group: Hashable) -> float:
        """Return the chance that a block of a class is used again."""
        return self._class(group).chance

    def admit(self, block: Candidate, now_s: float) -> bool:
        """Whether blocks of this class come back often enough."""
        del now_s
        return self.chance(block.group) >= self._least

    def _class(self, group: Hashable) -> _Class:
        found = self._classes.get(group)
        if found is None:
            if len(self._classes) >= _CLASSES_MAX:
                del self._classes[next(iter(self._classes))]
            found = self._classes[group] = _Class()
        return found


class WriteBudget(Counting):
    """Let pass what another rule admits, thinned so that a day's writes stay within a budget.

    After the dynamic random admission of CacheLib's flash cache (Berg et al., "The CacheLib Caching
    Engine", OSDI 2020): once a minute the share let through is set anew, so that what is left of
    the day's budget lasts as long as what is left of the day. Beyond the budget nothing passes
    until the next day, nor beyond an hour's worth within a minute. Do not use it on a medium that
    doesn't wear.
    """

    def __init__(self, rule: Admission, bytes_per_day: float) -> None:
        self._rule = rule
        self._budget = bytes_per_day
        self._day_s: float | None = None
        self._minute_s = 0.0
        self._written = 0
        self._burst = 0
        self._offered = 0
        self._offered_per_s = 0.0
        self._turn = 0
        self.share = 1.0
        """Share of what the rule admits that is let through now."""
        self.over_budget = 0
        """How often a block was turned away that the rule admits; one may be offered again."""

    def used(self, block: Candidate, now_s: float, *, at_hand: bool = False) -> None:
        """Tell the rule."""
        self._rule.used(block, now_s, at_hand=at_hand)

    def gave_up(self, name: bytes, now_s: float) -> None:
        """Tell the rule."""
        self._rule.gave_up(name, now_s)

    def figures(self) -> dict[str, float]:
        """Return the rule's, the share of what it admits that passes now, and what did not."""
        over = float(self.over_budget)
        return {**self._rule.figures(), "share": self.share, "over_budget": over}

    def allows(self, block: Candidate, now_s: float) -> bool:
        """Whether the rule admits the block, the budget allows it, and the draw falls on it."""
        if not self._rule.allows(block, now_s):
            return False
        self._keep_time(now_s)
        self._offered += block.nbytes
        drawn = int.from_bytes(block.name[:4], "little") ^ (self._turn * _MIX & _DRAW_MAX)
        spent = self._written + block.nbytes > self._budget
        burst = self._burst and self._burst + block.nbytes > self._budget / _BURST
        over = bool(spent or burst or drawn > self.share * _DRAW_MAX)
        self.over_budget += over
        return not over

    def charge(self, block: Candidate) -> None:
        """Spend a block's bytes, here and where the rule has a budget."""
        self._rule.charge(block)
        self._written += block.nbytes
        self._burst += block.nbytes

    def _keep_time(self, now_s: float) -> None:
        """Set the share anew, once a minute and with each new day."""
        if self._day_s is None:
            self._day_s = self._minute_s = now_s
        past_s = now_s - self._minute_s
        if past_s < _RECALCULATE_S:
            return
        seen = self._offered / past_s
        known = self._offered_per_s
        self._offered_per_s = seen if not known else known + (seen - known) * _WEIGHT_OF_NEW
        if now_s - self._day_s >= DAY_S:
            self._day_s, self._written = now_s, 0
        left_s = max(self._day_s + DAY_S - now_s, _RECALCULATE_S)
        allowed_per_s = max(self._budget - self._written, 0.0) / left_s
        self.share = min(1.0, allowed_per_s / max(self._offered_per_s, 1e-9))
        self._minute_s, self._offered, self._burst = now_s, 0, 0
        self._turn += 1


class PerDomain(Counting):
    """Let pass what another rule admits, of some domains only as much as their own rule does.

    Inside the budget of a tier, not around it: a domain without budget left takes none of the
    others'.
    """

    def __init__(self, rule: Admission, own: Mapping[bytes, Admission]) -> None:
        self._rule = rule
        self._own = own

    def used(self, block: Candidate, now_s: float, *, at_hand: bool = False) -> None:
        """Tell the rule that all have in common."""
        self._rule.used(block, now_s, at_hand=at_hand)

    def gave_up(self, name: bytes, now_s: float) -> None:
        """Tell the rule that all have in common."""
        self._rule.gave_up(name, now_s)

    def figures(self) -> dict[str, float]:
        """Return those of the rule that all have in common."""
        return self._rule.figures()

    def allows(self, block: Candidate, now_s: float) -> bool:
        """Whether the rule admits the block, and its domain's own does."""
        if not self._rule.allows(block, now_s):
            return False
        own = self._own.get(block.domain)
        return own is None or own.allows(block, now_s)

    def charge(self, block: Candidate) -> None:
        """Tell the rule, and the domain's own."""
        self._rule.charge(block)
        own = self._own.get(block.domain)
        if own is not None:
            own.charge(block)


_CLASSES_MAX = 4_096
_RECALCULATE_S = 60.0
_WEIGHT_OF_NEW = 0.3
_BURST = 24
_DRAW_MAX = 0xFFFF_FFFF
_MIX = 0x9E37_79B1


class _Class:
    """Outcomes of one class, older ones counting less; an optimist before the first."""

    __slots__ = ("_seen", "chance")

    def __init__(self) -> None:
        self._seen = 8.0
        self.chance = 1.0

    def note(self, came_back: float) -> None:
        self._seen = min(self._seen + 1.0, 4_096.0)
        self.chance += (came_back - self.chance) / self._seen


class _Recent:
    """Names seen lately, in two Bloom filters: when one is full, the other is emptied."""

    _PROBES = 4
    _BITS_A_NAME = 16

    def __init__(self, names: int) -> None:
        self._names = max(names, 1)
        self._mask = (1 << (self._names * self._BITS_A_NAME - 1).bit_length()) - 1
        self._new = bytearray(self._mask + 1 >> 3)
        self._old = bytearray(self._mask + 1 >> 3)
        self._added = 0

    def __contains__(self, name: bytes) -> bool:
        bits = self._bits(name)
        return _all_set(self._new, bits) or _all_set(self._old, bits)

    def add(self, name: bytes) -> None:
        bits = self._bits(name)
        if _all_set(self._new, bits):
            return
        if self._added >= self._names:
            self._old, self._new = self._new, bytearray(len(self._new))
            self._added = 0
        for bit in bits:
            self._new[bit >> 3] |= 1 << (bit & 7)
        self._added += 1

    def _bits(self, name: bytes) -> list[int]:
        low, step = int.from_bytes(name[:8], "little"), int.from_bytes(name[8:16], "little") | 1
        return [low + probe * step & self._mask for probe in range(self._PROBES)]


def _all_set(bits: bytearray, numbers: list[int]) -> bool:
    return all(bits[number >> 3] >> (number & 7) & 1 for number in numbers)
