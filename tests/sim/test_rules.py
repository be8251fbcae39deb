"""A simulated tier is ruled by the policies and the rules of admission that serve."""

import numpy as np
import pytest

from holdfast.errors import ConfigError
from holdfast.plan.planner import FetchHeld
from holdfast.policy.admit import AlwaysAdmit
from holdfast.policy.base import NEVER
from holdfast.policy.cost_aware import CostAware
from holdfast.policy.leaf import LeafLru
from holdfast.policy.s3fifo import S3Fifo
from holdfast.sim.fleet import Fleet
from holdfast.sim.hardware import resolve
from holdfast.sim.ladder import parse_ladder
from holdfast.sim.memory import SimulatedRules
from holdfast.sim.profile import shipped
from holdfast.sim.route import ROUTERS
from holdfast.sim.rules import rules_of
from holdfast.sim.run import Simulation, SimulationSettings
from holdfast.sim.trace import Requests, arrange

SETTING = SimulationSettings(FetchHeld(), ROUTERS["round_robin"])


def trace_of(chains):
    n, counts = len(chains), np.array([len(chain) for chain in chains], np.int64)
    requests = Requests(
        np.arange(n, dtype=np.float64),
        counts * 4,
        np.ones(n, np.int64),
        np.full(n, -1, np.int32),
        np.full(n, np.nan),
    )
    return arrange("made", 4, requests, counts, np.array([i for c in chains for i in c], np.int64))


def fleet_of(tiers, policy="leaf_lru"):
    ladder = parse_ladder({"tiers": tiers, "engine": {"prefill": {}}, "token_bytes": 1_000})
    hardware = resolve(ladder, shipped(), 4)
    return Fleet(hardware, 1, rules_of(hardware, policy))


def tier(kind, blocks, **more):
    return {"kind": kind, "capacity_tokens": 4 * blocks, **more}


def test_a_tier_may_have_its_own_eviction_policy():
    fleet = fleet_of([tier("host", 4), tier("disk", 9, policy="s3fifo")], "cost_aware")
    assert isinstance(fleet.tier_states(0)[0].eviction, CostAware)
    assert isinstance(fleet.tier_states(1)[0].eviction, S3Fifo)


def test_an_unknown_policy_is_refused_with_its_option_or_key():
    with pytest.raises(ConfigError, match="--policy: 'coin' is not known; use one of: leaf_lru"):
        fleet_of([tier("host", 4)], "coin")
    with pytest.raises(ConfigError, match=r"tiers\.1\.policy: 'coin' is not known"):
        fleet_of([tier("host", 4), tier("disk", 4, policy="coin")])


def test_each_of_two_equal_tiers_is_compared_with_the_one_below_it(monkeypatch):
    saved = []

    def admission(options, saved_s):
        saved.append(saved_s)
        return AlwaysAdmit()

    monkeypatch.setattr("holdfast.sim.rules.admission", admission)
    cxl = tier("cxl", 80, read_bytes_per_s=4e9)
    fleet_of([cxl, cxl, tier("disk", 900, read_bytes_per_s=1e9)])
    upper, lower, lowest = saved
    assert upper(1_000_000_000) == 0
    assert lower(1_000_000_000) == pytest.approx(1 - 0.25)
    assert lowest is None


def test_a_disk_that_waits_for_the_second_use_is_written_less():
    chains = [[0, 1], [2, 3], [0, 1], [4, 5]]
    for admit, written in (("always", 6), ("second_touch", 2)):
        fleet = fleet_of([tier("host", 2), tier("disk", 40, admit=admit)])
        Simulation(trace_of(chains), fleet, SETTING).run()
        disk = fleet.tier_states(1)[0]
        assert disk.written == written
        assert (disk.declined > 0) == (admit == "second_touch")


def test_blocks_of_returning_sessions_stay_and_of_closed_sessions_are_evicted():
    chains = [[0, 1], [2, 3], [4, 5], [0, 1]]
    returns = np.array([3.0, NEVER, NEVER, NEVER])
    for hints, fetched in ((None, 0), (returns, 2)):
        fleet = fleet_of([tier("host", 4)], "cost_aware")
        setting = SETTING._replace(returns_s=hints)
        found = Simulation(trace_of(chains), fleet, setting).run()
        assert found.fetched[3].sum() == fetched


def test_a_session_whose_return_time_has_passed_is_expected_at_once():
    told = []

    class Told(LeafLru):
        def expect(self, rows, at_s):
            told.append(at_s)

    ladder = parse_ladder(
        {"tiers": [tier("host", 3)], "engine": {"prefill": {"a": 10.0}}, "token_bytes": 1_000}
    )
    fleet = Fleet(resolve(ladder, shipped(), 4), 1, lambda _: SimulatedRules(Told()))
    hints = np.array([2.0, 99.0, NEVER])  # the first returns after 2 s, and is answered after 10
    setting = SETTING._replace(returns_s=hints)
    Simulation(trace_of([[0, 1], [2, 3], [0, 1]]), fleet, setting).run()
    assert told == [10.0, 99.0, NEVER]


CYCLE = [list(range(n, n + 4)) for n in range(0, 240, 4)] * 40
"""60 contexts of 4 blocks, one after another, round and round."""


def cycled(**more):
    """Run the cycle over a host of 20 blocks, CXL of 80 and a disk for all; return the CXL."""
    fleet = fleet_of(
        [
            tier("host", 20, read_bytes_per_s=5e10, latency_s=1e-5),
            tier("cxl", 80, read_bytes_per_s=3e10, latency_s=1e-5, **more),
            tier("disk", 1_000, read_bytes_per_s=6e9, latency_s=8e-5),
        ]
    )
    served = Simulation(trace_of(CYCLE), fleet, SETTING).run()
    hits = int(served.fetched[:, 1].sum())
    return fleet.tier_states(1)[0], hits


def test_a_cycle_larger_than_cxl_is_moved_less_and_hits_more_under_the_guard():
    open_door, none = cycled(admit="always", thrash_guard=False)
    guarded, hits = cycled(admit="always")
    assert none == 0, "least recently used, a cycle never hits"
    assert hits > 0.1 * sum(map(len, CYCLE))
    assert guarded.written < 0.4 * open_door.written
    assert guarded.admission.figures()["pauses"] >= 1


def test_a_cycle_larger_than_cxl_is_kept_in_part_by_its_interval():
    open_door, _ = cycled(admit="always", thrash_guard=False)
    by_interval, hits = cycled()
    assert hits > 0.2 * sum(map(len, CYCLE)), "a third of it fits"
    assert by_interval.written < 0.2 * open_door.written
    assert by_interval.admission.figures()["pauses"] == 0


def test_blocks_promoted_from_disk_enter_cxl_and_remain_on_disk():
    chains = [[0, 1, 2, 3], *([n, n + 1, n + 2, n + 3] for n in range(10, 60, 4)), [0, 1, 2, 3]]
    fleet = fleet_of([tier("host", 4), tier("cxl", 8, admit="always"), tier("disk", 1_000)])
    Simulation(trace_of(chains), fleet, SETTING).run()
    memory = fleet.workers[0].memory
    assert [column[0] >= 0 for column in memory.index.places] == [True, True, True]


def test_prestage_reads_a_returning_context_from_disk_before_its_request():
    chains = [[0, 1], [2, 3], [4, 5], [0, 1]]
    times = np.array([0.0, 1.0, 2.0, 30.0])
    found = {}
    for prestage in (False, True):
        ladder = parse_ladder(
            {
                "tiers": [tier("host", 4), tier("disk", 40, read_bytes_per_s=1e6)],
                "engine": {"prefill": {"b": 0.1}},
                "token_bytes": 1_000,
            }
        )
        fleet = Fleet(resolve(ladder, shipped(), 4), 1, lambda _: SimulatedRules(LeafLru()))
        trace = trace_of(chains)._replace(time_s=times)
        returns = np.array([30.0, NEVER, NEVER, NEVER])
        setting = SETTING._replace(returns_s=returns, prestage=prestage)
        served = Simulation(trace, fleet, setting).run()
        found[prestage] = served.fetched[3].tolist()
    assert found == {False: [0, 2], True: [2, 0]}
