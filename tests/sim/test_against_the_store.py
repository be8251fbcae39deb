"""A simulation, a replay and a real store on a manual clock agree, request by request."""

import hashlib
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest

from holdfast.blocks.envelope import HEADER_BYTES, TAG_BYTES
from holdfast.blocks.namespace import Namespace
from holdfast.clock import ManualClock
from holdfast.plan.planner import FetchHeld
from holdfast.policy.admit import DAY_S, Admission, AlwaysAdmit, SecondTouch, WriteBudget
from holdfast.policy.choice import POLICIES
from holdfast.policy.movement import Intake
from holdfast.policy.retention import Retention
from holdfast.policy.reuse_interval import ReuseInterval
from holdfast.sim.fleet import Fleet
from holdfast.sim.hardware import resolve
from holdfast.sim.ladder import parse_ladder
from holdfast.sim.memory import SimulatedRules
from holdfast.sim.profile import shipped as profile
from holdfast.sim.replay import replay
from holdfast.sim.route import ROUTERS
from holdfast.sim.run import Simulation, SimulationSettings
from holdfast.sim.tier_order import FifoOrder, LruOrder
from holdfast.store.options import StoreOptions, TierRules
from holdfast.store.store import Store
from holdfast.testing.memory import MemoryTier, SharedMemoryTier
from holdfast.testing.store_view import StoreView
from holdfast.tiers.cxl.kind import CxlOptions
from holdfast.tiers.cxl.tier import CxlTier

RECORD_BYTES = 4096
PAYLOAD_BYTES = RECORD_BYTES - HEADER_BYTES - TAG_BYTES
SECRET = b"s" * 32
REQUESTS = 300
"""Of each trace: a real store packs and hashes every block."""
CONVERSATION = "mooncake_conversation"
SYNTHETIC = "mooncake_synthetic"


@pytest.fixture(autouse=True)
def housekeeping(monkeypatch):
    """A store frees some slots ahead of need, from time to time; here only when it needs them."""
    monkeypatch.setattr("holdfast.store.store._HOUSEKEEPING_S", 3_600.0)


def key_of(number):
    """The key of a block, as the simulator makes it: rules draw samples by keys."""
    return hashlib.blake2b(number.to_bytes(4, "little"), digest_size=16).digest()


class ReplayedStore:
    """A store with a host tier of so many blocks, through which a trace is replayed."""

    def __init__(self, blocks, policy, lower=(), rules=()):
        self.clock = ManualClock()
        by_tier = dict(enumerate(rules, start=1))
        options = StoreOptions(clock=self.clock, make_eviction=policy, rules=by_tier)
        self.store = Store(blocks * RECORD_BYTES, list(lower), {"default": SECRET}, options)
        self.view = StoreView(self.store)
        _, domain = self.store.domain("default")
        self.namespace = Namespace(b"f" * 16, domain, PAYLOAD_BYTES, 16)
        self.store.start()

    def serve(self, ids, time_s, *, is_durable=False):
        """Fetch the longest held prefix, then save the rest, or all as durable, while leased."""
        self.clock.advance(time_s - self.clock.now())
        store, namespace = self.store, self.namespace
        keys = [key_of(int(number)) for number in ids]
        fetched = store.fetch(namespace, keys, 60.0)
        held = len(fetched.places)
        first = 0 if is_durable else held
        if first < len(keys):
            parent = keys[first - 1] if first else namespace.fingerprint
            reserved = store.reserve(namespace, keys[first:], parent, first)
            retention = Retention.DURABLE if is_durable else Retention.SESSION
            store.commit(reserved.ticket, retention)
        store.release(fetched.lease)
        self.view.wait_until_moved()
        return fetched.sources

    def held(self):
        """How many blocks each tier holds now."""
        return [len(self.view.copies(tier)) for tier, _ in enumerate(self.store.tier_names())]


def served_by_a_store(trace, store, durable=None):
    """The blocks that each request gets, by tier; `durable`: which requests are durable."""
    if durable is None:
        durable = np.zeros(trace.requests, bool)
    try:
        return [
            store.serve(trace.chain(n), float(trace.time_s[n]), is_durable=durable[n])
            for n in range(trace.requests)
        ]
    finally:
        store.store.close()


@pytest.mark.parametrize("policy", ["leaf_lru", "cost_aware"])
@pytest.mark.parametrize("blocks", [32, 48, 80])
def test_a_replay_has_the_hits_of_a_real_store(shipped, policy, blocks):
    trace = shipped("taubench_gpt4o_airline_blk256B.jsonl.gz").first(REQUESTS)
    one = ReplayedStore(blocks, POLICIES[policy])
    hits = [sum(sources.values()) for sources in served_by_a_store(trace, one)]
    (capacity,) = one.held()  # memory is cut into slots, and the rest of it holds no block
    assert 0.8 * blocks <= capacity <= blocks
    for requests in (REQUESTS // 3, 2 * REQUESTS // 3, REQUESTS):
        found = replay(trace.first(requests), capacity, POLICIES[policy](), run_blocks=1)
        assert found.hit_blocks == sum(hits[:requests]), requests
    less = replay(trace, capacity - 2, POLICIES[policy](), run_blocks=1)
    assert less.hit_blocks < found.hit_blocks, "the trace does not tell stores of other sizes"


class LowerTier(NamedTuple):
    """A tier below memory: kind and size in blocks, and what it takes, in store and simulator."""

    kind: str
    blocks: int
    intake: Intake = Intake(evicted="never", fetched="never")
    admission: Callable[[], Admission] = AlwaysAdmit
    moves_per_s: float = math.inf
    """Most blocks a second that it gets of those that other tiers below memory evict."""
    waiting: int = 0
    """Most of these blocks that wait for it: those that a store moves ahead of their eviction."""

    def rules(self):
        """The rules of the store's tier."""
        limit = self.moves_per_s * RECORD_BYTES
        return TierRules(lambda _: self.admission(), intake=self.intake, move_bytes_per_s=limit)

    def open(self, number):
        """The tier of the store; its records are not counted beside its blocks."""
        nbytes = self.blocks * RECORD_BYTES
        if self.kind == "cxl":
            return CxlTier(CxlOptions(capacity=nbytes))
        if self.kind == "object":
            return SharedMemoryTier({}, name=f"tier{number}")
        return MemoryTier(nbytes, name=f"tier{number}")

    def model(self, block_tokens, blocks):
        """The tier of the ladder, of the size that the store's tier turned out to have."""
        intake = self.intake
        size = {} if self.kind == "object" else {"capacity_tokens": block_tokens * blocks}
        if self.moves_per_s < math.inf:
            size |= {"move_limit": int(self.moves_per_s * RECORD_BYTES)}
            size |= {"write_wait_s": self.waiting / self.moves_per_s}
        return {
            "kind": self.kind,
            "write": "behind" if intake.saves else "on_eviction",
            "admit_evicted": intake.evicted,
            "admit_fetched": intake.fetched,
            **size,
        }


class Replayed(NamedTuple):
    """What a store, and the simulator of its ladder, did with a trace."""

    stored: list
    """For each request, the blocks fetched from each tier that gave any, by number."""
    simulated: list
    store_evictions: dict
    evictions: dict
    """Copies that left each tier of the simulator."""
    moved: dict
    """Copies that the store made of what tiers below memory evict, by target."""
    demoted: dict
    """The same of the simulator."""
    declined: list
    """Blocks that each tier of the simulator did not admit."""


def replayed(trace, policy, host, lower, durable=None):
    """Replay a trace through a store and through the simulator of the same ladder."""
    tiers = [tier.open(number) for number, tier in enumerate(lower, start=1)]
    one = ReplayedStore(host, POLICIES[policy], tiers, [tier.rules() for tier in lower])
    fetched = served_by_a_store(trace, one, durable)
    names = one.store.tier_names()
    stored = [{names.index(n): blocks for n, blocks in each.items() if blocks} for each in fetched]
    held, size = one.held(), trace.block_tokens
    models = [tier.model(size, blocks) for tier, blocks in zip(lower, held[1:], strict=True)]
    ladder = {
        "tiers": [{"kind": "host", "capacity_tokens": size * held[0]}, *models],
        "engine": {"prefill": {}},
        "token_bytes": (PAYLOAD_BYTES - 0.5) / size,
    }
    orders = {"disk": FifoOrder, "cxl": LruOrder, "object": FifoOrder}
    hardware = resolve(parse_ladder(ladder), profile(), size)

    def rules_of(tier_spec):
        if tier_spec.kind == "host":
            return SimulatedRules(POLICIES[policy]())
        at = next(n for n, each in enumerate(hardware.tier_specs) if each is tier_spec)
        rule = lower[at - 1].admission()
        admission = None if isinstance(rule, AlwaysAdmit) else rule
        return SimulatedRules(orders[tier_spec.kind](), admission, evicts_by_itself=True)

    fleet = Fleet(hardware, 1, rules_of)
    setting = SimulationSettings(
        FetchHeld(), ROUTERS["round_robin"], longest_run=1, durable=durable
    )
    rows = Simulation(trace, fleet, setting).run().fetched.tolist()
    simulated = [{n: blocks for n, blocks in enumerate(row) if blocks} for row in rows]
    states = [fleet.tier_states(number)[0] for number in range(len(names))]
    return Replayed(
        stored,
        simulated,
        one.view.evictions,
        {n: tier.written - tier.held for n, tier in enumerate(states) if tier.written > tier.held},
        demoted_to(one.view.moves),
        {n: tier.demoted for n, tier in enumerate(states) if tier.demoted},
        [tier.declined for tier in states],
    )


def demoted_to(moves):
    """The copies that moves made of what tiers evict, by target."""
    demoted = Counter()
    for (_, target, reason), blocks in moves.items():
        if reason == "demotion":
            demoted[target] += blocks
    return dict(demoted)


def fetched_by_tier(requests):
    """The blocks that all requests fetch from each tier."""
    return sum(map(Counter, requests), Counter())


@pytest.mark.parametrize("policy", ["leaf_lru", "cost_aware"])
@pytest.mark.parametrize(
    ("name", "requests", "host", "lower"),
    [
        (SYNTHETIC, 300, 500, [LowerTier("disk", 3_000)]),
        (SYNTHETIC, 400, 500, [LowerTier("cxl", 2_000), LowerTier("disk", 5_000)]),
        (CONVERSATION, 400, 400, [LowerTier("cxl", 3_000), LowerTier("disk", 8_000)]),
    ],
)
def test_a_simulation_fetches_the_same_blocks_per_tier_as_a_real_store(
    shipped, policy, name, requests, host, lower
):
    """Promotion and eviction of three tiers, whose own orders are FIFO and LRU."""
    found = replayed(shipped(name).first(requests), policy, host, lower)
    assert found.simulated == found.stored
    assert len(fetched_by_tier(found.stored)) == len(lower) + 1, "it does not fetch from every tier"
    assert found.evictions == found.store_evictions


AHEAD_SHARE = 0.25
"""Share of a tier whose records a store moves before they are evicted. It is more than one request
writes, so that no eviction overtakes a move."""
ALL_DOWN = Intake(saves=False, evicted="always", fetched="never")
"""Gets all that faster tiers evict, and nothing else."""
FOUR_TIERS = {
    "all": [
        LowerTier("cxl", 800, Intake(evicted="never")),
        LowerTier("disk", 1_500, Intake(evicted="never", fetched="always")),
        LowerTier("object", 0, ALL_DOWN),
    ],
    "used twice": [
        LowerTier("cxl", 600, Intake(evicted="never")),
        LowerTier("disk", 1_000, Intake(evicted="never", fetched="reused")),
        LowerTier("object", 0, Intake(saves=False, evicted="reused")),
    ],
    "never up": [
        LowerTier("disk", 800),
        LowerTier("disk", 1_500, ALL_DOWN),
        LowerTier("object", 0, ALL_DOWN),
    ],
}


@pytest.fixture
def moves_ahead(monkeypatch):
    """Move records ahead of their eviction as far as a node with larger tiers does."""
    monkeypatch.setattr("holdfast.store.candidates.AHEAD_BYTES_MIN", 0)
    monkeypatch.setattr("holdfast.store.candidates.AHEAD_SHARE", AHEAD_SHARE)


@pytest.mark.usefixtures("moves_ahead")
@pytest.mark.parametrize("rules", FOUR_TIERS)
def test_a_simulation_moves_the_same_blocks_between_four_tiers_as_a_real_store(shipped, rules):
    """A store also has moved what its tiers evict next, which makes slower tiers evict more."""
    tiers = FOUR_TIERS[rules]
    found = replayed(shipped(SYNTHETIC).first(400), "cost_aware", 300, tiers)
    assert found.simulated == found.stored
    assert len(fetched_by_tier(found.stored)) == 4, "it does not fetch from every tier"
    for simulated, stored in (
        (found.evictions, found.store_evictions),
        (found.demoted, found.moved),
    ):
        assert simulated.keys() == stored.keys()
        for tier, blocks in simulated.items():
            ahead = sum(AHEAD_SHARE * above.blocks for above in tiers[: max(0, tier - 1)])
            assert blocks <= stored[tier] <= blocks + ahead


@pytest.mark.usefixtures("moves_ahead")
def test_a_simulation_of_full_tiers_that_give_each_other_everything_agrees_with_a_store(shipped):
    """A store moves blocks before they are evicted, so full tiers evict in another order."""
    every = Intake(saves=False, evicted="always", fetched="always")
    lower = [LowerTier("disk", 1_000, Intake(fetched="always"))]
    lower += [LowerTier("disk", 2_000, every), LowerTier("disk", 4_000, every)]
    found = replayed(shipped(SYNTHETIC).first(500), "leaf_lru", 500, lower)
    agree(found, 0.02)
    assert all(found.store_evictions[tier] for tier in range(4))


DISK_BLOCKS = 1_500
ADMISSION = {
    "second touch": partial(SecondTouch, 1 << 16),
    "reuse interval": partial(ReuseInterval, DISK_BLOCKS * RECORD_BYTES),
    "write budget": lambda: WriteBudget(AlwaysAdmit(), DAY_S * 30 * RECORD_BYTES),
}


@pytest.mark.usefixtures("moves_ahead")
@pytest.mark.parametrize("rule", ADMISSION)
def test_a_simulated_tier_admits_what_a_real_store_admits(shipped, rule):
    """A store asks again at the second use of a block, the simulator when its tier evicts it."""
    tiers = [
        LowerTier("cxl", 600, Intake(evicted="never")),
        LowerTier("disk", DISK_BLOCKS, Intake(fetched="always"), ADMISSION[rule]),
        LowerTier("object", 0, ALL_DOWN),
    ]
    found = replayed(shipped(SYNTHETIC).first(300), "cost_aware", 300, tiers)
    assert found.declined[2], "the rule refuses nothing"
    agree(found, 0.02)


@pytest.mark.usefixtures("moves_ahead")
def test_a_simulation_writes_durable_contexts_below_as_a_real_store(shipped):
    """Every third request is durable, so tiers take its blocks which refuse those of others."""
    trace = shipped(SYNTHETIC).first(300)
    tiers = [
        LowerTier("cxl", 600, Intake(evicted="never")),
        LowerTier("disk", 500, Intake(fetched="never"), ADMISSION["second touch"]),
        LowerTier("object", 0, Intake(saves=False, evicted="reused", fetched="never")),
    ]
    durable = np.arange(trace.requests) % 3 == 0
    found = replayed(trace, "leaf_lru", 300, tiers, durable)
    ordinary = replayed(trace, "leaf_lru", 300, tiers)
    hits = [fetched_by_tier(each.stored).total() for each in (found, ordinary)]
    assert hits[0] > 1.05 * hits[1], "durable contexts are kept no better"
    agree(found, 0.02)


@pytest.mark.usefixtures("moves_ahead")
def test_a_simulated_tier_gets_about_as_many_moves_within_its_limit_as_a_real_store(shipped):
    """A store moves fewer: what it is about to move is evicted while it waits."""
    trace = shipped(SYNTHETIC).first(300)
    disk_blocks, limit = 1_000, 40.0
    waiting = int(AHEAD_SHARE * disk_blocks)
    tiers = [
        LowerTier("cxl", 600, Intake(evicted="never")),
        LowerTier("disk", disk_blocks, Intake(evicted="never")),
        LowerTier("object", 0, ALL_DOWN, moves_per_s=limit, waiting=waiting),
    ]
    found = replayed(trace, "cost_aware", 300, tiers)
    most = limit * trace.span_s + waiting
    assert most < 0.7 * found.store_evictions[2], "the limit holds nothing back"
    assert 0.6 * found.demoted[3] < found.moved[3] <= most
    assert found.demoted[3] <= most
    agree(found, 0.02, tiers=range(3))


def agree(found, difference, tiers=range(4)):
    """The store and the simulator fetch equally many blocks from each tier, within a share."""
    stored, simulated = fetched_by_tier(found.stored), fetched_by_tier(found.simulated)
    assert len(stored) == 4, "it does not fetch from every tier"
    for tier in tiers:
        assert abs(simulated[tier] - stored[tier]) <= difference * stored.total()
    if 3 in tiers:
        assert simulated.total() == pytest.approx(stored.total(), rel=difference)


@pytest.mark.usefixtures("moves_ahead")
def test_a_disk_that_demotes_has_the_hits_of_one_store_of_the_summed_capacity(shipped):
    """Of agent sessions, in a store and in the simulator. Rows of `bench movement` are whole."""
    trace = shipped("claudecode").first(5_000).coarse(512)
    host, disk, far = 45, 80, 120
    below = [
        LowerTier("disk", disk, Intake(evicted="never")),
        LowerTier("disk", far, Intake(saves=False, evicted="always")),
    ]
    both = replayed(trace, "cost_aware", host, below)
    hits = [fetched_by_tier(each).total() for each in (both.stored, both.simulated)]
    alone, summed = (
        fetched_by_tier(replayed(trace, "cost_aware", host, [LowerTier("disk", n)]).stored).total()
        for n in (disk, disk + far)
    )
    assert alone < 0.95 * summed, "the slower tier has nothing to add"
    assert min(hits) >= 0.98 * summed
    assert hits[1] == pytest.approx(hits[0], rel=0.02)
