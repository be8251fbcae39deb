"""Two domains on one store: what each may hold, and who gives way to whom."""

import hashlib
import math
import random
from collections import Counter

import numpy as np
import pytest

from holdfast.blocks.key import Chain
from holdfast.blocks.namespace import Namespace, domain_id
from holdfast.clock import ManualClock
from holdfast.codec.pack import payload
from holdfast.fairness.fair_threads import FairThreads
from holdfast.fairness.shares import Quota
from holdfast.policy.admit import AlwaysAdmit, PerDomain, WriteBudget
from holdfast.policy.retention import Retention
from holdfast.status import DomainStatus
from holdfast.store.options import StoreOptions, TierRules
from holdfast.store.store import Store
from holdfast.store.usage import DomainUsage
from holdfast.testing.memory import MemoryTier
from holdfast.testing.store_control import leave, release_reservations
from holdfast.testing.store_view import StoreView

KIB, MIB = 1 << 10, 1 << 20
TOKENS = 16
HOST_BYTES = 4 * MIB
KEYS = {name: name.encode().ljust(32, b"k") for name in ("flood", "victim")}
SIZE = 20 * KIB
"""A record of a block with 16 KiB of payload."""


class Two:
    """A store with the domains `flood` and `victim`, and any tier below."""

    def __init__(self, tier=None, quotas=None, host_bytes=HOST_BYTES, rules=()):
        self.clock = ManualClock()
        self.tier = tier
        options = StoreOptions(clock=self.clock, quotas=quotas, rules=dict(rules))
        self.store = Store(host_bytes, [tier] if tier else [], KEYS, options)
        self.view = StoreView(self.store)
        self.store.start()

    def namespace(self, name, raw_bytes=16 * KIB):
        return Namespace(b"f" * 16, self.store.domain(name)[1], raw_bytes, TOKENS)

    def save(self, name, seed, blocks, raw_bytes=16 * KIB, retention=Retention.SESSION):
        """Save a chain; return its keys and how many blocks are new."""
        namespace = self.namespace(name, raw_bytes)
        chain = Chain(self.store.domain(name)[0], namespace.fingerprint, TOKENS)
        chain.extend(np.random.default_rng(seed).integers(0, 1000, blocks * TOKENS))
        arena, new = self.store.arena(namespace.domain).view, 0
        for at in range(0, blocks, 64):
            part = chain.keys[at : at + 64]
            reserved = self.store.reserve(namespace, part, chain.parent(at), at)
            for key, place in zip(part, reserved.places, strict=True):
                if place >= 0:
                    shake = hashlib.shake_128(key).digest(raw_bytes)
                    payload(arena[place:], raw_bytes)[:] = shake
            new += self.store.commit(reserved.ticket, retention)
        return chain.keys, new

    def read(self, name, keys, raw_bytes=16 * KIB):
        """Fetch, check every byte, release; return how many blocks landed."""
        namespace = self.namespace(name, raw_bytes)
        fetched = self.store.fetch(namespace, keys, 60.0)
        arena = self.store.arena(namespace.domain).view
        for key, place in zip(keys, fetched.places, strict=False):
            shake = hashlib.shake_128(key).digest(raw_bytes)
            assert bytes(payload(arena[place:], raw_bytes)) == shake
        self.store.release(fetched.lease)
        return len(fetched.places)

    def used(self, name, tier=0):
        return self.view.used_bytes(tier, self.store.domain(name)[1])

    def flush(self):
        self.view.wait_until_written()

    def recount(self):
        """Return the bytes by tier and domain: as the copies add up, and as the store counts."""
        tiers = range(len(self.store.tier_names()))
        with self.view.still():
            counts = [Counter() for _ in tiers]
            for tier in tiers:
                for copy in self.view.copies(tier):
                    counts[tier][copy.namespace.domain] += copy.namespace.slot_bytes
            return counts, [
                {
                    domain: used
                    for domain in self.store.domain_ids.values()
                    if (used := self.view.used_bytes(tier, domain))
                }
                for tier in tiers
            ]


def test_a_domain_that_gets_no_memory_has_no_usage_entry():
    usage = DomainUsage(1)
    usage.add(0, b"stranger", 0)
    assert not usage.used[0]


@pytest.fixture
def two():
    made = []

    def make(**options):
        made.append(Two(**options))
        return made[-1]

    yield make
    for one in made:
        release_reservations(one.store)
        counted, known = one.recount()
        assert counted == known
        one.store.close()


def test_a_domain_that_comes_later_gets_its_share_of_memory_from_a_flood(two):
    one = two(quotas={})
    for seed in range(30):
        one.save("flood", seed, 16)
    assert one.used("flood") > 0.9 * HOST_BYTES
    kept = [one.save("victim", seed, 8)[0] for seed in range(10)]
    assert one.used("victim") == 80 * SIZE
    for seed in range(100, 130):
        one.save("flood", seed, 16)
    assert one.used("victim") == 80 * SIZE
    assert sum(one.read("victim", keys) for keys in kept) == 80


def test_memory_goes_to_the_most_recently_used_blocks_without_quotas(two):
    one = two()
    one.save("victim", 1, 8)
    for seed in range(40):
        one.clock.advance(1.0)
        one.save("flood", seed, 16)
    assert one.used("victim") == 0


def test_reserved_memory_is_lent_until_its_domain_needs_it_and_then_kept(two):
    one = two(quotas={"victim": {0: Quota(reserved_bytes=MIB)}, "flood": {0: Quota(share=100.0)}})
    for seed in range(30):
        one.save("flood", seed, 16)
    assert one.used("flood") > 0.9 * HOST_BYTES
    for seed in range(6):
        one.save("victim", seed, 8)
    held = one.used("victim")
    assert held >= 48 * SIZE
    for seed in range(100, 160):
        one.save("flood", seed, 16)
        assert one.used("victim") >= min(held, MIB - SIZE)


def test_a_domain_at_its_quota_replaces_its_own_blocks(two):
    one = two(quotas={"flood": {0: Quota(most_bytes=MIB)}})
    victim, _ = one.save("victim", 1, 16)
    for seed in range(20):
        _, new = one.save("flood", seed, 16)
        assert new == 16
        assert one.used("flood") <= MIB
    assert one.read("victim", victim) == 16
    assert one.used("flood") > MIB - 2 * SIZE


def test_a_context_larger_than_the_quota_is_saved_and_read_as_far_as_it_fits(two):
    one = two(tier=MemoryTier(64 * MIB), quotas={"flood": {0: Quota(most_bytes=MIB)}})
    keys, new = one.save("flood", 1, 80)
    assert new in {MIB // SIZE, MIB // SIZE + 16}, "the writer may free slots for the last 16"
    one.flush()
    assert one.read("flood", keys) == MIB // SIZE


def test_reserved_slots_count_towards_the_quota(two):
    one = two(quotas={"flood": {0: Quota(most_bytes=MIB)}})
    namespace = one.namespace("flood")
    keys = [bytes([i]) * 16 for i in range(100)]
    reserved = one.store.reserve(namespace, keys, b"f" * 16, 0)
    assert sum(place >= 0 for place in reserved.places) == MIB // SIZE
    assert one.store.reserve(namespace, [b"x" * 16], b"f" * 16, 0).places == [-1]
    one.store.abort(reserved.ticket)
    assert one.used("flood") == 0


def test_memory_moves_between_domains_one_run_at_a_time(two):
    """Blocks used in no order: whichever leave first, one run is emptied, not most of them."""
    one = two(quotas={})
    chains = [one.save("flood", seed, 1)[0] for seed in range(400)]
    random.Random(4).shuffle(chains)
    for keys in chains:
        one.clock.advance(1.0)
        one.read("flood", keys)
    before = one.used("flood")
    run = HOST_BYTES // 16
    _, new = one.save("victim", 1, 1)
    assert new == 1
    assert before - one.used("flood") <= run
    one.save("victim", 2, 8)
    assert before - one.used("flood") <= run


def test_a_new_record_size_gets_memory_by_evicting_one_run_of_blocks(two):
    one = two()
    for seed in range(400):
        one.save("flood", seed, 1)
    before = one.used("flood")
    _, new = one.save("flood", 1_000, 1, raw_bytes=100 * KIB)
    assert new == 1
    assert before - one.used("flood") <= HOST_BYTES // 16


def test_leased_blocks_are_not_evicted_for_another_domain(two):
    one = two(quotas={})
    keys, _ = one.save("flood", 1, 180)
    fetched = one.store.fetch(one.namespace("flood"), keys, 60.0)
    for seed in range(10):
        one.save("victim", seed, 16)
    assert one.read("flood", keys) == len(fetched.places) == 180
    one.store.release(fetched.lease)


def test_a_domain_at_its_quota_on_a_lower_tier_loses_its_own_oldest_blocks(two):
    tier = MemoryTier(64 * MIB)
    one = two(tier=tier, quotas={"flood": {1: Quota(most_bytes=MIB)}})
    victim, _ = one.save("victim", 1, 8)
    chains = []
    for seed in range(12):
        chains.append(one.save("flood", seed, 8)[0])
        one.flush()
        assert one.used("flood", 1) <= MIB
    assert one.used("flood", 1) == MIB // SIZE * SIZE
    assert tier.usage().used_bytes == one.used("flood", 1) + one.used("victim", 1)
    held = [one.view.held(one.namespace("flood"), keys, 1) for keys in chains]
    assert held[-6:] == [8] * 6
    assert not any(held[:5])
    assert one.read("victim", victim) == 8


def test_a_domain_with_a_larger_memory_than_disk_quota_does_not_rewrite_endlessly(two):
    tier = MemoryTier(64 * MIB)
    one = two(tier=tier, quotas={"flood": {0: Quota(most_bytes=2 * MIB), 1: Quota(0, MIB)}})
    for seed in range(40):
        one.save("flood", seed, 8)
        one.flush()
        assert one.save("flood", 1_000 + seed, 1)[1] == 1
        one.flush()
    assert one.used("flood") > 2 * MIB - 2 * SIZE
    assert tier._next <= 40 * 9 + 20


def test_a_write_budget_holds_per_domain_and_for_durable_saves_too(two):
    budgets = {domain_id(KEYS["flood"]): WriteBudget(AlwaysAdmit(), 24 * 10 * SIZE)}
    rules = TierRules(lambda _: PerDomain(AlwaysAdmit(), budgets), budgets)
    one = two(tier=MemoryTier(64 * MIB), rules={1: rules})
    for seed in range(8):
        one.save("flood", seed, 8, retention=list(Retention)[seed % 2 + 1])
        one.save("victim", seed, 2)
    one.flush()
    assert 0 < one.used("flood", 1) <= 10 * SIZE
    assert one.used("victim", 1) == 16 * SIZE


def test_pins_take_no_memory_that_another_domain_reserved(two):
    one = two(quotas={"victim": {0: Quota(reserved_bytes=3 * MIB)}})
    keys, _ = one.save("flood", 1, 150)
    pinned = one.store.pin(one.namespace("flood"), keys, 60.0)
    assert pinned == MIB // 4 // SIZE, "half of the rest for pins, and half of that for one domain"


def test_status_reports_fill_and_quotas(two):
    one = two(quotas={"flood": {0: Quota(MIB, 2 * MIB, 3.0)}})
    one.save("flood", 1, 4)
    found = {entry.domain: entry for entry in one.store.status().domains}
    assert found["flood"] == DomainStatus(
        domain="flood",
        configured=True,
        unreadable=0,
        share=3.0,
        reserved_bytes=MIB,
        used_bytes={"host": 4 * SIZE},
        raw_bytes={"host": 4 * SIZE},
        quota_bytes={"host": 2 * MIB},
    )
    assert found["victim"].quota_bytes == {}


@pytest.mark.parametrize("seed", range(6))
def test_counts_are_exact_and_quotas_hold_after_random_operations(two, seed):
    """Saves, reads, aborts, drops and erasures in any order; the fixture recounts."""
    quotas = {
        "flood": {0: Quota(most_bytes=2 * MIB), 1: Quota(most_bytes=3 * MIB)},
        "victim": {0: Quota(reserved_bytes=MIB)},
    }
    one, rng = two(tier=MemoryTier(5 * MIB), quotas=quotas), random.Random(seed)
    known = []
    for step in range(80):
        name = rng.choice(["flood", "flood", "victim"])
        before = one.used("victim")
        match rng.randrange(6):
            case 0 | 1 | 2:
                size = rng.choice([16 * KIB, 16 * KIB, 60 * KIB])
                keys, _ = one.save(name, seed * 1_000 + step, rng.randrange(1, 12), size)
                known.append((name, keys, size))
            case 3 if known:
                name, keys, size = rng.choice(known)
                one.read(name, keys, size)
            case 4:
                reserved = one.store.reserve(
                    one.namespace(name), [bytes([step]) * 16], b"f" * 16, 0
                )
                one.store.abort(reserved.ticket)
            case _:
                one.flush()
        assert one.used("flood") <= 2 * MIB
        assert one.used("flood", 1) <= 3 * MIB
        if name == "flood":
            assert one.used("victim") >= min(before, MIB)
    one.flush()


def test_read_batches_are_small_while_another_domain_reads_the_tier(two, monkeypatch):
    """On a slow tier what is under way of one would be what the other waits for."""
    one = two(tier=MemoryTier(64 * MIB))
    kept = {name: one.save(name, 1, 30)[0] for name in ("flood", "victim")}
    one.flush()
    sizes = []

    submit = FairThreads.submit

    def noted(threads, item, read):
        if item.cost >= SIZE:  # else it is not about blocks
            sizes.append(item.cost)
        return submit(threads, item, read)

    monkeypatch.setattr(FairThreads, "submit", noted)
    monkeypatch.setattr(one.store.estimates, "speed", lambda tier: 100.0 * MIB * tier)

    def read(name):
        sizes.clear()
        leave(one.store, one.namespace(name), kept[name])
        assert one.read(name, kept[name]) == 30
        return [size / SIZE for size in sizes]

    assert read("flood") == [30]
    assert read("victim") == [6] * 5  # 1.25 ms at most
    assert read("flood") == [6] * 5
    monkeypatch.setattr(one.store.estimates, "speed", lambda _: 1.0)
    assert read("victim") == [1] * 30
    monkeypatch.setattr(one.store.estimates, "speed", lambda _: math.inf)
    assert read("victim") == [30]


def hoard(two, name, blocks=16):
    """Reserve and never commit, until there is no room; return the bytes of the slots."""
    namespace, slots, seed = two.namespace(name), 0, 0
    while True:
        keys = [hashlib.blake2b(f"{name}/{seed}/{i}".encode(), digest_size=16).digest()
                for i in range(blocks)]  # fmt: skip
        got = sum(place >= 0 for place in two.store.reserve(namespace, keys, b"f" * 16, 0).places)
        slots, seed = slots + got, seed + 1
        if not got:
            return slots * namespace.slot_bytes


def test_unfilled_slots_take_no_memory_that_another_domain_reserved(two):
    one = two(quotas={"victim": {0: Quota(2 * MIB)}})
    held = hoard(one, "flood")
    assert MIB - 2 * SIZE < held <= MIB, "half of what nobody reserved"
    for _ in range(20):
        one.clock.advance(600)
        one.store.housekeep()
    assert one.save("victim", 1, 90)[1] == 90
    assert hoard(one, "victim") <= 3 * MIB, "its own reservation, and half of the rest"


def test_committed_and_aborted_slots_no_longer_count_as_unfilled(two):
    one = two(quotas={"victim": {0: Quota(2 * MIB)}})
    namespace, keys = one.namespace("flood"), [bytes([i]) * 16 for i in range(20)]
    for end in (one.store.commit, one.store.abort):
        for _ in range(10):
            reserved = one.store.reserve(namespace, keys, b"f" * 16, 0)
            end(reserved.ticket)
    one.store.abort(one.store.reserve(namespace, [b"x" * 16], b"f" * 16, 0).ticket, rest_s=5.0)
    held = hoard(one, "flood")
    assert MIB - 3 * SIZE < held <= MIB - SIZE, "one slot rests yet"
    one.clock.advance(6.0)
    one.store.housekeep()
    assert hoard(one, "flood") == SIZE


def test_a_block_can_be_saved_if_all_memory_is_reserved_or_the_block_is_large(two):
    one = two(quotas={"victim": {0: Quota(HOST_BYTES)}})
    assert 0 < hoard(one, "flood") <= HOST_BYTES // 16
    other = two(host_bytes=4 * MIB)
    assert other.save("flood", 1, 1, raw_bytes=3 * MIB)[1] == 1
