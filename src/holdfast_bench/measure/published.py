"""Published results about tiers and shared caches, reproduced by simulation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from holdfast.plan.planner import FetchHeld
from holdfast.sim.explain import find_claim
from holdfast.sim.fleet import Fleet
from holdfast.sim.hardware import prefill_cost, resolve
from holdfast.sim.ladder import parse_ladder
from holdfast.sim.model.catalogue import load_model
from holdfast.sim.profile import shipped
from holdfast.sim.route import ROUTERS, Router, two_choices
from holdfast.sim.rules import rules_of
from holdfast.sim.run import Simulation, SimulationSettings
from holdfast.sim.trace import Trace
from holdfast_bench.measure.calibration import first_tokens_s

TOGETHER = {"conversation": 2.22, "synthetic": 2.36}
"""Mooncake (FAST'25), figure 10: hits of one cache of 30 M tokens, relative to ten of 3 M."""

FETCH_RULE_GB_PER_S = {"a800": 5.9, "h800": 18.6}
"""The same paper, equation 2: bandwidth above which eight GPUs should fetch a prefix."""

FETCH_RULE_TOLERANCE = 0.01

NODES, NODE_TOKENS = 10, 3e6
TOGETHER_TOLERANCE = 0.15

# Llama-2-70B on eight A800, as in that paper: 2 * 70e9 FLOP per token at half of 2.5 PFLOP/s.
_A800 = {"prefill": {"a": 0.02, "b": 1.1e-4, "c": 2.1e-9}}

H20_FIRST_TOKEN_S = {"device": 0.111, "host": 0.272, "pool": 0.97, "computed": 15.2}
"""gahow/agentic-kvc: seconds with Qwen3-Coder-30B-A3B on an H20, 64K tokens from each tier."""

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
    """Return the hits of one cache for ten workers, divided by those of one cache per worker.

    The result depends on the router, which the paper does not name: it is far higher with
    `round_robin`, and 1.0 with `longest_prefix`. Used here is `two_choices`, a router between the
    two, as a mean over `draws` random seeds.
    """
    together = {"kind": "pool", "capacity_tokens": NODES * NODE_TOKENS}
    apart = {"kind": "host", "capacity_tokens": NODE_TOKENS}
    hits = [token_hit(trace, apart, two_choices(draw), NODES, _A800) for draw in range(draws)]
    hit = token_hit(trace, together, ROUTERS["round_robin"], NODES, _A800)
    return hit / float(np.mean(hits))


def fetch_rule_gb_per_s(gpu: str) -> float:
    """Return the rule's result for an 8K prefix of a 70B (`holdfast size --explain fetch-rule`)."""
    return find_claim("fetch-rule").work_out().figures[f"{gpu}_gb_per_s"]


def h20_first_token_s(tier: str) -> float:
    """Send one prompt twice to an H20; return the second request's time to first token.

    The published time of a full hit in device memory, 0.111 s, is taken as the fixed cost of each
    prefill. The GPU's utilisation is not published, so its peak FLOP/s are used.
    """
    model, profile = load_model("Qwen3-30B-A3B"), shipped()
    gpu, _ = profile.gpu("H20")
    cost = prefill_cost(model, gpu.flop_per_s.mid, H20_FIRST_TOKEN_S["device"])
    engine = {"gpu": "H20", "prefill": cost._asdict()}
    hardware = resolve(
        parse_ladder({"tiers": [_H20_TIERS[tier]], "engine": engine}), profile, _BLOCK_TOKENS, model
    )
    return first_tokens_s(hardware, _H20_TOKENS)[1]


def token_hit(
    trace: Trace,
    tier: dict[str, Any],
    router: Router,
    workers: int,
    engine: Mapping[str, Mapping[str, float]],
) -> float:
    """Return the token hit rate of workers with one tier that evicts by leaf-first LRU."""
    ladder = parse_ladder({"tiers": [tier], "engine": engine})
    hardware = resolve(ladder, shipped(), trace.block_tokens)
    fleet = Fleet(hardware, workers, rules_of(hardware, "leaf_lru"))
    found = Simulation(trace, fleet, SimulationSettings(FetchHeld(), router)).run()
    return found.token_hit(trace)
