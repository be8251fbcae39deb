"""A simulation, a replay and a real store on a manual clock agree, request by request."""

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
from holdfast.store.options import StoreOptions, TierRules
from holdfast.store.store import Store
from holdfast.testing.memory import MemoryTier
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


AS_SIMULATED = {n: TierRules(intake=Intake(evicted="never", fetched="never")) for n in (1, 2, 3)}
"""A simulated tier takes what others evict only with `write: on_eviction`, and none that is fetched
from below unless it is volatile."""


class ReplayedStore:
    """A store with a host tier of so many blocks, through which a trace is replayed."""

    def __init__(self, blocks, policy, lower=()):
        self.clock = ManualClock()
        options = StoreOptions(clock=self.clock, make_eviction=policy, rules=AS_SIMULATED)
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


@pytest.mark.parametrize("policy", ["leaf_lru", "cost_aware"])
@pytest.mark.parametrize(
    ("name", "requests", "host", "lower"),
    [
        (SYNTHETIC, 300, 500, {"disk": 3_000}),
        (SYNTHETIC, 400, 500, {"cxl": 2_000, "disk": 5_000}),
        (CONVERSATION, 400, 400, {"cxl": 3_000, "disk": 8_000}),
    ],
)
def test_a_simulation_fetches_the_same_blocks_per_tier_as_a_real_store(
    shipped, policy, name, requests, host, lower
):
    """Promotion, demotion and eviction of three tiers, whose own orders are FIFO and LRU."""
    trace = first(shipped(name), requests)
    tiers = []
    if "cxl" in lower:
        tiers.append(CxlTier(CxlOptions(capacity=lower["cxl"] * RECORD_BYTES)))
    tiers.append(MemoryTier(lower["disk"] * RECORD_BYTES, name="disk"))
    one = ReplayedStore(host, POLICIES[policy], tiers)
    stored = served_by_a_store(trace, one)
    evicted = one.view.evictions

    names, size = ["host", *lower], trace.block_tokens
    ladder = {
        "tiers": [
            {"kind": kind, "capacity_tokens": size * blocks}
            for kind, blocks in zip(names, one.held(), strict=True)
        ],
        "engine": {"prefill": {}},
        "token_bytes": 100,
    }
    orders = {"host": POLICIES[policy], "disk": FifoOrder, "cxl": LruOrder}
    fleet = Fleet(
        resolve(parse_ladder(ladder), profile(), size),
        1,
        lambda tier_spec: SimulatedRules(
            orders[tier_spec.kind](), evicts_by_itself=tier_spec.kind != "host"
        ),
    )
    setting = SimulationSettings(FetchHeld(), ROUTERS["round_robin"], longest_run=1)
    served = Simulation(trace, fleet, setting).run()

    found = [
        {tier: int(blocks) for tier, blocks in zip(names, row, strict=True) if blocks}
        for row in served.fetched
    ]
    assert found == [{tier: n for tier, n in sources.items() if n} for sources in stored]
    assert all(served.fetched.sum(axis=0)), "the trace does not fetch from every tier"
    simulated = [fleet.tier_states(number)[0] for number in range(len(names))]
    assert {n: tier.written - tier.held for n, tier in enumerate(simulated)} == evicted
