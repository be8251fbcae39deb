"""Admission policies: decide whether a block is written to a tier below memory.

Flash wears, and if contexts seldom return, most writes are wasted. No fixed rule suits all
workloads: writing only at the second use saves 76 % of the writes of one public trace and 6 % of
another's, and costs 42 % and 4 % of the hits (docs/reference/policies.md). So each tier has its own
rule, and the learning rules decide per class of blocks.

Pure: no clock, no I/O, no randomness; samples are drawn by block keys, which are hashes. Not
thread-safe: the store calls it under its lock.
"""

from __future__ import annotations

import struct
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import NamedTuple, Protocol

DAY_S = 86_400.0
USES_MAX = 4
"""Maximum count of uses; more hardly change the probability of another one."""

_WORDS = struct.Struct("<QQ")
_CLASSES_MAX = 4_096
_RECALCULATE_S = 60.0
_WEIGHT_OF_NEW = 0.3
_BURST = 24
"""A minute may use the day's budget divided by this."""
_DRAW_MAX = 0xFFFF_FFFF
_MIX = 0x9E37_79B1
"""Multiplier that gives each minute another draw: a prime near 2^32 / golden ratio."""


class AdmissionCandidate(NamedTuple):
    """A block that could be written: its name, class, size in bytes, and domain.

    The name ends with the block's key (16 bytes of a hash); its prefix identifies the namespace.
    """

    name: bytes
    group: Hashable
    nbytes: int
    domain: bytes = b""
    uses: int = 1
    """Uses since it was saved or promoted, at most `USES_MAX`."""


class Admission(Protocol):
    """Decides which blocks are written; it is notified of every use and asked before every write.

    A rule defines `allows`; the other methods have defaults.
    """

    def used(self, block: AdmissionCandidate, now_s: float, *, at_hand: bool = False) -> None:
        """Record one use of a block, including the first, and the class that it now has.

        `at_hand`: a faster tier had the block, so that this tier would not have served it.
        """
        del block, now_s, at_hand

    def admit(self, block: AdmissionCandidate, now_s: float) -> bool:
        """Return whether to write a block. True counts as a write; after False, ask again later."""
        allowed = self.allows(block, now_s)
        if allowed:
            self.charge(block)
        return allowed

    @abstractmethod
    def allows(self, block: AdmissionCandidate, now_s: float) -> bool:
        """Return the result of `admit` without counting a write: another rule may refuse it."""

    def charge(self, block: AdmissionCandidate) -> None:
        """Count an allowed block as written, for rules that limit writes."""
        del block

    def gave_up(self, name: bytes, now_s: float) -> None:
        """Record that the tier evicted a block."""
        del name, now_s

    def figures(self) -> dict[str, float]:
        """Return the rule's figures for the status, by name."""
        return {}


class RestrictedAdmission(Admission):
    """Base of rules that restrict another rule; forwards to it what they do not define."""

    def __init__(self, rule: Admission) -> None:
        self._rule = rule

    def used(self, block: AdmissionCandidate, now_s: float, *, at_hand: bool = False) -> None:
        self._rule.used(block, now_s, at_hand=at_hand)

    def charge(self, block: AdmissionCandidate) -> None:
        self._rule.charge(block)

    def gave_up(self, name: bytes, now_s: float) -> None:
        self._rule.gave_up(name, now_s)

    def figures(self) -> dict[str, float]:
        return self._rule.figures()


class AlwaysAdmit(Admission):
    """Admits all blocks: for media without wear, or if most blocks are used again."""

    def allows(self, block: AdmissionCandidate, now_s: float) -> bool:
        del block, now_s
        return True


class SecondTouch(Admission):
    """Admits blocks at their second use within the last `names` to 2 x `names` distinct blocks.

    After the doorkeeper of Einziger et al., "TinyLFU: a highly efficient cache admission policy"
    (2017): Bloom filters hold the names, in two generations of 16 bits a name, with one false
    positive in 200. Do not use it if most blocks return once and soon (a chat's next turn): each
    then costs a recompute.
    """

    def __init__(self, names: int) -> None:
        self._once = _Recent(names)
        self._twice = _Recent(names)

    def used(self, block: AdmissionCandidate, now_s: float, *, at_hand: bool = False) -> None:
        """Record a use: the first one, or a further one."""
        del now_s, at_hand
        if block.name in self._once:
            self._twice.add(block.name)
        else:
            self._once.add(block.name)

    def allows(self, block: AdmissionCandidate, now_s: float) -> bool:
        """Return whether the block was used twice."""
        del now_s
        return block.name in self._twice


class ReusePrediction(Admission):
    """Admits blocks of the classes whose blocks are likely to be used again, as measured.

    One in `sample` names is watched until it is used again or `watched` newer ones were added. A
    class with few samples is admitted. Do not use it if classes are not predictive (one model, one
    tenant, every block new): it then admits all blocks or none.
    """

    def __init__(self, least_chance: float = 0.1, watched: int = 65_536, sample: int = 4) -> None:
        self._least = least_chance
        self._watched_max = watched
        self._sample = sample
        self._watched: OrderedDict[bytes, Hashable] = OrderedDict()
        self._classes: OrderedDict[Hashable, _Class] = OrderedDict()

    def used(self, block: AdmissionCandidate, now_s: float, *, at_hand: bool = False) -> None:
        """Record the use of a sampled name, and watch it for the next one."""
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

    def allows(self, block: AdmissionCandidate, now_s: float) -> bool:
        """Return whether blocks of this class are used again often enough."""
        del now_s
        return self._class(block.group).chance >= self._least

    def _class(self, group: Hashable) -> _Class:
        """Return a class, now the most recently used; a new one may evict the least recent one."""
        found = self._classes.get(group)
        if found is None:
            if len(self._classes) >= _CLASSES_MAX:
                self._classes.popitem(last=False)
            found = self._classes[group] = _Class()
        self._classes.move_to_end(group)
        return found


class WriteBudget(RestrictedAdmission):
    """Admits a share of the blocks that another rule admits, to keep a daily write budget.

    After the dynamic random admission of CacheLib's flash cache (Berg et al., "The CacheLib Caching
    Engine", OSDI 2020): once a minute the share is recomputed, so that the remaining budget lasts
    until the end of the day. Nothing is admitted beyond the day's budget, nor beyond an hour's
    share of it within a minute. Do not use it on a medium that does not wear.
    """

    def __init__(self, rule: Admission, bytes_per_day: float) -> None:
        super().__init__(rule)
        self._budget = bytes_per_day
        self._day_s: float | None = None
        self._minute_s = 0.0
        self._written = 0
        self._burst = 0
        self._offered = 0
        self._offered_per_s = 0.0
        self._minute = 0
        self.share = 1.0
        """Share of the rule's blocks that is admitted now."""
        self.over_budget = 0
        """Number of refusals of blocks that the rule admits; a block may be offered again."""

    def figures(self) -> dict[str, float]:
        """Return the rule's figures, the share admitted now, the refusals, and the day's budget."""
        return {
            **self._rule.figures(),
            "share": self.share,
            "over_budget": float(self.over_budget),
            "budget_bytes": float(self._budget),
            "spent_bytes": float(self._written),
        }

    def allows(self, block: AdmissionCandidate, now_s: float) -> bool:
        """Return whether the rule admits the block, the budget allows it, and its draw wins."""
        if not self._rule.allows(block, now_s):
            return False
        self._keep_time(now_s)
        self._offered += block.nbytes
        drawn = int.from_bytes(block.name[-16:-12], "little") ^ (self._minute * _MIX & _DRAW_MAX)
        spent = self._written + block.nbytes > self._budget
        burst = self._burst and self._burst + block.nbytes > self._budget / _BURST
        over = bool(spent or burst or drawn > self.share * _DRAW_MAX)
        self.over_budget += over
        return not over

    def charge(self, block: AdmissionCandidate) -> None:
        """Count a block's bytes as written, here and in the rule."""
        self._rule.charge(block)
        self._written += block.nbytes
        self._burst += block.nbytes

    def _keep_time(self, now_s: float) -> None:
        """Recompute the share once a minute, and begin a new budget each day."""
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
        self._minute += 1


class PerDomain(RestrictedAdmission):
    """Admits blocks that the common rule admits, and their domain's own rule if it has one.

    A tier's write budget wraps this rule, so that a block which its domain's rule refuses does not
    use the budget of the other domains.
    """

    def __init__(self, rule: Admission, own: Mapping[bytes, Admission]) -> None:
        super().__init__(rule)
        self._own = own

    def allows(self, block: AdmissionCandidate, now_s: float) -> bool:
        """Return whether the common rule and the domain's own admit the block."""
        if not self._rule.allows(block, now_s):
            return False
        own = self._own.get(block.domain)
        return own is None or own.allows(block, now_s)

    def charge(self, block: AdmissionCandidate) -> None:
        """Charge the common rule and the domain's own."""
        self._rule.charge(block)
        own = self._own.get(block.domain)
        if own is not None:
            own.charge(block)


class _Class:
    """Reuse probability of one class: a moving average of outcomes that starts at 1."""

    def __init__(self) -> None:
        self._outcomes = 8.0
        self.chance = 1.0

    def note(self, reused: float) -> None:
        self._outcomes = min(self._outcomes + 1.0, 4_096.0)
        self.chance += (reused - self.chance) / self._outcomes


class _Recent:
    """Set of recent names in two Bloom filters: when one is full, the other is cleared."""

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
        low, step = _WORDS.unpack_from(name, len(name) - _WORDS.size)
        low, step = low ^ int.from_bytes(name[:-16], "little"), step | 1
        return [low + probe * step & self._mask for probe in range(self._PROBES)]


def _all_set(bits: bytearray, numbers: list[int]) -> bool:
    return all(bits[number >> 3] >> (number & 7) & 1 for number in numbers)
