"""A simulation counts, queues and moves as its model says."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.plan.planner import BestCut, FetchHeld
from holdfast.policy.leaf import LeafLru
from holdfast.sim.curve import curve
from holdfast.sim.fleet import Fleet
from holdfast.sim.formats.load import load
from holdfast.sim.hardware import resolve
from holdfast.sim.ladder import parse_ladder
from holdfast.sim.memory import SimulatedRules
from holdfast.sim.profile import shipped as profile
from holdfast.sim.route import ROUTERS
from holdfast.sim.rules import rules_of
from holdfast.sim.run import Simulation, SimulationSettings
from holdfast.sim.trace import Requests, arrange

TRACES = Path(__file__).resolve().parents[2] / "traces"
AT_ONCE = {"prefill": {}}
HELD = SimulationSettings(FetchHeld(), ROUTERS["round_robin"])


def trace_of(chains, times=None, block_tokens=4, think=None, session=None):
    n = len(chains)
    counts = np.array([len(chain) for chain in chains], np.int64)
    requests = Requests(
        np.arange(n, dtype=np.float64) if times is None else np.array(times, np.float64),
        counts * block_tokens,
        np.full(n, 10, np.int64),
        np.full(n, -1, np.int32) if session is None else np.array(session, np.int32),
        np.full(n, np.nan) if think is None else np.array(think, np.float64),
    )
    ids = np.array([i for chain in chains for i in chain], np.int64)
    return arrange("made", block_tokens, requests, counts, ids)


def fleet_of(tiers, engine=AT_ONCE, workers=1, block_tokens=4, token_bytes=1_000):
    ladder = parse_ladder({"tiers": tiers, "engine": engine, "token_bytes": token_bytes})
    return Fleet(
        resolve(ladder, profile(), block_tokens), workers, lambda _: SimulatedRules(LeafLru())
    )


def host(blocks, **more):
    return {"kind": "host", "capacity_tokens": 4 * blocks, **more}


def token_hit(trace, found):
    tokens = np.minimum(found.fetched.sum(axis=1) * trace.block_tokens, trace.input_tokens)
    return tokens.sum() / trace.input_tokens.sum()


def computed_tokens(trace, found):
    """The tokens that engines computed; of each request at least one."""
    reused = np.minimum(found.fetched.sum(axis=1) * trace.block_tokens, trace.input_tokens - 1)
    return (trace.input_tokens - reused).sum()


@pytest.mark.parametrize("longest", [1, 64])
@pytest.mark.parametrize("blocks", [1_000, 5_860, 19_532])
def test_one_tier_hits_what_the_exact_curve_gives_on_a_shipped_trace(longest, blocks):
    trace = load(TRACES / "mooncake_synthetic_trace.jsonl.gz")
    fleet = fleet_of([{"kind": "host", "capacity_tokens": 512 * blocks}], block_tokens=512)
    found = Simulation(trace, fleet, HELD._replace(longest_run=longest)).run()
    assert token_hit(trace, found) == pytest.approx(curve(trace).token_hit(blocks), abs=1e-12)


@st.composite
def grown(draw):
    chains, fresh = [], 0
    for _ in range(draw(st.integers(1, 25))):
        front = draw(st.sampled_from(chains)) if chains and draw(st.booleans()) else []
        kept = front[: draw(st.integers(0, len(front)))]
        more = draw(st.integers(0 if kept else 1, 6))
        chains.append([*kept, *range(fresh, fresh + more)])
        fresh += more
    return chains


@given(grown(), st.integers(1, 30), st.sampled_from([1, 3, 64]))
def test_one_tier_hits_what_the_exact_curve_gives_on_any_trace(chains, blocks, longest):
    trace = trace_of(chains)
    found = Simulation(trace, fleet_of([host(blocks)]), HELD._replace(longest_run=longest)).run()
    assert token_hit(trace, found) == pytest.approx(curve(trace).token_hit(blocks))


@settings(max_examples=60)
@given(
    grown(),
    st.lists(st.integers(1, 12), min_size=4, max_size=4),
    st.sampled_from(["behind", "on_eviction"]),
    st.integers(1, 3),
)
def test_tiers_never_exceed_their_capacity_and_count_their_blocks_exactly(
    chains, sizes, write, workers
):
    kinds = ["device", "host", "disk", "pool"]
    tiers = [
        {"kind": kind, "capacity_tokens": 4 * size, "write": write, "read_bytes_per_s": 1e5}
        for kind, size in zip(kinds, sizes, strict=True)
    ]
    trace, fleet = trace_of(chains), fleet_of(tiers, workers=workers)
    found = Simulation(trace, fleet, HELD).run()
    for tier, size in enumerate(sizes):
        for number, tier_state in enumerate(fleet.tier_states(tier)):
            memory = fleet.shared if tier == 3 else fleet.workers[number].memory
            column = memory.index.places[0 if tier == 3 else tier]
            assert tier_state.held == sum(place for place in column if place > 0)
            assert tier_state.held <= tier_state.peak <= size
    assert (found.fetched.sum(axis=1) <= np.diff(trace.starts)).all()
    for memory in [fleet.shared, *(worker.memory for worker in fleet.workers)]:
        assert not any(memory.index.leases)
    assert not any(len(link) for link in fleet.links)
    assert all(worker.requests == worker.ahead == 0 for worker in fleet.workers)
    assert all(abs(worker.engine.backlog_s) < 1e-9 for worker in fleet.workers)


def test_an_engine_prefills_one_request_at_a_time():
    engine = {"prefill": {"a": 1.0, "b": 0.25}}
    trace = trace_of([[0, 1], [2, 3], [4]], times=[0.0, 0.0, 10.0])
    found = Simulation(trace, fleet_of([host(9)], engine), HELD).run()
    assert found.started_s.tolist() == [0.0, 3.0, 10.0]
    assert found.first_s.tolist() == [3.0, 6.0, 12.0]


def test_two_prefills_at_once_finish_side_by_side():
    engine = {"prefill": {"a": 1.0, "b": 0.25}, "prefills_at_once": 2}
    trace = trace_of([[0, 1], [2, 3], [4]], times=[0.0, 0.0, 0.0])
    found = Simulation(trace, fleet_of([host(9)], engine), HELD).run()
    assert found.first_s.tolist() == [3.0, 3.0, 5.0]


def test_a_fetch_takes_the_latency_and_the_bytes_over_bandwidth():
    engine = {"prefill": {"b": 100.0}}
    fleet = fleet_of([host(99, latency_s=0.5, read_bytes_per_s=4_096.0)], engine)
    trace = trace_of([[0, 1, 2, 3], [0, 1, 2, 3, 4]], times=[0.0, 5_000.0])
    found = Simulation(trace, fleet, SimulationSettings(BestCut(), ROUTERS["round_robin"])).run()
    block = fleet.hardware.namespace.slot_bytes
    assert found.fetched[1].tolist() == [4]
    assert found.fetched_s[1] - found.looked_s[1] == pytest.approx(0.5 + 4 * block / 4_096)
    assert found.first_s[1] - found.fetched_s[1] == pytest.approx(400.0)
    assert found.saved_s[1] == pytest.approx(1_600.0)


def test_blocks_that_are_not_worth_fetching_are_computed():
    engine = {"prefill": {"b": 1e-6}}
    fleet = fleet_of([host(99, latency_s=5.0)], engine)
    trace = trace_of([[0, 1, 2], [0, 1, 2]], times=[0.0, 9.0])
    found = Simulation(trace, fleet, SimulationSettings(BestCut(), ROUTERS["round_robin"])).run()
    assert found.held.tolist() == [0, 3]
    assert found.fetched.sum() == 0


def test_a_late_fetch_is_cut_short_and_the_rest_is_computed():
    # Each of ten expects those before it to be served first, but they all share the link.
    engine = {"prefill": {"b": 3.2}, "prefills_at_once": 20, "fetch_ahead": 20}
    fleet = fleet_of([host(99, read_bytes_per_s=4_096.0)], engine)
    chain = list(range(8))
    trace = trace_of([chain] * 11, times=[0.0, *[200.0] * 10])
    found = Simulation(trace, fleet, SimulationSettings(BestCut(), ROUTERS["round_robin"])).run()
    late = found.late.astype(bool)
    assert late.any()
    assert (found.fetched[late].sum(axis=1) < 8).all()
    assert (found.first_s[1:] - found.arrived_s[1:] < 2 * 3.2 * 32).all()


def test_a_pool_is_shared_and_a_host_is_not():
    trace = trace_of([[0, 1], [0, 1]])
    for kind, fetched in (("host", 0), ("pool", 2)):
        tiers = [{"kind": kind, "capacity_tokens": 40}]
        found = Simulation(trace, fleet_of(tiers, workers=2), HELD).run()
        assert found.worker.tolist() == [0, 1]
        assert found.fetched[1].sum() == fetched


def test_blocks_evicted_from_a_tier_are_demoted():
    tiers = [host(2), {"kind": "disk", "capacity_tokens": 40, "write": "on_eviction"}]
    trace = trace_of([[0, 1], [2, 3], [0, 1]])
    fleet = fleet_of(tiers)
    found = Simulation(trace, fleet, HELD).run()
    assert found.fetched.tolist() == [[0, 0], [0, 0], [0, 2]]
    assert [tier_state.written for tier in (0, 1) for tier_state in fleet.tier_states(tier)] == [
        6,
        4,
    ]


def test_too_many_writes_are_refused():
    slow = {"kind": "disk", "capacity_tokens": 40, "write_bytes_per_s": 1.0, "write_wait_s": 10_000}
    fleet = fleet_of([host(1), slow])
    Simulation(trace_of([[0, 1, 2]]), fleet, HELD).run()
    tier_state = fleet.tier_states(1)[0]
    assert (tier_state.held, tier_state.refused) == (1, 2)


def test_the_next_request_of_a_session_waits_for_the_answer_in_a_closed_loop():
    engine = {"prefill": {"b": 1.0}, "decode_tokens_per_s": 10.0}
    times, think = [0.0, 4.0, 5.0], [np.nan, 3.0, 3.0]
    trace = trace_of([[0], [0, 1], [5]], times, think=think, session=[0, 0, -1])
    closed = Simulation(trace, fleet_of([host(9)], engine), HELD._replace(closed_loop=True)).run()
    # first token at 4 s, 10 tokens at 10 a second, then 3 s of thinking
    assert closed.arrived_s.tolist() == [0.0, 8.0, 5.0]
    opened = Simulation(trace, fleet_of([host(9)], engine), HELD).run()
    assert opened.arrived_s.tolist() == times


def test_progress_counts_requests_that_wait_for_an_answer():
    think = [np.nan, *[0.5] * 599]
    trace = trace_of([[0]] * 600, think=think, session=[0] * 600)
    told = []
    setting = HELD._replace(closed_loop=True)
    Simulation(trace, fleet_of([host(9)]), setting, told.append).run()
    assert told == [256, 512]


def test_parallel_requests_of_an_agent_do_not_wait_for_each_other():
    engine = {"prefill": {"b": 1.0}, "decode_tokens_per_s": 10.0}
    times, think = [0.0, 10.0, 11.0], [np.nan, 5.0, 6.0]  # both think from 5 s on, after the first
    trace = trace_of([[0], [0, 1], [0, 2]], times, think=think, session=[0, 0, 0])
    found = Simulation(trace, fleet_of([host(9)], engine), HELD._replace(closed_loop=True)).run()
    assert found.arrived_s.tolist() == [0.0, 10.0, 11.0]


def test_each_router_chooses_workers_by_its_rule():
    engine = {"prefill": {"b": 1.0}}
    chains = [[0, 1], [2], [0, 1, 3]]
    chosen = {}
    for name, router in ROUTERS.items():
        trace = trace_of(chains, times=[0.0, 1.0, 50.0])
        fleet = fleet_of([host(99)], engine, workers=2)
        found = Simulation(trace, fleet, SimulationSettings(FetchHeld(), router)).run()
        chosen[name] = found.worker.tolist()
    assert chosen["round_robin"] == [0, 1, 0]
    assert chosen["least_queue"] == [0, 1, 0]
    assert chosen["longest_prefix"][2] == chosen["longest_prefix"][0]
    assert chosen["soonest"] == [0, 1, 0]


def test_the_figures_of_a_full_run_have_their_known_values(shipped):
    """Two workers, three tiers, all of them full: figures as they were before any of it."""
    tiers = [
        {"kind": "device", "capacity_tokens": 4e5},
        {"kind": "host", "capacity_tokens": 1e6, "read_bytes_per_s": 1e11},
        {
            "kind": "disk",
            "capacity_tokens": 4e6,
            "read_bytes_per_s": 1e10,
            "write_bytes_per_s": 5e9,
            "policy": "cost_aware",
        },
    ]
    engine = {"prefill": {"a": 0.02, "b": 1.1e-4, "c": 2.1e-9}}
    hardware = resolve(
        parse_ladder({"tiers": tiers, "engine": engine, "token_bytes": 327_680}), profile(), 512
    )
    fleet = Fleet(hardware, 2, rules_of(hardware))
    setting = SimulationSettings(BestCut(), ROUTERS["least_queue"])
    trace = shipped("conversation").first(1_500)
    found = Simulation(trace, fleet, setting).run()
    assert found.fetched.sum(axis=0).tolist() == [1_574, 1_080, 3_572]
    assert computed_tokens(trace, found) == 17_795_045
    assert found.first_s.sum() == pytest.approx(1_042_675.0452077598, rel=1e-12)
    written = [[tier_state.written for tier_state in fleet.tier_states(tier)] for tier in range(3)]
    assert written == [[20_690, 19_430], [20_122, 18_918], [18_326, 17_079]]


class Crowded(Fleet):
    def expect_at_most(self, blocks):
        """Keep an order for every tier, whether or not it can ever be full."""


@settings(max_examples=40)
@given(grown(), st.lists(st.integers(2, 40), min_size=3, max_size=3), st.integers(1, 2))
def test_skipping_the_eviction_order_of_a_roomy_tier_changes_no_figure(chains, sizes, workers):
    kinds = ["device", "host", "pool"]
    tiers = [
        {"kind": kind, "capacity_tokens": 4 * size, "read_bytes_per_s": 1e5}
        for kind, size in zip(kinds, sizes, strict=True)
    ]
    ladder = parse_ladder({"tiers": tiers, "engine": AT_ONCE, "token_bytes": 1_000})
    trace, hardware, found = trace_of(chains), resolve(ladder, profile(), 4), []
    for kind in (Fleet, Crowded):
        fleet = kind(hardware, workers, lambda _: SimulatedRules(LeafLru()))
        found.append([column.tolist() for column in Simulation(trace, fleet, HELD).run()])
        found[-1].append(
            [tier_state.written for tier in range(3) for tier_state in fleet.tier_states(tier)]
        )
    assert found[0] == found[1]


class Gradual(Fleet):
    def create_rows(self, keys, parent_runs, lengths):
        """Make no row before a request comes that has its run."""


@settings(max_examples=40)
@given(grown(), st.lists(st.integers(1, 12), min_size=3, max_size=3), st.sampled_from([1, 3]))
def test_index_rows_created_in_advance_give_the_same_figures(chains, sizes, longest):
    kinds = ["device", "host", "pool"]
    tiers = [
        {"kind": kind, "capacity_tokens": 4 * size, "read_bytes_per_s": 1e5, "write": write}
        for kind, size, write in zip(kinds, sizes, ["behind", "behind", "on_eviction"], strict=True)
    ]
    ladder = parse_ladder({"tiers": tiers, "engine": AT_ONCE, "token_bytes": 1_000})
    trace, hardware, found = trace_of(chains), resolve(ladder, profile(), 4), []
    for kind in (Fleet, Gradual):
        fleet = kind(hardware, 1, rules_of(hardware))
        served = Simulation(trace, fleet, HELD._replace(longest_run=longest)).run()
        found.append([column.tolist() for column in served])
        found[-1].append(
            [tier_state.written for tier in range(3) for tier_state in fleet.tier_states(tier)]
        )
    assert found[0] == found[1]


def test_a_request_without_tokens_reuses_none_of_the_device_tier():
    trace = trace_of([[0, 1], [0]])
    trace = trace._replace(input_tokens=np.array([8, 0]))
    device = {"kind": "device", "capacity_tokens": 16}
    fleet = fleet_of([device, host(4)], {"prefill": {"b": 1.0}})
    served = Simulation(trace, fleet, HELD).run()
    assert served.fetched.tolist() == [[0, 0], [0, 0]]
    assert fleet.workers[0].engine.busy_s == 8


def test_engines_without_a_tier_compute_everything():
    fleet = fleet_of([host(4)], {"prefill": {"b": 1.0}})
    bare = Fleet(fleet.hardware._replace(tier_specs=[]), 1, rules_of(fleet.hardware))
    trace = trace_of([[0, 1], [0, 1]])
    Simulation(trace, bare, HELD).run()
    assert bare.workers[0].engine.busy_s == trace.input_tokens.sum()
