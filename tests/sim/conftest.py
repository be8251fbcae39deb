"""Small traces made of chains, and the shipped ones."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from holdfast.plan.planner import BestCut
from holdfast.sim.figures import SimulationFigures
from holdfast.sim.fleet import Fleet
from holdfast.sim.formats.load import load
from holdfast.sim.hardware import resolve
from holdfast.sim.ladder import parse_ladder
from holdfast.sim.profile import load_profile
from holdfast.sim.route import ROUTERS
from holdfast.sim.rules import rules_of
from holdfast.sim.run import Simulation, SimulationSettings
from holdfast.sim.trace import Requests, Trace, arrange

TRACES = Path(__file__).resolve().parents[2] / "traces"
BLOCK = 4


def small(chains: list[list[int]], short: list[int], gaps: list[int]) -> Trace:
    """A trace of these chains; input `i` lacks `short[i]` tokens and comes `gaps[i]` s after."""
    number = len(chains)
    counts = np.array([len(chain) for chain in chains], np.int64)
    tokens = np.maximum(counts * BLOCK - np.array(short, np.int64), 0)
    requests = Requests(
        np.cumsum(np.array(gaps, np.float64)),
        tokens,
        np.zeros(number, np.int64),
        np.full(number, -1, np.int32),
        np.full(number, np.nan),
    )
    ids = np.array([block for chain in chains for block in chain], np.int64)
    return arrange("small", BLOCK, requests, counts, ids)


@st.composite
def small_traces(draw: st.DrawFn) -> Trace:
    """Any trace of a dozen requests that share prefixes of up to six blocks of four tokens."""
    number = draw(st.integers(1, 12))

    def each(values: st.SearchStrategy) -> list:
        return draw(st.lists(values, min_size=number, max_size=number))

    chains = each(st.lists(st.integers(0, 2), max_size=6))
    return small(chains, each(st.integers(0, BLOCK - 1)), each(st.integers(0, 3)))


@cache
def _loaded(name: str) -> Trace:
    return load(TRACES / name)


@pytest.fixture(scope="session")
def shipped() -> Callable[[str], Trace]:
    """A shipped trace by a part of its file's name; loaded once."""

    def find(part: str) -> Trace:
        return _loaded(next(path.name for path in TRACES.glob("*.gz") if part in path.name))

    return find


@pytest.fixture(scope="session")
def any_trace() -> st.SearchStrategy[Trace]:
    """A strategy of small traces, to draw from."""
    return small_traces()


@pytest.fixture(scope="session")
def made() -> Callable[..., Trace]:
    """Make a trace of chains; see `small`."""
    return small


@pytest.fixture(scope="session")
def ran() -> Callable[..., SimulationFigures]:
    """Run a trace through a ladder that is written as in its file, on one worker."""

    def run(trace: Trace, ladder: dict) -> SimulationFigures:
        hardware = resolve(parse_ladder(ladder), load_profile(), trace.block_tokens)
        fleet, bare = (
            Fleet(one, 1, rules_of(one)) for one in (hardware, hardware._replace(tier_specs=[]))
        )
        setting = SimulationSettings(BestCut(), ROUTERS["least_queue"])
        served = Simulation(trace, fleet, setting).run()
        return SimulationFigures(trace, fleet, served, Simulation(trace, bare, setting).run())

    return run
