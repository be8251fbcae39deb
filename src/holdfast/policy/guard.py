"""The thrash guard: pause admission to a tier that evicts blocks before they are used.

If contexts recur in a cycle that does not fit the tier, least-recently-used is the worst order:
each context is written and then evicted by the next before it is used again. The blocks on the tier
are then worth more than new ones, so the guard admits none for a while; held blocks are still
served.

Pure: no clock, no I/O, no randomness. Not thread-safe: the store calls it under its lock.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from holdfast.policy.admit import Admission, AdmissionCandidate, RestrictedAdmission

_SECOND = 2
_WATCHED_MAX = 65_536
_SAMPLE = 8
"""One in this many names is watched."""
_OUTCOMES_MIN = 64
_WASTED_MOST = 0.95
"""Share of wasted bytes in a window above which admission pauses."""
_WASTED_SOUND = 0.8
"""Share of wasted bytes below which a window is sound."""
_SOUND_WINDOWS = 2
"""Sound windows in a row that reset the doubling of pauses.

One is not enough, because it may be served by the blocks that the pause has kept.
"""
_PAUSE_WINDOWS = 8.0
"""Length of the first pause, as a multiple of the window's duration."""
_PAUSE_S_MAX = 3_600.0
_DOUBLED_MAX = 6
"""Maximum number of doublings of a pause."""


@dataclass(slots=True)
class _Watched:
    """A block on the tier: its size, and whether it was admitted again and not used since."""

    nbytes: int
    unused: bool


class ThrashGuard(RestrictedAdmission):
    """Admits blocks that another rule admits, unless the tier thrashes.

    A block is *wasted* if it was admitted at its second use or later and evicted without another
    use. A window ends when the wasted bytes reach the tier's capacity (`capacity_bytes`). If more
    than 95 % of the window's bytes (wasted or served) were wasted, admission pauses for eight times
    the window's duration, at most an hour. Each further pause is twice as long. A pause ends at
    half its time if the tier served no more in it than before; no other pause then begins for the
    pause's full length. Do not use it for a tier whose contents take days to turn over.
    """

    def __init__(self, rule: Admission, capacity_bytes: float, sample: int = _SAMPLE) -> None:
        super().__init__(rule)
        self._capacity = capacity_bytes
        self._sample = sample
        self._watched: OrderedDict[bytes, _Watched] = OrderedDict()
        self._begun_s: float | None = None
        self._wasted = self._wasted_bytes = self._served_bytes = 0
        self._doubled = self._sound = 0
        self._pause_s = self._open_rate = 0.0
        self._until_s = self._no_pause_until_s = 0.0
        self.paused = False
        self.pauses = 0
        self.kept_out = 0

    def used(self, block: AdmissionCandidate, now_s: float, *, at_hand: bool = False) -> None:
        """Record a use of a block that the tier holds, and pass it to the rule."""
        self._rule.used(block, now_s, at_hand=at_hand)
        watched = self._watched.get(block.name)
        if watched is not None:
            watched.unused = False
            self._served_bytes += 0 if at_hand else watched.nbytes

    def allows(self, block: AdmissionCandidate, now_s: float) -> bool:
        """Return whether the rule admits the block and admission is not paused."""
        if self._begun_s is None:
            self._begin(now_s)
        if self.paused:  # until the end of the pause, or until half of it served no more
            past_s = now_s - (self._until_s - self._pause_s)
            is_early = past_s < self._pause_s
            serves_more = self._served_bytes > self._open_rate * past_s
            if is_early and (past_s < self._pause_s / 2.0 or serves_more):
                self.kept_out += 1
                return False
            if is_early:
                self._no_pause_until_s = now_s + self._pause_s
            self._doubled = min(self._doubled + 1, _DOUBLED_MAX)
            self.paused = False
            self._begin(now_s)
        return self._rule.allows(block, now_s)

    def charge(self, block: AdmissionCandidate) -> None:
        """Watch a sample of the blocks that are written, and charge the rule."""
        self._rule.charge(block)
        if block.name[-2] % self._sample == 0:
            self._watched[block.name] = _Watched(block.nbytes, unused=block.uses >= _SECOND)
            if len(self._watched) > _WATCHED_MAX:
                self._watched.popitem(last=False)

    def gave_up(self, name: bytes, now_s: float) -> None:
        """Count a watched block that is evicted, and pass it to the rule."""
        self._rule.gave_up(name, now_s)
        watched = self._watched.pop(name, None)
        if watched is None or self.paused or self._begun_s is None:
            return
        self._wasted += watched.unused
        self._wasted_bytes += watched.nbytes if watched.unused else 0
        enough = self._wasted_bytes * self._sample >= self._capacity
        if not enough or self._wasted < _OUTCOMES_MIN:
            return
        # The window ends. Pause if too much was wasted, and begin the next one.
        share = self._wasted_bytes / (self._wasted_bytes + self._served_bytes)
        self._sound = self._sound + 1 if share < _WASTED_SOUND else 0
        if self._sound >= _SOUND_WINDOWS:
            self._doubled = 0
        if share > _WASTED_MOST and now_s >= self._no_pause_until_s:
            past_s = max(now_s - self._begun_s, 1e-9)
            self._open_rate = self._served_bytes / past_s
            self._pause_s = min(_PAUSE_WINDOWS * past_s * 2.0**self._doubled, _PAUSE_S_MAX)
            self._until_s = now_s + self._pause_s
            self.paused = True
            self.pauses += 1
        self._begin(now_s)

    def figures(self) -> dict[str, float]:
        """Return the rule's figures and the guard's: state, pauses and refusals."""
        return {
            **self._rule.figures(),
            "paused": float(self.paused),
            "pauses": float(self.pauses),
            "kept_out": float(self.kept_out),
        }

    def _begin(self, now_s: float) -> None:
        self._begun_s = now_s
        self._wasted = self._wasted_bytes = self._served_bytes = 0
