"""Fill: the bytes that each domain holds on each tier, beside what it may hold there.

Counted with every change of place, never by looking through the index. State only: the store calls
it under its lock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence

from holdfast.policy.shares import OPEN, Quota, gives_way

OPEN_SHARE = 1 / 16
"""So much of memory, a chunk of it, is filled by anybody even where all of it is reserved."""

_SPARE = 64
"""Stale entries that a line of blocks may always have."""


class _Line:
    """One domain's blocks on one tier, as they came; some entries are stale."""

    def __init__(self) -> None:
        self.entries: deque[tuple[int, int]] = deque()
        self.held = 0


class Fill:
    """What the domains hold on `tiers` tiers, fastest first, and their quotas there."""

    def __init__(self, tiers: int) -> None:
        self.used: list[Counter[bytes]] = [Counter() for _ in range(tiers)]
        self._quotas: list[dict[bytes, Quota]] = [{} for _ in range(tiers)]
        self._filling = Counter[bytes]()
        """Bytes of memory in slots that engines were given and have not committed: they stay."""
        self._lines: list[dict[bytes, _Line]] = [{} for _ in range(tiers)]
        self.divided = False
        """Whether memory is divided between domains at all."""

    def limit(self, domain: bytes, quotas: Mapping[int, Quota]) -> None:
        """Say what a domain may hold on each tier, by number; before anything is held."""
        for tier, quota in quotas.items():
            self._quotas[tier][domain] = quota
            if tier and quota.most_bytes < OPEN.most_bytes:
                self._lines[tier][domain] = _Line()

    def quota(self, tier: int, domain: bytes) -> Quota:
        """Return what a domain may hold on a tier."""
        return self._quotas[tier].get(domain, OPEN)

    def limited(self, tier: int) -> list[bytes]:
        """Return the domains that have a quota on a tier."""
        return list(self._quotas[tier])

    def share(self, domain: bytes) -> float:
        """Return a domain's weight beside the others'."""
        return self._quotas[0].get(domain, OPEN).share

    def reserved_by_others(self, domain: bytes) -> int:
        """Return the bytes of memory that other domains have reserved."""
        quotas = self._quotas[0]
        return sum(quotas[other].reserved_bytes for other in quotas if other != domain)

    def hand_out(self, domain: bytes, nbytes: int) -> None:
        """Count bytes that an engine of a domain is to fill."""
        self._filling[domain] += nbytes

    def handed_back(self, domain: bytes, nbytes: int) -> None:
        """Count bytes that nobody fills any more."""
        self._filling[domain] -= nbytes
        if not self._filling[domain]:
            del self._filling[domain]

    def fillable(self, domain: bytes, size: int, capacity_bytes: int, share: float) -> int:
        """Return how many blocks more a domain may be given to fill, in so much memory.

        What was given stays for as long as its engine likes. So it comes out of the domain's own
        reservation first, and then out of what nobody reserved: at most this share of that, or
        one block, if that is more.
        """
        reserved = self.quota(0, domain).reserved_bytes
        others = self.reserved_by_others(domain)
        open_bytes = max(capacity_bytes - reserved - others, int(OPEN_SHARE * capacity_bytes))
        beyond = {
            each: max(0, nbytes - self.quota(0, each).reserved_bytes)
            for each, nbytes in self._filling.items()
        }
        own, left = max(0, reserved - self._filling[domain]), open_bytes - sum(beyond.values())
        most = min(left, share * open_bytes - beyond.get(domain, 0))
        blocks = (own + max(0, int(most))) // size
        if not blocks and not self._filling[domain] and (left >= size or not self._filling):
            return 1
        return blocks

    def fits(self, tier: int, domain: bytes, nbytes: int) -> bool:
        """Whether a domain may hold so many bytes more on a tier."""
        return self.used[tier][domain] + nbytes <= self.quota(tier, domain).most_bytes

    def to_spare(self, tier: int, domain: bytes) -> int:
        """Return what others may take of a domain: what it holds above its reservation."""
        return self.used[tier][domain] - self.quota(tier, domain).reserved_bytes

    def gives_way(self, tier: int, domain: bytes, nbytes: int) -> list[bytes]:
        """Return the domains that may have to give up bytes for this one, in this order."""
        return gives_way(self.used[tier], self._quotas[tier], domain, nbytes)

    def take(self, tier: int, domain: bytes, nbytes: int) -> None:
        """Count bytes that a domain holds from now on."""
        self.used[tier][domain] += nbytes

    def give(self, tier: int, domain: bytes, nbytes: int) -> None:
        """Count bytes that it holds no longer."""
        left = self.used[tier][domain] - nbytes
        if left > 0:
            self.used[tier][domain] = left
        else:
            del self.used[tier][domain]
        line = self._lines[tier].get(domain)
        if line:
            line.held -= 1

    def came(self, tier: int, domain: bytes, row: int, column: Sequence[int]) -> None:
        """Note that a block, counted by `take`, came to lie at `column[row]` of a lower tier."""
        line = self._lines[tier].get(domain)
        if line is None:
            return
        line.held += 1
        line.entries.append((row, column[row]))
        if len(line.entries) > 2 * line.held + _SPARE:
            there = [(row, place) for row, place in line.entries if column[row] == place]
            line.entries = deque(there)

    def oldest(self, tier: int, domain: bytes) -> Iterator[tuple[int, int]]:
        """Take the blocks of a domain with a quota off its line on a lower tier, oldest first.

        Some are no longer at the place given, and the caller compares.
        """
        line = self._lines[tier].get(domain)
        while line and line.entries:
            yield line.entries.popleft()

    def stays(self, tier: int, domain: bytes, row: int, place: int) -> None:
        """Put the block that was taken off a line last back where it stood."""
        self._lines[tier][domain].entries.appendleft((row, place))
