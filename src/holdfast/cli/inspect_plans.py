"""`holdfast inspect plans`: what a node decided lately, why, and how it turned out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_SHORT_S = 0.1
_MINUTE_S = 120.0
_GB = 1e9


def plans_text(answer: Mapping[str, Any]) -> str:
    """Return the node's answer to `Plans` as lines: estimates first, then plans, newest first."""
    lines = [
        *map(_tier, answer["tiers"]),
        *map(_engine, answer["engines"]),
        _right(answer["right"]),
    ]
    plans = [line for plan in answer["plans"] for line in _plan(plan)]
    return "\n".join([*lines, "", *(plans or ["nothing was planned yet"])])


def _tier(tier: Mapping[str, Any]) -> str:
    queued = f", {tier['queued_bytes'] / 2**20:.0f} MiB in line" if tier["queued_bytes"] else ""
    seen = f"{tier['reads']} reads" if tier["reads"] else "assumed, not read yet"
    speed = tier["bytes_per_s"] / _GB
    return (
        f"  {tier['tier']:<8} {speed:.2f} GB/s behind {_time(tier['latency_s'])}{queued} ({seen})"
    )


def _engine(engine: Mapping[str, Any]) -> str:
    name, cost = f"  {engine['engine']} {engine['fingerprint'][:8]}", engine["cost"]
    if cost is None:
        return f"{name}: has not told how fast it computes"
    return (
        f"{name}: {1e6 * cost['b']:.3g} us a token, {1e12 * cost['c']:.3g} ps a pair of tokens, "
        f"{_time(cost['a'])} a step ({engine['steps']} steps)"
    )


def _right(right: Mapping[str, Any]) -> str:
    if not right["ended"]:
        return "  no plan with an expectation has ended yet"
    return (
        f"  {right['within_25_percent']} of {right['ended']} plans within 25 % of what was "
        f"expected, half of them within {100 * right['median_error']:.0f} %; {right['late']} late"
    )


def _plan(plan: Mapping[str, Any]) -> Iterator[str]:
    tokens = f"{plan['prompt_tokens']:,} tokens" if plan["prompt_tokens"] else "some tokens"
    have = f", {plan['have_tokens']:,} there" if plan["have_tokens"] else ""
    age = plan["age_s"]
    ago = f"{age:.0f} s" if age < _MINUTE_S else f"{age / 60:.0f} min"
    yield f"#{plan['plan']} {ago} ago, {plan['engine']}, {tokens}{have}: {plan['reason']}"
    came = []
    expected, actual = plan["expected"], plan["actual"]
    if actual["fetched_s"] is not None:
        came.append(
            f"{plan['landed_blocks']} blocks in {_time(actual['fetched_s'])} "
            f"(expected {_time(expected['fetched_s'])}, {plan['outcome']})"
        )
    if actual["first_token_s"] is not None:
        promised = f" (expected {_time(expected['first_token_s'])})" if plan["recompute_s"] else ""
        came.append(f"first token after {_time(actual['first_token_s'])}{promised}")
    if came:
        yield "    " + "; ".join(came)


def _time(seconds: float) -> str:
    rounded = float(f"{seconds:.2g}")  # before the unit is chosen: 99.9 ms are 0.10 s
    return f"{seconds:.2f} s" if rounded >= _SHORT_S else f"{1000 * rounded:.2g} ms"
