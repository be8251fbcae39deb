"""What others published about tiers and shared caches, as simulations that come out alike."""

from __future__ import annotations

from typing import Any

import numpy as np

from holdfast.plan.planner import BestCut, FetchHeld
from holdfast.sim.explain import find_claim
from holdfast.sim.fleet import Fleet
from holdfast.sim.hardware import prefill_cost, resolve
from holdfast.sim.ladder import parse_ladder
from holdfast.sim.model import load_model
from holdfast.sim.profile import shipped
from holdfast.sim.route import ROUTERS, Router, two_choices
from holdfast.sim.rules import rules_of
from holdfast.sim.run import Setting, Simulation
from holdfast.sim.trace import UNKNOWN, Requests, Trace, arrange

TOGETHER = {"conversation": 2.22, "synthetic": 2.36}
"""Mooncake (FAST'25), figure 10: hits of one cache of 30 M tokens over those of ten of 3 M."""

FETCH_RULE_GB_PER_S = {"a800": 5.9, "h800": 18.6}
"""The same paper, equation 2: above so much a prefix is worth fetching, with eight of these."""

FETCH_RULE_TOLERANCE = 0.01

NODES, NODE_TOKENS = 10, 3e6
TOGETHER_TOLERANCE = 0.15

# Llama-2-70B on eight A800, as in that paper: 2 * 70e9 FLOP a token at half of 2.5 PFLOP/s.
_A800 = {"prefill": {"a": 0.02, "b": 1.1e-4, "c": 2.1e-9}}

H20_FIRST_TOKEN_S = {"device": 0.111, "host": 0.272, "pool": 0.97, "computed": 15.2}
"""gahow/agentic-kvc: Qwen3-Coder-30B-A3B on an H20, a prompt of 64K tokens from each tier."""

H20_TOLERANCE = 0.20
_H20_TIERS: dict[str, dict[str, Any]] = {
    "device": {"kind": "device", "capacity": "30 GiB"},
    "host": {"kind": "host", "medium": "ddr5", "units": 8},
    "pool": {"kind": "pool", "capacity": "1 TiB", "read_bytes_per_s": 6.6e9},
    "computed": {"kind": "device", "capacity_tokens": 512},
}
_H20_TOKENS = 65_536
_BLOCK_TOKENS = 64


def together_over_apart(trace: Trace, draws: int = 3) -> float:
    """Return how many times the hits one cache for ten workers has over one cache for each.

    The paper does not say how requests were routed between nodes that share nothing, and that
    decides: in turns it is 3.5 and 3.9, by the longest prefix 1.0 and 1.0. Taken here are two
    choices, neither blind nor all-seeing, on average over some draws.
    """
    together = {"kind": "pool", "capacity_tokens": NODES * NODE_TOKENS}
    apart = {"kind": "host", "capacity_tokens": NODE_TOKENS}
    hits = [_hit(trace, apart, two_choices(draw)) for draw in range(draws)]
    return _hit(trace, together, ROUTERS["round_robin"]) / float(np.mean(hits))


def fetch_rule_gb_per_s(gpu: str) -> float:
    """Work the rule out for an 8K prefix of a 70B, as `holdfast size --explain fetch-rule` does."""
    return find_claim("fetch-rule").work_out().figures[f"{gpu}_gb_per_s"]


def h20_first_token_s(tier: str) -> float:
    """Ask twice for one prompt on an H20, far apart; return the seconds of the second.

    Published is that a whole hit in device memory takes .111 s: what each prefill takes besides.
    Nothing says what share of its peak the GPU reached, so all of it is taken.
    """
    model, profile = load_model("Qwen3-30B-A3B"), shipped()
    gpu, _ = profile.gpu("H20")
    cost = prefill_cost(model, gpu.flop_per_s.mid, H20_FIRST_TOKEN_S["device"])
    engine = {"gpu": "H20", "prefill": cost._asdict()}
    hardware = resolve(
        parse_ladder({"tiers": [_H20_TIERS[tier]], "engine": engine}), profile, _BLOCK_TOKENS, model
    )
    lengths = np.full(2, _H20_TOKENS, np.int64)
    times, never = np.array([0.0, 1e3]), np.full(2, np.nan)
    requests = Requests(times, lengths, lengths, np.full(2, UNKNOWN, np.int32), never)
    blocks = np.tile(np.arange(_H20_TOKENS // _BLOCK_TOKENS), 2)
    trace = arrange("twice", _BLOCK_TOKENS, requests, lengths // _BLOCK_TOKENS, blocks)
    fleet = Fleet(hardware, 1, rules_of(hardware))
    found = Simulation(trace, fleet, Setting(BestCut(), ROUTERS["round_robin"])).run()
    return float(found.first_s[1] - found.arrived_s[1])


def _hit(trace: Trace, tier: dict[str, Any], router: Router) -> float:
    """Return the share of input tokens that ten workers with one tier find."""
    ladder = parse_ladder({"tiers": [tier], "engine": _A800})
    hardware = resolve(ladder, shipped(), trace.block_tokens)
    fleet = Fleet(hardware, NODES, rules_of(hardware, "leaf_lru"))
    found = Simulation(trace, fleet, Setting(FetchHeld(), router)).run()
    reused = np.minimum(found.fetched.sum(axis=1) * trace.block_tokens, trace.input_tokens)
    return float(reused.sum()) / max(1, int(trace.input_tokens.sum()))
