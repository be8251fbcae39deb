"""Host slot allocation: reserve slots for new blocks, evicting the least valuable if full.

Within a domain the eviction policy orders the victims. If memory is divided between domains,
`holdfast.fairness.shares` first chooses the victim domain. State only, no I/O: call every function
under the store's lock.

Memory that engines have page-locked stays in its domain until they unlock it. Eviction for another
domain passes it by, and asks for the least valuable run (a *recall*): the next request can have it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from itertools import islice

from holdfast.blocks.namespace import Namespace
from holdfast.policy.per_domain import PerDomainEviction
from holdfast.store.block_table import HOST, PUBLIC_SHARE, BlockTable
from holdfast.tiers.base import NOWHERE, Place
from holdfast.tiers.host import NOBODY, HostTier

ANY_DOMAIN = b""
"""Victim domain if memory is not divided: the least valuable block of any domain leaves."""

_MAX_EXAMINED = 1_024
"""Maximum number of unleased blocks examined for a victim."""

_MAX_LEASED_SKIPPED = 2 * _MAX_EXAMINED
"""Maximum number of leased blocks skipped per search; each moves to the end of the order."""

_MAX_RUNS_COMPARED = 8
"""Runs of adjacent slots compared before the emptiest is evicted."""

_MAX_PASSED = 256
"""Maximum blocks of other namespaces that are passed by in a search for one of a namespace."""

_UNLOCKED_RUNS = 2
"""Runs without locks, or asked back, below which more are asked for ahead."""


def slots(table: BlockTable, namespace: Namespace) -> int:
    """Return how many blocks of a namespace fit in otherwise empty memory, within its quota."""
    size, most = namespace.slot_bytes, table.usage.quota(HOST, namespace.domain).most_bytes
    return int(min(table.host(namespace).slots(size), most // size))


def reserve_slots(table: BlockTable, namespace: Namespace, count: int) -> list[Place]:
    """Reserve up to `count` host slots for blocks of a namespace, evicting what is least valuable.

    If memory is not divided and all blocks have one size, one search finds all victims. The caller
    owns the slots: it publishes them or frees them with `give_back`.
    """
    size, host, places = namespace.slot_bytes, table.host(namespace), list[Place]()
    if not table.usage.divided and namespace.domain != table.public:
        found = host.reserve([size] * count, table.owner(namespace)).places
        places = [place for place in found if place != NOWHERE]
        if missing := count - len(places):
            with closing(_victims_of_size(table, namespace)) as rows:
                places += table.evict_for(host, islice(rows, missing))
        table.usage.add(HOST, namespace.domain, len(places) * size)
    while len(places) < count and (place := _evict_one(table, namespace)) != NOWHERE:
        places.append(place)
    return places


def _evict_one(table: BlockTable, namespace: Namespace) -> Place:
    """Reserve one host slot, evicting the least valuable block; NOWHERE if none is evictable.

    If memory is divided, the victim domain is chosen first.
    """
    domain, size, place = namespace.domain, namespace.slot_bytes, NOWHERE
    if domain == table.public and _public_is_full(table, size):
        return NOWHERE
    if table.usage.fits(HOST, domain, size):
        place = _free_slot(table, namespace)
        if place == NOWHERE:
            _recall_kept(table, namespace)
    victim_domains = (
        table.usage.victim_domains(HOST, domain, size) if table.usage.divided else [ANY_DOMAIN]
    )
    for victim_domain in victim_domains:
        while place == NOWHERE and _evict_from(table, namespace, victim_domain):
            if table.usage.fits(HOST, domain, size):
                place = _free_slot(table, namespace)
    if place != NOWHERE:
        table.usage.add(HOST, domain, size)
    return place


def _free_slot(table: BlockTable, namespace: Namespace) -> Place:
    """Reserve a host slot that is free; NOWHERE if none is."""
    owner = table.owner(namespace)
    return table.host(namespace).reserve([namespace.slot_bytes], owner).places[0]


def _victims_of_size(table: BlockTable, namespace: Namespace) -> Generator[int, None, None]:
    """Yield evictable rows whose slots fit a namespace exactly, up to the first that does not.

    If namespaces have runs of their own, rows of the namespace come before up to `_MAX_PASSED` less
    valuable ones of others.
    """
    host, size, like = table.host(namespace), namespace.slot_bytes, namespace
    own, passed = table.owner(namespace) != NOBODY, list[int]()
    with closing(_victims(table, ANY_DOMAIN)) as rows:
        for row in rows:
            other = table.index.namespace(row)
            if other is not like and (table.host(other) is not host or other.slot_bytes != size):
                break
            if host.has_locks and host.is_recalled(table.copies.place(row, HOST)):
                break
            like = other
            if not own or other == namespace:
                yield row
            elif len(passed) < _MAX_PASSED:
                passed.append(row)
            else:
                break
    yield from (row for row in passed if table.is_on(row, HOST) and table.evictable(row))


def evict_below(table: BlockTable, domain: bytes, tier: int, nbytes: int) -> bool:
    """Evict a domain's oldest blocks from a lower tier until `nbytes` more fit in its quota.

    Returns False if they cannot fit.
    """
    if nbytes > table.usage.quota(tier, domain).most_bytes:
        return False
    while not (fits := table.usage.fits(tier, domain, nbytes)):
        row = table.usage.oldest(tier, domain)
        if row < 0:
            break
        is_renewed = row in table.copies.fillings(tier)  # counted at the end of that, if it fails
        if tier == table.durable_tier and not is_renewed and table.is_durable(row):
            table.durable_evicted += 1
        table.remove_copy(row, tier)
        table.evictions[tier] += 1
        # A rewrite would evict the blocks that replaced it.
        table.queues.do_not_admit([row])
    return fits


def _public_is_full(table: BlockTable, nbytes: int) -> bool:
    """Return whether `nbytes` more exceed the public domain's share; it evicts none of its own."""
    usage = table.hosts[table.public].usage()
    return usage.used_bytes + nbytes > PUBLIC_SHARE * usage.capacity_bytes


def _evict_from(table: BlockTable, namespace: Namespace, victim_domain: bytes) -> bool:
    """Evict a victim domain's least valuable blocks for one new block; False if none may leave.

    Evicts one block if its slot has the right size and arena. Otherwise memory moves in whole
    runs, so it evicts the emptiest run among those with the least valuable blocks. Evicting by
    value alone would evict most of a domain before a run is empty.
    """
    domain, size, host = namespace.domain, namespace.slot_bytes, table.host(namespace)
    runs: list[list[int]] = []
    seen: set[int] = set()
    locked: dict[HostTier, Place] = {}
    """By arena, the place of the least valuable block that was passed by."""
    own, passed = table.owner(namespace) != NOBODY, list[int]()
    with closing(_victims(table, victim_domain)) as rows:
        for row in rows:
            other, place = table.index.namespace(row), table.copies.place(row, HOST)
            holder = table.host(other)
            if holder is host and other.slot_bytes == size:
                if host.has_locks and host.is_recalled(place):
                    continue
                if runs:
                    break
                foreign = other.domain != domain
                if foreign and table.usage.evictable_bytes(HOST, other.domain) < size:
                    continue
                if not own or other == namespace:
                    return _evict_rows(table, [row])
                if len(passed) == _MAX_PASSED:
                    break
                passed.append(row)
                continue
            if row in seen:
                continue
            run = holder.beside(place)
            seen.update(run)
            if holder is not host and holder.has_locks and holder.is_locked(place):
                if table.usage.evictable_bytes(HOST, other.domain) >= other.slot_bytes:
                    locked.setdefault(holder, place)
                continue
            if run and _all_evictable(table, run, domain):
                runs.append(run)
            if len(runs) == _MAX_RUNS_COMPARED:
                break
    if passed:
        return _evict_rows(table, passed[:1])
    if locked:
        runs = runs or _unlocked_runs(table, locked, domain)
        table.recalls.want(host, host.run_chunks(size), table.clock.now())
        if not runs:
            _recall(table, namespace, next(iter(locked.items())))
    return _evict_rows(table, min(runs, key=len, default=[]))


def _evict_rows(table: BlockTable, rows: Sequence[int]) -> bool:
    """Evict rows from memory; return whether there are any."""
    for row in rows:
        table.remove_copy(row, HOST)
    table.evictions[HOST] += len(rows)
    return bool(rows)


def _unlocked_runs(
    table: BlockTable, holders: Iterable[HostTier], requester: bytes
) -> list[list[int]]:
    """Return the rows of evictable runs without locks.

    A policy that evicts leaves first does not show their blocks behind a leaf that is locked.
    """
    runs = (run for holder in holders for run in holder.unlocked_runs())
    return list(
        islice((r for r in runs if _all_evictable(table, r, requester)), _MAX_RUNS_COMPARED)
    )


def recall_ahead(table: BlockTable) -> None:
    """Ask for one more run if a domain lately met locked memory and few runs are unlocked.

    Takes the lock.
    """
    with table.lock:
        for host, chunks in table.recalls.wanted(table.clock.now()).items():
            others = [other.lock_usage() for other in table.all_hosts() if other is not host]
            unlocked = sum(usage.runs for usage in others)
            unlocked += sum(usage.recalled for usage in others) // chunks
            if unlocked < _UNLOCKED_RUNS:
                _recall_least_valuable(table, host)


def _recall_least_valuable(table: BlockTable, requester: HostTier) -> None:
    """Ask for the locked run of another arena with the least valuable block, if there is one."""
    with closing(_victims(table, ANY_DOMAIN)) as rows:
        for row in rows:
            namespace, place = table.index.namespace(row), table.copies.place(row, HOST)
            holder = table.host(namespace)
            above = table.usage.evictable_bytes(HOST, namespace.domain) > 0
            if holder is not requester and above and holder.recall(Place(place)):
                return


def _recall_kept(table: BlockTable, namespace: Namespace) -> None:
    """Ask for kept chunks for a namespace's next run: of other domains, then of its own."""
    if any(host.has_kept for host in table.hosts.values()):
        _recall(table, namespace, None)


def _recall(table: BlockTable, namespace: Namespace, run: tuple[HostTier, Place] | None) -> None:
    """Ask for the chunks that a namespace's next run needs, unless as many are asked for.

    Kept chunks come first, then the run of a place in another arena, if one is given.
    """
    own = table.host(namespace)
    needed = own.run_chunks(namespace.slot_bytes)
    holders = [host for host in (*table.all_hosts(), own) if host.has_locks]
    needed -= sum(host.recalled_chunks for host in {*holders})
    for host in sorted(holders, key=lambda host: host is own):
        if needed > 0:
            needed -= host.recall_kept(needed)
    if run is not None and needed > 0:
        host, place = run
        host.recall(place)


def _victims(table: BlockTable, victim_domain: bytes) -> Generator[int, None, None]:
    """Yield evictable rows of a domain, least valuable first, examining `_MAX_EXAMINED` at most.

    Leased rows move to the end of the order, so that the next search does not find them first.
    """
    now_s, policy = table.clock.now(), table.eviction
    if victim_domain != ANY_DOMAIN and isinstance(policy, PerDomainEviction):
        victims = policy.victims_of(victim_domain, now_s)
    else:
        victims = policy.victims(now_s)
    leases, leased, remaining = table.index.leases, list[int](), _MAX_EXAMINED
    try:
        for row in victims:
            if leases[row]:
                leased.append(row)
                if len(leased) == _MAX_LEASED_SKIPPED:
                    break
                continue
            if table.evictable(row):
                yield row
            remaining -= 1
            if not remaining:
                break
    finally:
        victims.close()
        for row in leased:
            policy.pass_by(row, now_s)


def _all_evictable(table: BlockTable, run: Sequence[int], requester: bytes) -> bool:
    """Return whether all rows are evictable and no other domain drops below its reserved bytes."""
    lost: Counter[bytes] = Counter()
    for row in run:
        namespace = table.index.namespace(row)
        lost[namespace.domain] += namespace.slot_bytes
    del lost[requester]
    if any(nbytes > table.usage.evictable_bytes(HOST, domain) for domain, nbytes in lost.items()):
        return False
    # Check every row: `evictable` queues the unsaved ones for writing.
    return not [row for row in run if not table.evictable(row)]
