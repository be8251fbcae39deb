"""Who has to give way when memory is full: the domain that is furthest above its share.

Memory that a domain has reserved is never taken by another; what is above all reservations is
divided by weight, and lent to whoever wants it as long as nobody else does. Weighted max-min
fairness as in Ghodsi et al., "Dominant Resource Fairness" (NSDI 2011), for one resource.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

UNBOUNDED = float("inf")


class Quota(NamedTuple):
    """What a domain may hold on one tier, in bytes, and its weight beside the others'."""

    reserved_bytes: int = 0
    most_bytes: float = UNBOUNDED
    share: float = 1.0


OPEN = Quota()
"""For a domain without a quota."""


def gives_way(
    used: Mapping[bytes, int], quotas: Mapping[bytes, Quota], asking: bytes, nbytes: int
) -> list[bytes]:
    """Return the domains that may have to give up bytes for `asking`, in this order.

    `used`: bytes that each domain holds. A domain at its most gives way to itself only; nobody
    takes what another has reserved. Empty: the request can not be met within the quotas.
    """
    own = quotas.get(asking, OPEN)
    held = used.get(asking, 0)
    if held + nbytes > own.most_bytes:
        return [asking] if held else []
    above = {
        domain: (nbytes_held - quota.reserved_bytes) / quota.share
        for domain, nbytes_held in used.items()
        if nbytes_held and nbytes_held > (quota := quotas.get(domain, OPEN)).reserved_bytes
    }
    # Own blocks always may go; others' only while the one who asks holds less than they do.
    mine = (held + nbytes - own.reserved_bytes) / own.share
    order = sorted(above, key=lambda domain: (-above[domain], domain))
    others = [domain for domain in order if domain != asking and above[domain] > mine]
    return [*others, asking] if held else others or [d for d in order if d != asking]
