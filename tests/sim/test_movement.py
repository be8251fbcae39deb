"""Simulated tiers below memory take what others evict, and what is fetched, as a store's do."""

import numpy as np
import pytest

from holdfast.errors import ConfigError
from holdfast.plan.planner import FetchHeld
from holdfast.policy.admit import Admission
from holdfast.sim.fleet import Fleet
from holdfast.sim.hardware import resolve
from holdfast.sim.ladder import parse_ladder
from holdfast.sim.memory import SimulatedRules
from holdfast.sim.profile import shipped
from holdfast.sim.route import ROUTERS
from holdfast.sim.run import Simulation, SimulationSettings
from holdfast.sim.tier_order import FifoOrder
from holdfast.sim.trace import Requests, arrange

SETTING = SimulationSettings(FetchHeld(), ROUTERS["round_robin"])
BLOCK = 4
KEEPS = {"admit_fetched": "never", "admit_evicted": "never"}
TAKES_ALL = {"write": "on_eviction", "admit_evicted": "always", "admit_fetched": "never"}


class Refuses(Admission):
    """A tier's rule that admits nothing."""

    def allows(self, block, now_s):
        return False


class RefusesFirst(Admission):
    """A tier's rule that admits all blocks but the first one that it is asked about."""

    name = b""

    def allows(self, block, now_s):
        self.name = self.name or block.name
        return block.name != self.name


def trace_of(chains):
    n, counts = len(chains), np.array([len(chain) for chain in chains], np.int64)
    requests = Requests(
        np.arange(n, dtype=np.float64),
        counts * BLOCK,
        np.ones(n, np.int64),
        np.full(n, -1, np.int32),
        np.full(n, np.nan),
    )
    ids = np.array([i for chain in chains for i in chain], np.int64)
    return arrange("made", BLOCK, requests, counts, ids)


def tier(kind, blocks, **more):
    return {"kind": kind, "capacity_tokens": BLOCK * blocks, **more}


def simulate(chains, tiers, admissions=(), workers=1):
    """Run chains of blocks through a host of two blocks and `tiers`; return fetches and tiers.

    `admissions`: the rules of the tiers, host first, if they are not to admit everything.
    """
    ladder = {"tiers": [tier("host", 2), *tiers], "engine": {"prefill": {}}, "token_bytes": 1_000}
    rules = iter(admissions or [None] * 2 * (len(tiers) + 1))
    fleet = Fleet(
        resolve(parse_ladder(ladder), shipped(), BLOCK),
        workers,
        lambda _: SimulatedRules(FifoOrder(), next(rules), evicts_by_itself=True),
    )
    served = Simulation(trace_of(chains), fleet, SETTING).run()
    return served.fetched.tolist(), [fleet.tier_states(n)[0] for n in range(len(tiers) + 1)]


def test_what_a_tier_evicts_moves_to_the_next_one_that_takes_it():
    tiers = [tier("disk", 2, **KEEPS), tier("object", 9, **TAKES_ALL)]
    fetched, states = simulate([[0, 1], [2, 3], [4, 5], [0, 1]], tiers)
    assert fetched[3] == [0, 0, 2]
    assert (states[2].demoted, states[2].written) == (4, 4)


def test_what_was_used_once_is_lost_if_a_tier_takes_only_what_was_reused():
    tiers = [tier("disk", 2, **KEEPS), tier("object", 9, write="on_eviction")]
    fetched, states = simulate([[0, 1], [2, 3], [4, 5], [0, 1]], tiers)
    assert fetched[3] == [0, 0, 0]
    assert states[2].written == 0


def test_what_was_used_twice_moves_down_and_comes_back_up():
    tiers = [tier("disk", 2), tier("object", 9, write="on_eviction")]
    chains = [[0, 1], [0, 1], [2, 3], [4, 5], [0, 1], [6, 7]]
    fetched, states = simulate(chains, tiers)
    assert fetched[4] == [0, 0, 2]
    assert states[1].written == 10, "the disk keeps what was fetched from below"
    assert states[2].written == 2, "the object tier had it when the disk evicted it again"


def test_a_block_whose_copies_are_gone_counts_as_new():
    tiers = [tier("disk", 2, **KEEPS), tier("object", 9, write="on_eviction")]
    chains = [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3], [4, 5]]
    _, states = simulate(chains, tiers)
    assert states[2].written == 0


def test_a_tier_that_a_slower_one_backs_up_gives_it_nothing():
    tiers = [tier("disk", 2, **KEEPS), tier("object", 9)]
    _, states = simulate([[0, 1], [2, 3], [4, 5]], tiers)
    assert (states[2].written, states[2].demoted) == (6, 0)


def test_what_the_nearest_tier_does_not_admit_goes_to_the_next_one():
    tiers = [tier("disk", 2, **KEEPS), tier("disk", 9, **TAKES_ALL), tier("object", 9, **TAKES_ALL)]
    admissions = [None, None, None, Refuses()]  # the shared tier's rules are made first
    _, states = simulate([[0, 1], [2, 3], [4, 5]], tiers, admissions)
    assert (states[2].declined, states[2].written) == (4, 0)
    assert states[3].demoted == 4


def test_a_chain_that_own_and_shared_tiers_hold_in_turns_is_fetched_whole():
    tiers = [tier("disk", 9, **KEEPS), tier("object", 9, **TAKES_ALL)]
    admissions = [None, None, RefusesFirst()]  # the shared tier's rules are made first
    fetched, _ = simulate([[0], [0, 1], [2, 3], [0, 1]], tiers, admissions)
    assert fetched[3] == [0, 1, 1]


def test_only_the_nearest_tier_that_takes_a_block_gets_it():
    tiers = [tier("disk", 2, **KEEPS), tier("disk", 9, **TAKES_ALL), tier("object", 9, **TAKES_ALL)]
    _, states = simulate([[0, 1], [2, 3], [4, 5]], tiers)
    assert [state.demoted for state in states] == [0, 0, 4, 0]


@pytest.mark.parametrize(("take", "writes"), [("never", 4), ("reused", 6), ("always", 6)])
def test_what_is_fetched_from_below_is_kept_above_as_the_tier_says(take, writes):
    tiers = [tier("disk", 2, admit_fetched=take), tier("object", 9)]
    fetched, states = simulate([[0, 1], [2, 3], [0, 1]], tiers)
    assert fetched[2] == [0, 0, 2]
    assert states[1].written == writes


def test_moves_beyond_their_limit_are_refused():
    limited = TAKES_ALL | {"move_limit": 1, "write_wait_s": 20_000}  # 2 blocks of 8 KiB
    tiers = [tier("disk", 2, **KEEPS), tier("object", 9, **limited)]
    _, states = simulate([[0, 1], [2, 3], [4, 5]], tiers)
    assert (states[2].demoted, states[2].refused) == (2, 2)


@pytest.mark.parametrize("kind", ["device", "host"])
@pytest.mark.parametrize(
    ("key", "value"), [("admit_evicted", "always"), ("admit_fetched", "never"), ("move_limit", 9)]
)
def test_memory_has_no_rules_of_tiers_below_it(kind, key, value):
    with pytest.raises(ConfigError, match=rf"tiers\.0\.{key}: .* memory gets all blocks"):
        parse_ladder({"tiers": [tier(kind, 4, **{key: value})]})


def test_a_limit_that_moves_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"tiers\.0\.move_limit: 0 B moves nothing; raise it"):
        parse_ladder({"tiers": [tier("disk", 4, move_limit=0)]})
