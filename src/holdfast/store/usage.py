"""Usage: bytes that each domain holds on each tier, and its quotas and reservations there.

Every change of a block's place updates the counts; the index is never scanned. State only: call
under the store's lock.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping

from holdfast.fairness.shares import NO_QUOTA, Quota, victim_domains

OPEN_SHARE = 1 / 16
"""Share of memory that any domain may fill even if all of it is reserved."""


class DomainUsage:
    """Usage and quotas of all domains on `tiers` tiers, fastest first.

    `quotas`: by domain id and tier number, what a domain may hold; None if no domain has a quota, a
    reservation or a share.
    """

    def __init__(
        self, tiers: int, quotas: Mapping[bytes, Mapping[int, Quota]] | None = None
    ) -> None:
        self.used: list[Counter[bytes]] = [Counter() for _ in range(tiers)]
        """By tier, the stored bytes of each domain."""
        self._saved: list[Counter[bytes]] = [Counter() for _ in range(tiers)]
        """By tier, the bytes by which the codec shortened the records of each domain."""
        self._quotas: list[dict[bytes, Quota]] = [{} for _ in range(tiers)]
        self._filling = Counter[bytes]()
        """Bytes of reserved, uncommitted slots by domain; they cannot be evicted."""
        self._written: list[dict[bytes, OrderedDict[int, None]]] = [{} for _ in range(tiers)]
        """By lower tier and domain with a quota on it: the rows there, in order of their writes."""
        self.divided = quotas is not None
        """Whether any domain has a quota, a reservation or a share of memory."""
        for domain, by_tier in (quotas or {}).items():
            for tier, quota in by_tier.items():
                self._quotas[tier][domain] = quota
                if tier and quota.most_bytes < NO_QUOTA.most_bytes:
                    self._written[tier][domain] = OrderedDict()

    def quota(self, tier: int, domain: bytes) -> Quota:
        """Return what a domain may hold on a tier."""
        return self._quotas[tier].get(domain, NO_QUOTA)

    def share(self, domain: bytes) -> float:
        """Return a domain's weight relative to other domains."""
        return self._quotas[0].get(domain, NO_QUOTA).share

    def reserved_by_others(self, domain: bytes) -> int:
        """Return the bytes of memory that other domains have reserved."""
        quotas = self._quotas[0]
        return sum(quotas[other].reserved_bytes for other in quotas if other != domain)

    def add_reserved(self, domain: bytes, nbytes: int) -> None:
        """Count bytes of slots reserved for a domain."""
        self._filling[domain] += nbytes

    def subtract_reserved(self, domain: bytes, nbytes: int) -> None:
        """Count bytes of slots that are committed or returned."""
        self._filling[domain] -= nbytes
        if not self._filling[domain]:
            del self._filling[domain]

    def fillable(self, domain: bytes, size: int, capacity_bytes: int, share: float) -> int:
        """Return how many more blocks may be reserved for a domain in memory of this capacity.

        An engine decides how long it takes to fill a slot. So slots come out of the domain's own
        reservation first, then out of unreserved memory: at most `share` of it, or one block if
        that is more.
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
        """Return whether `nbytes` more fit a domain's quota on a tier."""
        return self.used[tier][domain] + nbytes <= self.quota(tier, domain).most_bytes

    def evictable_bytes(self, tier: int, domain: bytes) -> int:
        """Return the bytes above a domain's reservation, which other domains may evict."""
        return self.used[tier][domain] - self.quota(tier, domain).reserved_bytes

    def victim_domains(self, tier: int, domain: bytes, nbytes: int) -> list[bytes]:
        """Return the victim domains for this one, in order."""
        return victim_domains(self.used[tier], self._quotas[tier], domain, nbytes)

    def add(self, tier: int, domain: bytes, nbytes: int) -> None:
        """Add bytes to a domain's usage."""
        if nbytes:  # a peer may name any domain, so a domain without blocks leaves no entry
            self.used[tier][domain] += nbytes

    def subtract(self, tier: int, domain: bytes, nbytes: int, row: int = -1) -> None:
        """Subtract bytes from a domain's usage; on a lower tier, those of the block in a row."""
        left = self.used[tier][domain] - nbytes
        if left > 0:
            self.used[tier][domain] = left
        else:
            del self.used[tier][domain]
        if (written := self._written[tier].get(domain)) is not None:
            written.pop(row, None)

    def raw_bytes(self, tier: int, domain: bytes) -> int:
        """Return the bytes of a domain's copies on a tier before their codec."""
        return self.used[tier][domain] + self._saved[tier][domain]

    def add_saved(self, tier: int, domain: bytes, nbytes: int) -> None:
        """Add bytes by which copies on a tier are shorter than their blocks; may be negative."""
        saved = self._saved[tier]
        saved[domain] += nbytes
        if not saved[domain]:
            del saved[domain]

    def note_write(self, tier: int, domain: bytes, row: int) -> None:
        """Note that a block, counted by `add`, was written to a lower tier."""
        if (written := self._written[tier].get(domain)) is not None:
            written[row] = None
            written.move_to_end(row)

    def oldest(self, tier: int, domain: bytes) -> int:
        """Return the oldest row of a domain with a quota on a lower tier; -1: there is none."""
        return next(iter(self._written[tier].get(domain, ())), -1)
