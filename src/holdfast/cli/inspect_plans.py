"""`holdfast inspect plans`: a node's recent plans, their reasons and their results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.cli.options import many
from holdfast.errors import NotFollowed

_SHORT_S = 0.1
_TINY_S = 1e-4
"""Times below these are shown in milliseconds and microseconds."""

_MINUTES_FROM_S = 120.0
_GB, _MB = 1e9, 1e6
_SLOW_GB_PER_S = 0.1
_CONTEXT_TOKENS = 1_000

_NOT_FOLLOWED = {
    NotFollowed.HAD: "the engine had more than it had reported",
    NotFollowed.LOST: "the engine had less than it had reported",
    NotFollowed.LATE: "the engine did not wait for the answer",
    NotFollowed.NOT_FETCHED: "the engine requested no fetch",
    NotFollowed.PREEMPTED: "the engine preempted the request",
    NotFollowed.ENDED: "the request ended before its first token",
    NotFollowed.RESET: "the engine reset its caches",
    NotFollowed.GONE: "the connection to the engine ended",
}


def plans_text(answer: Mapping[str, Any]) -> str:
    """Return the node's answer to `Plans` as lines: estimates first, then plans, newest first."""
    lines = _estimates(answer)
    lines.append("")
    if not answer["plans"]:
        lines.append("nothing was planned yet")
    for plan in answer["plans"]:
        tokens = f"{plan['prompt_tokens']:,} tokens" if plan["prompt_tokens"] else "some tokens"
        have = f", {plan['have_tokens']:,} there" if plan["have_tokens"] else ""
        age = plan["age_s"]
        ago = f"{age:.0f} s" if age < _MINUTES_FROM_S else f"{age / 60:.0f} min"
        lines.append(
            f"#{plan['plan']} {ago} ago, {plan['engine']}, {tokens}{have}: {plan['reason']}"
        )
        outcome = []
        expected, actual, why = plan["expected"], plan["actual"], plan.get("not_followed")
        if why:
            outcome.append(
                f"not carried out: {_NOT_FOLLOWED.get(why, 'the engine did something else')}"
            )
        if actual["fetched_s"] is not None:
            outcome.append(
                f"{many(plan['landed_blocks'], 'block')} in {_time(actual['fetched_s'])} "
                f"(expected {_time(expected['fetched_s'])}, {plan['outcome']})"
            )
        if actual["first_token_s"] is not None:
            counts = plan["recompute_s"] and not why
            estimate = f" (expected {_time(expected['first_token_s'])})" if counts else ""
            outcome.append(f"first token after {_time(actual['first_token_s'])}{estimate}")
        if outcome:
            lines.append("    " + "; ".join(outcome))
    return "\n".join(lines)


def _estimates(answer: Mapping[str, Any]) -> list[str]:
    """Return lines on the speeds of tiers and engines, and on how right earlier plans were."""
    lines = []
    for tier in answer["tiers"]:
        speed = f"{tier['bytes_per_s'] / _GB:.2f} GB/s"
        if tier["bytes_per_s"] < _SLOW_GB_PER_S * _GB:
            speed = f"{tier['bytes_per_s'] / _MB:.3g} MB/s"
        queued = f", {tier['queued_bytes'] / 2**20:.0f} MiB queued" if tier["queued_bytes"] else ""
        seen = many(tier["reads"], "read") if tier["reads"] else "assumed, not read yet"
        lines.append(
            f"  {tier['tier']:<8} {speed} after {_time(tier['latency_s'])}{queued} ({seen})"
        )
    for engine in answer["engines"]:
        name, cost = f"  {engine['engine']} {engine['fingerprint'][:8]}", engine["cost"]
        if cost is None:
            lines.append(f"{name}: has not reported how fast it computes")
            continue
        lines.append(
            f"{name}: {_time(cost['b'])} a token, {_time(cost['c'] * _CONTEXT_TOKENS)} more a "
            f"token for every {_CONTEXT_TOKENS:,} tokens before it, {_time(cost['a'])} a step "
            f"({many(engine['steps'], 'step')})"
        )
    right = answer["right"]
    if right["ended"]:
        lines.append(
            f"  {right['within_25_percent']} of {many(right['ended'], 'plan')} within 25 % of what "
            f"was expected, half of them within {100 * right['median_error']:.0f} %; "
            f"{right['late']} late"
        )
    else:
        lines.append("  no plan with an expectation has ended yet")
    if right.get("not_followed"):
        lines.append(f"  {many(right['not_followed'], 'plan')} not carried out, and not counted")
    return lines


def _time(seconds: float) -> str:
    rounded = float(f"{seconds:.2g}")  # before the unit is chosen: 99.9 ms are 0.10 s
    if rounded >= _SHORT_S:
        return f"{seconds:.2f} s"
    if 0 < rounded < _TINY_S:
        return f"{1e6 * rounded:.2g} us"
    return f"{1000 * rounded:.2g} ms"
