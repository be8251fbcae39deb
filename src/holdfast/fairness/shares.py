"""Weighted max-min fair shares of memory: choose the domains to evict from if it is full.

`part_left` limits what cannot be evicted. The rest of the module is about memory that can.

A domain's reserved bytes are never evicted for another domain. Memory above all reservations is
divided by weight; a domain may exceed its share while no other domain needs it. The rule is
weighted max-min fairness as in Ghodsi et al., "Dominant Resource Fairness" (NSDI 2011), for one
resource.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

UNBOUNDED = float("inf")


class Quota(NamedTuple):
    """A domain's reserved bytes and limit on one tier, and its weight `share`."""

    reserved_bytes: int = 0
    most_bytes: float = UNBOUNDED
    share: float = 1.0


NO_QUOTA = Quota()
"""The quota of a domain for which none is configured."""


def victim_domains(
    used: Mapping[bytes, int], quotas: Mapping[bytes, Quota], requester: bytes, nbytes: int
) -> list[bytes]:
    """Return the domains to evict from, in this order, to place `nbytes` for `requester`.

    `used`: bytes that each domain holds. A domain at its limit evicts only its own blocks. Reserved
    bytes of other domains are never evicted. Empty: the quotas do not allow the request.
    """
    own = quotas.get(requester, NO_QUOTA)
    held = used.get(requester, 0)
    if held + nbytes > own.most_bytes:
        return [requester] if held else []
    above = {
        domain: (nbytes_held - quota.reserved_bytes) / quota.share
        for domain, nbytes_held in used.items()
        if nbytes_held and nbytes_held > (quota := quotas.get(domain, NO_QUOTA)).reserved_bytes
    }
    # Own blocks may always be evicted; another domain's only if it is further above its share.
    mine = (held + nbytes - own.reserved_bytes) / own.share
    order = sorted(above, key=lambda domain: (-above[domain], domain))
    others = [domain for domain in order if domain != requester and above[domain] > mine]
    return [*others, requester] if held else others or [d for d in order if d != requester]


def part_left(most: int, own: int, others: int) -> int:
    """Return how much more a domain may take of a resource that domains share.

    `own` and `others`: what it and all other domains have. A domain has at most as much as it
    leaves free, so a further one always finds some: half if it is alone, a third each if there are
    two. Negative if it has more, because others came later. These are the dynamic thresholds of
    Choudhury and Hahne (IEEE/ACM ToN 1998), with factor 1.
    """
    return (most - others) // 2 - own
