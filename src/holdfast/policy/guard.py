"""The thrash guard: keep blocks out of a tier that gives them up again before they are used.

Contexts that come round one after another, more of them than fit, make least-recently-used the
worst order of all: each is written just to be pushed out by the next before its turn comes again.
Then what lies on the tier is worth more than anything that could come in, and so the door is shut
for a while; what is inside keeps being served.

Pure: no clock, no I/O, no randomness. Not thread-safe: the store calls it under its lock.
"""

from __future__ import annotations

from collections import OrderedDict

from holdfast.policy.admit import Admission, Candidate

_SECOND = 2
_WATCHED_MAX = 65_536
_SAMPLE = 8
"""One name in so many is watched."""
_OUTCOMES_MIN = 64
_WASTED_MOST = 0.95
"""Beyond this share of a window the door is shut."""
_WASTED_SOUND = 0.8
"""Below this share a window is sound."""
_SOUND_WINDOWS = 2
"""So many of them in a row and all is forgiven: the first may live on what the pause has kept."""
_PAUSE_WINDOWS = 8.0
"""The first pause lasts so many times what the window took, and so does the truce after one that
was of no use."""
_PAUSE_S_MAX = 3_600.0
_DOUBLED_MAX = 6


class _Watched:
    """A block on the tier: its bytes, and whether it came back to it and waits for its use."""

    __slots__ = ("nbytes", "unused")

    def __init__(self, nbytes: int, *, unused: bool) -> None:
        self.nbytes = nbytes
        self.unused = unused


class ThrashGuard(Admission):
    """Let pass what another rule admits, unless the tier thrashes.

    *Wasted* is a block that was admitted at its second use or later and is given up without a
    further one. When as many bytes were wasted as the tier has (`capacity_bytes`), and more than
    nineteen for each that the tier served meanwhile, nothing is admitted for eight times as long as
    that took, at most an hour; twice as long each time that it happens again. Half a pause in
    which the tier served no more than with its door open is enough, and then the guard stands back
    for as long as the whole. Do not use it in front of a tier whose turn-over takes days.
    """

    def __init__(self, rule: Admission, capacity_bytes: float, sample: int = _SAMPLE) -> None:
        self._rule = rule
        self._capacity = capacity_bytes
        self._sample = sample
        self._watched: OrderedDict[bytes, _Watched] = OrderedDict()
        self._begun_s: float | None = None
        self._wasted = self._wasted_bytes = self._served_bytes = 0
        self._doubled = self._sound = 0
        self._pause_s = self._open_rate = 0.0
        self._until_s = self._truce_s = 0.0
        self.paused = False
        self.pauses = 0
        self.kept_out = 0

    def used(self, block: Candidate, now_s: float, *, at_hand: bool = False) -> None:
        """Note a use of a block that lies on the tier, and tell the rule."""
        self._rule.used(block, now_s, at_hand=at_hand)
        watched = self._watched.get(block.name)
        if watched is not None:
            watched.unused = False
            self._served_bytes += 0 if at_hand else watched.nbytes

    def admit(self, block: Candidate, now_s: float) -> bool:
        """Whether the rule admits the block and the tier does not thrash."""
        if self._begun_s is None:
            self._begin(now_s)
        if self.paused and not self._opens(now_s):
            self.kept_out += 1
            return False
        if not self._rule.admit(block, now_s):
            return False
        if block.name[-2] % self._sample == 0:
            self._watched[block.name] = _Watched(block.nbytes, unused=block.uses >= _SECOND)
            if len(self._watched) > _WATCHED_MAX:
                self._watched.popitem(last=False)
        return True

    def gave_up(self, name: bytes, now_s: float) -> None:
        """Count a watched block that leaves, used again or not, and tell the rule."""
        self._rule.gave_up(name, now_s)
        watched = self._watched.pop(name, None)
        if watched is None or self.paused or self._begun_s is None:
            return
        self._wasted += watched.unused
        self._wasted_bytes += watched.nbytes if watched.unused else 0
        enough = self._wasted_bytes * self._sample >= self._capacity
        if enough and self._wasted >= _OUTCOMES_MIN:
            self._judge(now_s, self._begun_s)

    def figures(self) -> dict[str, float]:
        """Return the rule's figures and the guard's: whether it is shut, how often, what for."""
        return {
            **self._rule.figures(),
            "paused": float(self.paused),
            "pauses": float(self.pauses),
            "kept_out": float(self.kept_out),
        }

    def _judge(self, now_s: float, begun_s: float) -> None:
        """At the end of a window: shut the door, or look again."""
        share = self._wasted_bytes / (self._wasted_bytes + self._served_bytes)
        self._sound = self._sound + 1 if share < _WASTED_SOUND else 0
        if self._sound >= _SOUND_WINDOWS:
            self._doubled = 0
        if share > _WASTED_MOST and now_s >= self._truce_s:
            past_s = max(now_s - begun_s, 1e-9)
            self._open_rate = self._served_bytes / past_s
            self._pause_s = min(_PAUSE_WINDOWS * past_s * 2.0**self._doubled, _PAUSE_S_MAX)
            self._until_s = now_s + self._pause_s
            self.paused = True
            self.pauses += 1
        self._begin(now_s)

    def _opens(self, now_s: float) -> bool:
        """Open the door if the pause is over, or by half of it was of no use."""
        past_s = now_s - (self._until_s - self._pause_s)
        if past_s < self._pause_s:
            if past_s < self._pause_s / 2.0 or self._served_bytes > self._open_rate * past_s:
                return False
            self._truce_s = now_s + self._pause_s
        self._doubled = min(self._doubled + 1, _DOUBLED_MAX)
        self.paused = False
        self._begin(now_s)
        return True

    def _begin(self, now_s: float) -> None:
        self._begun_s = now_s
        self._wasted = self._wasted_bytes = self._served_bytes = 0
