"""A simulation, a replay and a real store on a manual clock agree, request by request."""

from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest

from holdfast.blocks.envelope import HEADER_BYTES, TAG_BYTES
from holdfast.blocks.namespace import Namespace
from holdfast.clock import ManualClock
from holdfast.plan.planner import FetchHeld
from holdfast.policy.choice import POLICIES
from holdfast.policy.movement import Intake
from holdfast.sim.fleet import Fleet
from holdfast.sim.hardware import resolve
from holdfast.sim.ladder import parse_ladder
from holdfast.sim.memory import SimulatedRules
from holdfast.sim.profile import shipped as profile
from holdfast.sim.replay import replay
from holdfast.sim.route import ROUTERS
from holdfast.sim.run import Simulation, SimulationSettings
from holdfast.sim.tier_order import FifoOrder, LruOrder
from holdfast.sim.trace import Requests, arrange
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


class ReplayedStore:
    """A store with a host tier of so many blocks, through which a trace is replayed."""

    def __init__(self, blocks, policy, lower=(), intakes=()):
        self.clock = ManualClock()
        rules = {n: TierRules(intake=intake) for n, intake in enumerate(intakes, start=1)}
        options = StoreOptions(clock=self.clock, make_eviction=policy, rules=rules)
        self.store = Store(blocks * RECORD_BYTES, list(lower), {"default": SECRET}, options)
        self.view = StoreView(self.store)
        _, domain = self.store.domain("default")
        self.namespace = Namespace(b"f" * 16, domain, PAYLOAD_BYTES, 16)
        self.store.start()

    def serve(self, ids, time_s):
        """Fetch the longest held prefix, then save the rest while it is leased."""
        self.clock.advance(time_s - self.clock.now())
        store, namespace = self.store, self.namespace
        keys = [int(number).to_bytes(16, "big") for number in ids]
        fetched = store.fetch(namespace, keys, 60.0)
        held = len(fetched.places)
        if held < len(keys):
            parent = keys[held - 1] if held else namespace.fingerprint
            reserved = store.reserve(namespace, keys[held:], parent, held)
            store.commit(reserved.ticket)
        store.release(fetched.lease)
        self.view.wait_until_written()
        return fetched.sources

    def held(self):
        """How many blocks each tier holds now."""
        return [len(self.view.copies(tier)) for tier, _ in enumerate(self.store.tier_names())]


def first(trace, requests):
    """The first requests of a trace."""
    return trace._replace(
        time_s=trace.time_s[:requests],
        input_tokens=trace.input_tokens[:requests],
        output_tokens=trace.output_tokens[:requests],
        session=trace.session[:requests],
        think_s=trace.think_s[:requests],
        starts=trace.starts[: requests + 1],
        ids=trace.ids[: trace.starts[requests]],
    )


def coarse(trace, blocks):
    """The trace in blocks that are longer by a factor; shorter requests are left out."""
    chains = [trace.chain(request)[blocks - 1 :: blocks] for request in range(trace.requests)]
    kept = [request for request, chain in enumerate(chains) if len(chain)]
    counts = np.array([len(chains[request]) for request in kept], np.int64)
    size = trace.block_tokens * blocks
    requests = Requests(
        trace.time_s[kept],
        counts * size,
        trace.output_tokens[kept],
        trace.session[kept],
        trace.think_s[kept],
    )
    ids = np.concatenate([chains[request] for request in kept])
    return arrange(trace.name, size, requests, counts, ids)


def served_by_a_store(trace, store):
    """The blocks that each request gets, by tier."""
    try:
        return [
            store.serve(trace.chain(request), float(trace.time_s[request]))
            for request in range(trace.requests)
        ]
    finally:
        store.store.close()


@pytest.mark.parametrize("policy", ["leaf_lru", "cost_aware"])
@pytest.mark.parametrize("blocks", [32, 48, 80])
def test_a_replay_has_the_hits_of_a_real_store(shipped, policy, blocks):
    trace = first(shipped("taubench_gpt4o_airline_blk256B.jsonl.gz"), REQUESTS)
    one = ReplayedStore(blocks, POLICIES[policy])
    hits = [sum(sources.values()) for sources in served_by_a_store(trace, one)]
    (capacity,) = one.held()  # memory is cut into slots, and the rest of it holds no block
    assert 0.8 * blocks <= capacity <= blocks
    for requests in (REQUESTS // 3, 2 * REQUESTS // 3, REQUESTS):
        found = replay(first(trace, requests), capacity, POLICIES[policy](), run_blocks=1)
        assert found.hit_blocks == sum(hits[:requests]), requests
    less = replay(trace, capacity - 2, POLICIES[policy](), run_blocks=1)
    assert less.hit_blocks < found.hit_blocks, "the trace does not tell stores of other sizes"


class LowerTier(NamedTuple):
    """A tier below memory: kind and size in blocks, and what it takes, in store and simulator."""

    kind: str
    blocks: int
    intake: Intake = Intake(evicted="never", fetched="never")

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


def replayed(trace, policy, host, lower):
    """Replay a trace through a store and through the simulator of the same ladder."""
    tiers = [tier.open(number) for number, tier in enumerate(lower, start=1)]
    one = ReplayedStore(host, POLICIES[policy], tiers, [tier.intake for tier in lower])
    fetched = served_by_a_store(trace, one)
    names = one.store.tier_names()
    stored = [{names.index(n): blocks for n, blocks in each.items() if blocks} for each in fetched]
    held, size = one.held(), trace.block_tokens
    models = [tier.model(size, blocks) for tier, blocks in zip(lower, held[1:], strict=True)]
    ladder = {
        "tiers": [{"kind": "host", "capacity_tokens": size * held[0]}, *models],
        "engine": {"prefill": {}},
        "token_bytes": 100,
    }
    orders = {"host": POLICIES[policy], "disk": FifoOrder, "cxl": LruOrder, "object": FifoOrder}
    fleet = Fleet(
        resolve(parse_ladder(ladder), profile(), size),
        1,
        lambda tier_spec: SimulatedRules(
            orders[tier_spec.kind](), evicts_by_itself=tier_spec.kind != "host"
        ),
    )
    setting = SimulationSettings(FetchHeld(), ROUTERS["round_robin"], longest_run=1)
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
    found = replayed(first(shipped(name), requests), policy, host, lower)
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
    found = replayed(first(shipped(SYNTHETIC), 400), "cost_aware", 300, tiers)
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
    found = replayed(first(shipped(SYNTHETIC), 500), "leaf_lru", 500, lower)
    stored, simulated = fetched_by_tier(found.stored), fetched_by_tier(found.simulated)
    assert len(stored) == 4, "it does not fetch from every tier"
    assert all(found.store_evictions[tier] for tier in range(4))
    assert simulated.total() == pytest.approx(stored.total(), rel=0.02)
    assert all(abs(simulated[tier] - stored[tier]) < 0.02 * stored.total() for tier in range(4))


@pytest.mark.usefixtures("moves_ahead")
def test_a_disk_that_demotes_has_the_hits_of_one_store_of_the_summed_capacity(shipped):
    """Of agent sessions, in a store and in the simulator. Rows of `bench movement` are whole."""
    trace = coarse(first(shipped("claudecode"), 5_000), 512)
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
